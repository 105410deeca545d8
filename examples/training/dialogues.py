"""Dialogues as training data, for examples/lora.py: what the assistant says in them is learned.

A file has JSON lines, or one JSON array. A row of it is one of

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", ...}], "tools": [...]}
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", ...}]}
    {"prompt": ..., "completion": ...}, two texts or two lists of messages

as OpenAI, TRL, ShareGPT and their users write them: null is absent; tools and arguments may be JSON
texts; a content may be a list of texts; reasoning has one of the names in THOUGHTS. A message with
"weight": 0 and what a prompt has are read, but not learned.

The chat template writes the messages. Of an answer all is learned that the model has to write: from
where its prompt ends, to the end of its turn (EOS, where a template leaves that open). The prompt is
what came before as the template shows it then, so the answers of a dialogue may become several
sequences: many templates leave out earlier thoughts. A first message has no prompt, and is not
learned. A row is refused if its template leaves out a tool or a part of an answer, or does not show
where an answer begins.
"""

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from os.path import commonprefix
from pathlib import Path

import torch
from torch import Tensor

import llama2

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(eq=False)
class Sample:
    """A sequence of tokens (n,), and which of them are learned. *sample are these two."""

    tokens: Tensor
    learned: Tensor
    row: str  # its place in the file
    answers: int = 0  # how many are learned

    def __iter__(self) -> Iterator:
        return iter((self.tokens, self.learned))


def from_json(text: object) -> object:
    """The value of a JSON text, without keys whose value is null; anything else as it is."""
    if not isinstance(text, str):
        return text
    return json.loads(
        text, object_hook=lambda item: {k: v for k, v in item.items() if v is not None}
    )


def read_message(message: dict, called: dict) -> dict:
    """A message as templates expect it. `called`: functions by the ids of their calls."""
    content = message.get("content", message.get("value", ""))
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    for call in message.get("tool_calls", ()):
        function = call["function"]
        function["arguments"] = dict(from_json(function.get("arguments") or "{}"))
        call.setdefault("type", "function")
        called[call.get("id")] = function["name"]
    thought = next(filter(None, map(message.get, THOUGHTS)), None)
    known = {
        **message,
        **dict.fromkeys(THOUGHTS, thought),
        "role": ROLES[message.get("role") or message["from"]],
        "content": content,
        "name": message.get("name") or called.get(message.get("tool_call_id")),
    }
    # Templates ask whether there are tool_calls: what is empty is left out.
    return {key: value for key, value in known.items() if value or key == "content"}


