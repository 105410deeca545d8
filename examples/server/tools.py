"""How a model calls tools and reasons: both are read off its chat template.

A template that knows tools writes an assistant's `tool_calls` as its model was trained to write them.
Template.format renders messages with names and values that occur nowhere else: what stands before,
between and behind them is the format (llama.cpp compares renderings, too: docs/autoparser.md there).
rules() holds the model to it, and a Reader takes the answer apart.

In the texts here a control token is written as its mark, which no other token can write.
"""

import copy
import functools
import itertools
import json
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any, NamedTuple

import llama2

SECRET = secrets.token_hex(8)
MARK = re.compile(f"(§{SECRET}:\\d+§)")
NAMES = ["zqfirst", "zqsecond", "zqthird"]
KEY, VALUE, CONTENT = "zqkey", "zqvalue", "zqcontent"
CALL_ID = "callid000"  # Mistral's templates want nine letters or digits
ARGUMENTS = re.compile(rf'{{\s*"{KEY}"\s*:\s*"{VALUE}"\s*}}')
JSON = json.JSONDecoder()
TAG = re.compile(r"</([\w:]*think)>|\[/THINK]")  # the end of reasoning


class Format(NamedTuple):
    """A call is before + name + between + arguments (a JSON object) + after.

    Further calls: separator + name + between + arguments, in front of `after`.
    """

    before: str
    between: str
    separator: str | None  # None: an answer has one call
    after: str
    marker: str  # the start of `before` that begins a call; "": a tool's name decides
    arguments_as_text: bool = False  # how the template takes them
    no_content: str | None = ""  # the content of a message that only calls
    problem: str = ""  # why the format is not known

    @property
    def is_json(self) -> bool:
        """Whether a call is a JSON object and nothing else. Llama 3 then writes any white space, and
        a "type" in front, or not; llama.cpp has a rule for it, too."""
        return not self.marker and self.before.startswith("{")


@dataclass
class Answer:
    """What an answer may be."""

    form: Format | None = None  # how it calls a tool
    names: list[str] = field(default_factory=list)  # of the tools
    schemas: list[dict] = field(default_factory=list)  # their arguments'; behind them, its text's
    strict: list[bool] = field(default_factory=list)  # whether arguments must fit all of a schema
    forced: bool = False  # it calls a tool at once
    several: bool = True  # it may call more than once
    reasoning: tuple[str, str] | None = None  # what stands around reasoning
    is_reasoning: bool = False  # it begins within


def visible(tokenizer: llama2.Tokenizer, ids: Iterable[int]) -> llama2.Tokenizer:
    """The tokenizer with marks as the texts of these control tokens."""
    shown = copy.copy(tokenizer)
    marks = {i: f"§{SECRET}:{i}§".encode() for i in ids if not tokenizer.token_bytes(i)}
    shown.token_bytes = lambda i: marks.get(i) or tokenizer.token_bytes(i)
    return shown


def token_of(mark: str) -> int:
    """The id of a mark's token."""
    return int(mark.strip("§").partition(":")[2])


def tokens_in(answer: Answer) -> list[int]:
    """The control tokens by which an answer is taken apart."""
    return [token_of(mark) for mark in MARK.findall(f"{answer.form}{answer.reasoning}")]


def name_tokens(tokenizer: llama2.Tokenizer, text: str) -> str:
    """A text with the names of control tokens in place of their marks."""
    return MARK.sub(lambda m: tokenizer.vocabulary.pieces[token_of(m[0])], text)


# --------------------------------------------------------------------------------------------------
# Reading a template