@dataclass
class Reader:
    """Finds the answers in dialogues."""

    tokenizer: llama2.Tokenizer
    template: str
    has_end: bool  # whether the template writes something behind an answer

    def render(self, messages: list, variables: dict) -> tuple:
        """Ids of the prompt for the last message, and of all messages; and their texts, in pieces."""
        closed = f"{{% set add_generation_prompt = false +%}}{self.template}"
        both = [
            llama2.encode_chat(self.tokenizer, *side, **variables)
            for side in ((messages[:-1], self.template), (messages, closed))
        ]
        return both, ["".join(self.tokenizer.pieces[i] for i in ids) for ids in both]

    def find_answer(self, messages: list, variables: dict) -> tuple:
        """The ids of the prompt for the last message and of this; where in them the answer begins."""
        (prompt, ids), (asked, text) = self.render(messages, variables)
        if not text.startswith(asked):
            # With an answer the template writes what came before in another way. So the end of the
            # last message before it is marked: behind that both are the same, up to the answer.
            mark = secrets.token_hex(8)
            *before, last, answer = messages
            last = last | {"content": last["content"] + mark}
            _, marked = self.render([*before, last, answer], variables)
            if not all(mark in text for text in marked):
                raise ValueError("the chat template does not show where an answer begins")
            asked, text = (text.rpartition(mark)[2] for text in marked)
        common = commonprefix([asked, text])
        if common != asked:  # the prompt goes on, such as with <think>; not half of a tag
            common = re.sub(r"[<\[][^>\]]*$", "", common)
        ids = (
            prompt[: len(prompt) - self.count(prompt, len(asked))]
            + ids[len(ids) - self.count(ids, len(text)) :]
        )
        return ids, len(ids) - 1 - self.count(ids, len(text) - len(common) - 1)

    def count(self, ids: list, n: int) -> int:
        """How many tokens at the end lie within the last n characters."""
        lengths = (len(self.tokenizer.pieces[i]) for i in ids[::-1])
        return sum(end <= n for end in accumulate(lengths))

    def require(self, said: list, ids: list) -> None:
        """Raise ValueError unless all that is said is in the ids, whatever the white space."""
        encoded = [ids, *(self.tokenizer.encode(part, bos=False) for part in said)]
        text, *parts = ("".join(self.tokenizer.decode(ids).split()) for ids in encoded)
        for part in parts:
            if part not in text:
                raise ValueError(
                    f"the chat template leaves out {part!r:.40}, of a tool or an answer"
                )

    def find_answers(self, row: dict) -> Iterator:
        """Ids that end with an answer to learn, of each from the last on; where it begins in them."""
        encode, eos = self.tokenizer.encode, self.tokenizer.eos_id
        match row:
            case {"prompt": str(prompt), "completion": str(completion)}:
                ids = [*encode(prompt + completion), eos]
                yield ids, len(commonprefix([ids, encode(prompt)]))
                return
            case {"prompt": [*prompt], "completion": [*completion]}:
                messages = [*(message | {"weight": 0} for message in prompt), *completion]
            case {"messages": [*messages]} | {"conversations": [*messages]}:
                pass
            case _:
                raise ValueError("expected messages, conversations, or prompt and completion")
        weights = [message.pop("weight", 1) for message in messages]
        if not {*weights} <= {0, 1}:
            raise ValueError(f"the weights are {weights!r:.40}; expected 0 or 1")
        tools = [from_json(tool) for tool in from_json(row.get("tools", []))]
        variables = row.get("chat_template_kwargs", {}) | {"tools": tools or None}
        called = {}
        messages = [read_message(message, called) for message in messages]
        for i in range(len(messages) - 1, 0, -1):
            answer = messages[i]
            if answer["role"] != "assistant" or not weights[i]:
                continue
            ids, start = self.find_answer(messages[: i + 1], variables)
            said = [answer.get("reasoning", ""), *re.split("</?think>", answer["content"])]
            for function in (call["function"] for call in answer.get("tool_calls", ())):
                said += [function["name"], *function["arguments"]]
            if not any(said):
                raise ValueError("an answer says nothing")
            self.require(said, ids[start:])
            self.require([tool.get("function", tool)["name"] for tool in tools], ids[:start])
            if eos in ids[start:]:  # what a template writes behind it is not said
                ids = ids[: len(ids) - ids[::-1].index(eos)]
            elif not self.has_end:
                ids.append(eos)
            yield ids, start


def read_samples(path: Path, tokenizer: llama2.Tokenizer, template: str | None) -> list:
    """The samples of a file. Raises ValueError, which names rows that cannot be read."""
    source = template or tokenizer.chat_template.strip() or "llama-2"
    source = llama2.CHAT_TEMPLATES.get(source, source)
    reader = Reader(tokenizer, source, any(llama2.chat_stops(tokenizer, template)))
    samples, problems = [], []
    with llama2.naming(path):
        text = path.read_bytes().decode("utf-8-sig")
        word, rows = "line", text.split("\n")
        if text.lstrip().startswith("["):
            word, rows = "row", from_json(text)
    for number, row in enumerate(rows, 1):
        if not str(row).strip():
            continue
        place, longer = f"{word} {number}", []
        try:
            with llama2.naming(place):
                for ids, start in reader.find_answers(from_json(row)):
                    if longer[: len(ids)] != ids:  # else it begins the sequence of a later answer
                        longer = ids
                        learned = torch.zeros(len(ids), dtype=torch.bool)
                        samples.append(Sample(torch.tensor(ids), learned, place))
                    learned[max(1, start) : len(ids)] = True  # nothing predicts the first token
                    samples[-1].answers += 1
                if not longer:
                    raise ValueError("there is no answer to learn")
        except ValueError as error:
            problems.append(str(error)[:120])
    if problems:
        named = "; ".join(problems[:5])
        raise ValueError(f"{path}: {len(problems)} rows cannot be learned from: {named}")
    return samples