@dataclass
class Template:
    """A chat template that writes texts with marks."""

    tokenizer: llama2.Tokenizer  # a visible() one
    source: str
    stops: list[str]  # texts and marks that end an answer

    def render(self, *answers: dict[str, Any], prompt: bool = False) -> str:
        """A question and answers to it; `prompt`: and what begins another. Raises ValueError."""
        schema = {"type": "object", "properties": {KEY: {"type": "string", "description": "d"}}}
        tools = [
            {"type": "function", "function": {"name": n, "description": "d", "parameters": schema}}
            for n in NAMES
        ]
        source = f"{{% set add_generation_prompt = {str(prompt).lower()} %}}{self.source}"
        messages = [{"role": "user", "content": "hi"}, *answers]
        return self.tokenizer.decode(
            llama2.encode_chat(self.tokenizer, messages, source, tools=tools)
        )

    def render_calls(self, count: int, as_text: bool, content: str | None) -> str:
        """A question and an answer with so many calls."""
        arguments = json.dumps({KEY: VALUE}) if as_text else {KEY: VALUE}
        functions = [{"name": name, "arguments": arguments} for name in NAMES[:count]]
        calls = [{"id": CALL_ID, "type": "function", "function": f} for f in functions]
        return self.render({"role": "assistant", "content": content, "tool_calls": calls})

    @functools.cached_property
    def format(self) -> Format:
        """How a template writes calls, or why that is not known."""
        problems = []
        for content in ("", None):  # some templates take content, or arguments, only in one form
            for as_text in (False, True):
                try:
                    return read_format_of(self, as_text, content)
                except ValueError as error:
                    problems.append(str(error))
        # Rather than what the template raised.
        reason = min(problems, key=lambda text: text.startswith("the chat template:"))
        problem = "the chat template has no place for tools that is understood"
        problem += f" ({name_tokens(self.tokenizer, reason):.150}); --chat-template names another"
        return Format("", "", None, "", "", problem=problem)

    @functools.cached_property
    def reasoning(self) -> tuple[str, str] | None:
        """What stands before and behind reasoning, by the tag in a template; None if there is none."""
        tag = TAG.search(self.source)
        if not tag:
            return None
        pieces = self.tokenizer.vocabulary.pieces
        texts = tag[0].replace("/", ""), tag[0]
        return tuple(self.tokenizer.decode([pieces.index(t)]) if t in pieces else t for t in texts)


def read_format_of(template: Template, as_text: bool, no_content: str | None) -> Format:
    """How a template writes calls, for arguments as a dict or as text, and for a content that is not
    there in one form.
    """
    # 1. Where the call begins: behind what begins an answer; else where one without calls differs.
    answer = template.render_calls(1, as_text, no_content)
    plain = template.render({"role": "assistant", "content": CONTENT})
    head = template.render(prompt=True)
    if not answer.startswith(head):
        head = commonprefix([answer, plain]).rstrip("<[")
    rest = answer.removeprefix(head)
    before, name, behind = rest.partition(NAMES[0])
    if template.reasoning:  # which may be empty
        before = before.rpartition(template.reasoning[1])[2]
    before = before.lstrip()
    if not before and not plain.startswith(head + CONTENT):
        raise ValueError("a name begins every answer")

    # 2. The name, the arguments, and what is around them.
    parts, stops = ARGUMENTS.split(behind), finder(template.stops)
    if not name or len(parts) != 2:
        raise ValueError(f"a call becomes {until(stops, rest, True)[0]!r}")
    for stop in template.stops:
        if stop in before:  # the answer would end there
            raise ValueError(f"a call begins with {stop}, which ends an answer")
    between, after = parts
    after = until(stops, after, True)[0].rstrip()
    if between.endswith("{"):  # arguments as text in a form that is not JSON
        raise ValueError("its arguments are not JSON")

    # 3. Several calls, if the same stands between any two.
    separator = None
    with suppress(ValueError):  # the template takes one call
        calls = template.render_calls(3, as_text, no_content)
        _, *middle, _ = ARGUMENTS.split(calls)
        pairs = zip(middle, NAMES[1:], strict=True)
        first, second = (text.removesuffix(name + between) for text, name in pairs)
        if first == second == until(stops, first, True)[0]:
            separator = first

    # 4. What begins a call: a control token, or what stands before its JSON.
    marker = re.split(r'\[?\s*\{\s*"', before)[0].rstrip().partition(CALL_ID)[0]
    if mark := MARK.match(marker):
        marker = mark[0]
    return Format(before, between, separator, after, marker, as_text, no_content)


# --------------------------------------------------------------------------------------------------
# Holding an answer to the format: rules for llguidance, in which valueN is the schema of tool N


def up_to(rule: str, end: str, start: str = "(?s:.*)", but: str = "") -> str:
    """A rule for free text, which begins as `start`, up to the first `end`: both are patterns."""
    if MARK.fullmatch(end):
        return f"{rule}: {rule.upper()} <[{token_of(end)}]>\n{rule.upper()}: /{start}/{but}"
    return f"{rule}[lazy]: {rule.upper()}\n{rule.upper()}: /{start}{end}/{but}"


def escape(text: str) -> str:
    """A text as a regular expression, for Python and in a rule. A mark stays what it is."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def pattern(form: Format, text: str) -> str:
    """A part of a call as a regular expression, for any id of a call."""
    if not form.is_json:
        return f"[a-zA-Z0-9]{{{len(CALL_ID)}}}".join(map(escape, text.split(CALL_ID)))
    space = r"[ \t\n]{0,40}"
    parts = re.split(r"([{}:,])", text)
    parts = [space + escape(p) + space if p in set("{}:,") else escape(p.strip()) for p in parts]
    if text.startswith(form.before):
        parts[1] += f'(?:"type"{space}:{space}"function"{space},{space})?'
    return "".join(parts)


def items(form: Format, text: str) -> str:
    """A part of a call, as items of a rule."""
    return " ".join(
        f"<[{token_of(part)}]>" if MARK.fullmatch(part) else f"/{pattern(form, part)}/"
        for part in MARK.split(text)
        if part
    )


def triggers(answer: Answer) -> list[str]:
    """The text that begins a call of each tool."""
    form = answer.form
    if not form:
        return []
    rest = form.between if not form.before else form.between[:1]
    return [form.marker or form.before + name + rest for name in answer.names]


def rules(answer: Answer) -> str:
    """The rules of an answer: reasoning, then text or calls."""
    form = answer.form
    lines = ["SPACE: /\\s{0,4}/"]
    has_schema = len(answer.schemas) > len(answer.names)
    think = but = ""
    if answer.reasoning:
        start, end = map(escape, answer.reasoning)
        think = "think?"
        if answer.is_reasoning:
            think = "think"
            lines.append(up_to("think", end))
        elif MARK.fullmatch(start):
            lines += [f"think: <[{token_of(start)}]> thought", up_to("thought", end)]
        else:
            thought = f"\\s*{start}(?s:.*)"
            but = f" & ~/{thought}/"
            lines.append(up_to("think", end, thought))
        if answer.forced or has_schema:
            think += " SPACE"

    choices = []
    if has_schema:
        choices.append(f"value{len(answer.names)}")
    elif not answer.forced:
        choices.append("FREE")
        lines.append(f"FREE: /(?s:.*)/{but}")
    if form:
        choices.append("calls")
        calls = [f"{items(form, n + form.between)} value{i}" for i, n in enumerate(answer.names)]
        lines.append(f"call: {' | '.join(calls)}")
        first = f"{items(form, form.before)} call"
        if choices[0] == "FREE":
            leads, begun = [], triggers(answer)
            for i, (name, trigger) in enumerate(zip(answer.names, begun)):
                lead = f"lead{begun.index(trigger)}"
                rest = (form.before + name + form.between)[len(trigger) :]
                leads.append(f"{lead} {items(form, rest)} value{i}")
                lines.append(up_to(lead, pattern(form, trigger), but=but))
            first = f"({' | '.join(leads)})"
        if answer.several and form.separator is not None:
            first += f" ({items(form, form.separator)} call)*"
        lines.append(f"calls: {first} {items(form, form.after)}")
    return "\n".join([f"start: {think} ({' | '.join(choices)})", *dict.fromkeys(lines)])


# --------------------------------------------------------------------------------------------------
# Taking an answer apart


class Reader:
    """The text of an answer -> deltas of a message as in OpenAI's streams: reasoning, content, calls.

    Each time the whole text is read, and what the message has more than before is the delta. What may
    turn out to begin a call or to end reasoning is no part of it until that is decided.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.text = ""
        self.message = {"role": "assistant", "content": ""}
        self.is_reasoning = False  # whether the text ends within reasoning
        self.secret = secrets.token_hex(4)[:7]
        self.begun = finder(triggers(answer))
        if form := answer.form:
            name = f"({'|'.join(map(re.escape, answer.names))})"
            before, between, separator = (pattern(form, text or "") for text in form[:3])
            self.call = re.compile(rf"\s*(?:{before}|{separator}){name}{between}")
            if form.is_json:
                heads = ["".join(text.split()) for text in triggers(answer)]
                heads += [text.replace("{", '{"type":"function",', 1) for text in heads]
                self.begun = finder(heads, r"\s*")

    def feed(self, text: str, ended: bool = False) -> dict[str, Any]:
        """The delta that more text makes; `ended`: it is the last."""
        self.text += text
        before, self.message = self.message, self.read(ended)
        return added(before, self.message)

    def read(self, ended: bool) -> dict[str, Any]:
        """The message until now."""
        answer, text = self.answer, self.text
        message = {"role": "assistant", "content": ""}
        if answer.reasoning:
            start, end = answer.reasoning
            text = text.lstrip()
            if not ended and start.startswith(text):
                return message
            if answer.is_reasoning or text.startswith(start):
                thought, text = until(finder([end]), text.removeprefix(start).lstrip(), ended)
                if thought:  # under the names that llama-server and vLLM give to it
                    message |= {"reasoning_content": thought, "reasoning": thought}
                self.is_reasoning = not text
                text = text.removeprefix(end).lstrip()
        if not answer.forced:
            message["content"], text = until(self.begun, text, ended)
        message["content"] = MARK.sub("", message["content"])  # of a token in a wrong place
        if answer.form and (calls := self.read_calls(text)):
            message["tool_calls"] = calls
            message["content"] = message["content"] or None
        return message

    def read_calls(self, text: str) -> list[dict[str, Any]]:
        """The calls of which names and all in front of the arguments are there."""
        calls = []
        while match := self.call.match(text):
            start = match.end()
            try:
                end = JSON.raw_decode(text, start)[1]
            except ValueError:  # there is more to come
                end = len(text)
            function = {"name": match[1], "arguments": text[start:end]}
            call = {"id": f"{self.secret}{len(calls):02}", "type": "function"}
            calls.append({**call, "function": function})
            text = text[end:]
        return calls


def finder(ends: list[str], space: str = "") -> re.Pattern[str]:
    """A pattern that finds the first of some texts, and has a group then; else as much of one as stands
    at the end of a text, or that end. `space` is a pattern for what may follow each letter.
    """
    wanted = [r"\Z"]
    for end in {*ends}:
        letters = [re.escape(letter) + space for letter in end]
        wanted.append(r"(?:\Z|".join(letters) + "()" + ")" * (len(letters) - 1))
    return re.compile("|".join(wanted))


def until(ends: re.Pattern[str], text: str, ended: bool) -> tuple[str, str]:
    """The text in front of the first of `ends`, and the rest. Where none is there, the rest is empty,
    and the text lacks what may become one, unless it has ended."""
    match = ends.search(text)
    if not match.lastindex and (ended or not ends.groups):
        return text, ""
    place = match.start()
    return text[:place].rstrip(), text[place:] if match.lastindex else ""


def added(before: Any, after: Any) -> Any:
    """What a message, or a part of it, has more than before."""
    if isinstance(after, dict):
        before = before or {}
        more = {key: added(before.get(key), value) for key, value in after.items()}
        return {key: value for key, value in more.items() if value or key not in before}
    if isinstance(after, list):
        pairs = enumerate(itertools.zip_longest(before or (), after))
        return [{"index": i} | new for i, pair in pairs if (new := added(*pair))]
    return (after or "")[len(before or "") :]
