"""Tests of examples/server/tools.py: formats of calls, read off templates; answers taken apart.

tool_formats.json has what templates write for calls, in short forms; the models are named.
"""

import copy
import dataclasses
import functools
import itertools
import json
import os
import random
import re
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("llguidance")
pytest.importorskip("uvicorn")
testclient = pytest.importorskip("starlette.testclient")
streaming = pytest.importorskip("openai.lib.streaming._deltas")

from server import __main__ as server
from server import answer as server_answer
from server import choice as server_choice
from server import fields as server_fields
from server import grammar, tools
from server import responses as server_responses
from server.choice import Choice
from server.serving import Session

import llama2
from test_llama2 import cases, json_cases, table

FORMATS = json.loads(Path(__file__).with_name("tool_formats.json").read_text("utf-8"))
UNDERSTOOD = [name for name, entry in FORMATS.items() if "format" in entry]
TEMPLATE = """{%% for m in messages %%}<|{{ m.role }}|>{{ m.content or '' }}
{%%- if m.tool_calls %%}%s{%% endif %%}<|end|>{%% endfor %%}
{%%- if add_generation_prompt %%}<|assistant|>%s{%% endif %%}"""
THINKING = """{% for m in messages %}<|{{ m.role }}|>
{%- if m.reasoning_content %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
SCHEMA = json.loads("""{"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}, "days": {}},
"required": ["city"], "$defs": {"city": {"type": "string"}}}""")
ARGUMENTS = r"""{"city": "a}\"]<\n", "days": [1, {"x": null}]}"""
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("wind", "winds")
]
QUESTION = [{"role": "user", "content": "A"}]
THOUGHT = ("<think>", "</think>")
MARKS = [f"§{tools.SECRET}:{i}§" for i in (4094, 4095)]  # of the control tokens [/THINK] and [C]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def tokenizer():
    """That of the bundled model, with two control tokens."""
    vocabulary = llama2.load(llama2.DEFAULT_MODEL)[1].vocabulary
    pieces, types = [*vocabulary.pieces[:-2], "[/THINK]", "[C]"], [*vocabulary.types[:-2], 3, 3]
    return llama2.Tokenizer(dataclasses.replace(vocabulary, pieces=pieces, types=types))


def source_of(name):
    entry = FORMATS[name]
    return TEMPLATE % (entry["calls"], entry.get("prompt", ""))


def template_of(tokenizer, source):
    shown = tools.visible(tokenizer, range(tokenizer.vocab_size))
    return tools.Template(shown, source, ["<|end|>"])


def join(deltas):
    """The message that OpenAI's client makes of deltas."""
    message = functools.reduce(streaming.accumulate_delta, deltas, {"role": "assistant"})
    for i, call in enumerate(message.get("tool_calls", ())):
        assert call.pop("index") == i
    return {"content": None if "tool_calls" in message else ""} | message


def calls_of(tokenizer, name, names):
    """What a template writes for calls of these tools, of which it may take only one."""
    template, form = template_of(tokenizer, source_of(name)), tools.Format(*FORMATS[name]["format"])
    arguments = ARGUMENTS if form.arguments_as_text else json.loads(ARGUMENTS)
    names = names[: 1 if form.separator is None else 2]
    message = {"role": "assistant", "content": form.no_content}
    text = template.render(message | {"tool_calls": called(names, arguments=arguments)})
    return names, text.rpartition("<|assistant|>")[2].removesuffix("<|end|>").strip()


def assert_called(message, names):
    """It calls these tools, with ARGUMENTS."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    assert [function["name"] for function in functions] == names
    assert all(json.loads(f["arguments"]) == json.loads(ARGUMENTS) for f in functions)


def called(names, call_id="abcdefgh1", arguments=ARGUMENTS):
    return [
        {"id": call_id, "type": "function", "function": {"name": n, "arguments": arguments}}
        for n in names
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_read_off_templates(tokenizer, name):
    template = template_of(tokenizer, source_of(name))
    *form, problem = template.format
    if name in UNDERSTOOD:
        assert form == FORMATS[name]["format"]
    else:
        assert re.search(f"{FORMATS[name]['refused']}.*--chat-template", problem)


class Checked(tools.Reader):
    """One that has told, wherever its text may end, what it reads in the whole of it."""

    told = {}  # noqa: RUF012

    def feed(self, text, ended=False):
        delta = super().feed(text, ended)
        self.told = streaming.accumulate_delta(copy.deepcopy(self.told), copy.deepcopy(delta))
        last, whole = copy.copy(self), tools.Reader(self.answer)
        whole.secret = self.secret
        whole.feed(self.text, ended=True)
        rest = tools.Reader.feed(last, "", ended=True)
        assert join([copy.deepcopy(self.told), rest]) == whole.message
        return delta


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setattr(server_choice, "Reader", Checked)


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_what_a_template_writes_fits_and_is_taken_apart(tokenizer, name):
    """One call and two, behind text, alone, and behind reasoning in which a call is only thought of."""
    names, calls = calls_of(tokenizer, name, ["winds", "wind"])
    vocabulary = grammar.open_vocabulary(tokenizer, {tokenizer.eos_id})
    answer = tools.Answer(tools.Format(*FORMATS[name]["format"]), ["wind", "winds"])
    answer.schemas = [SCHEMA] * 2
    for before, thought in itertools.product(
        ("", "Well."), (None, f"I {answer.form.before} think")
    ):
        answer.reasoning = thought and THOUGHT
        text = (f"<think>{thought}</think>\n" if thought else "") + f"{before}\n{calls}".lstrip()
        matcher = grammar.Grammar(vocabulary, answer.schemas, tools.rules(answer)).matcher
        ids = tokenizer.encode(text, bos=False, first=False)
        assert matcher.validate_tokens(ids) == len(ids)
        reader = Checked(answer)
        for letter in text:
            reader.feed(letter)
        reader.feed("", ended=True)
        assert_called(reader.message, names)
        assert reader.message["content"] == (before or None)
        assert reader.message.get("reasoning") == thought


TAGS = {"none": None, "texts": THOUGHT, "control tokens": MARKS[::-1]}
NARROW = json.loads("""{"type": "object", "properties": {"city": {"type": "string", "maxLength": 5},
"days": {"type": "boolean"}}, "required": ["city"], "additionalProperties": false}""")
ANSWERS = int(os.environ.get("FUZZ", "1"))


@pytest.mark.parametrize("name", UNDERSTOOD)
@pytest.mark.parametrize("tags", TAGS)
def test_random_answers_fit(tokenizer, name, tags):
    """A required call and a schema hold whatever a model reasons, and wherever it wants to stop."""
    jsonschema = pytest.importorskip("jsonschema")
    tags = TAGS[tags]
    vocabulary = grammar.open_vocabulary(tokenizer, {tokenizer.eos_id})
    wanted = torch.full((tokenizer.vocab_size,), -4.0)  # control tokens, and what ends a text
    wanted[[1, 2, 4094, 4095]] = 6.0
    for text in ("</think>", "}", '"}', '"', ": ", ", ", "]", "city", "wind"):
        wanted[tokenizer.encode(text, bos=False, first=False)] = 4.0
    ended = 0
    for forced, is_reasoning in itertools.product((True, False), (True, False)[not tags :]):
        answer = tools.Answer(tools.Format(*FORMATS[name]["format"]), ["wind", "winds"])
        answer.schemas = [NARROW] * (2 if forced else 3)
        answer.forced, answer.is_reasoning, answer.reasoning = forced, is_reasoning, tags
        whole = grammar.Grammar(vocabulary, answer.schemas, tools.rules(answer))
        for seed in range(ANSWERS):
            generator = torch.Generator().manual_seed(seed)
            fit, ids = whole.copy(), [1]
            sampling = llama2.Sampling(top_p=1.0, logits_processor=fit)
            while ids[-1] != tokenizer.eos_id and len(ids) < 120:
                logits = wanted + 4 * torch.randn(len(wanted), generator=generator)
                ids.append(llama2.sample(logits, sampling, ids, generator))
            if ids.pop() != tokenizer.eos_id:
                continue
            ended += 1
            reader = tools.Reader(answer)
            shown = tools.visible(tokenizer, tools.tokens_in(answer))
            reader.feed(shown.decode(ids[1:]), ended=True)
            calls = reader.message.get("tool_calls", [])
            assert "§" not in (reader.message["content"] or "")
            values = [call["function"]["arguments"] for call in calls]
            assert values or not forced
            for value in values or [reader.message["content"]]:
                jsonschema.validate(json.loads(value), NARROW)
    assert ended or ANSWERS < 100


def test_reasoning_is_read_off_templates(tokenizer):
    for source, expected in {
        source_of(UNDERSTOOD[0]): None,
        THINKING: THOUGHT,
        THINKING.replace("think>", "seed:think>"): ("<seed:think>", "</seed:think>"),
        "[/THINK]": ("[THINK]", MARKS[0]),
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}": THOUGHT,
    }.items():
        assert template_of(tokenizer, source).reasoning == expected


# --------------------------------------------------------------------------------------------------
# The server, with a model that says what it is told to say


@pytest.fixture(scope="module")
def sessions(tmp_path_factory, tokenizer):
    """Sessions by their templates."""
    folder = tmp_path_factory.mktemp("templates")
    made = {}

    def session(source, *options):
        options = options or ("--quiet",)
        if (source, options) not in made:
            path = folder / str(len(made))
            path.write_text(source)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("sys.argv", ["server", *options, "--chat-template", str(path)])
                args = server.parse_args()
                config = llama2.Config(16, 16, 1, 2, 2, vocab_size=tokenizer.vocab_size + 300)
                model = llama2.Llama(config).requires_grad_(False)
                model.vocab_size = tokenizer.vocab_size  # as where there are rows of no token
                patch.setattr(llama2, "load", lambda *_, **__: (model, tokenizer))
                session = Session(args)
                session.name = "m"
                app = server.make_app(session, args)
            made[source, options] = testclient.TestClient(app, "http://localhost")
            made[source, options].model = model
        return made[source, options]

    return session


@pytest.fixture
def tell(tokenizer, monkeypatch):
    """tell(text): each answer is this text, as long as it may be. Returns how many tokens it has."""

    def tell(text):
        *script, _ = [
            i
            for part in text.split("¤")  # the control token
            for i in (*tokenizer.encode(part, bos=False, first=False), tokenizer.vocab_size - 1)
        ]
        script.append(tokenizer.eos_id)
        asked = [None, 0]  # the processor of the last request, the length of its prompt

        def sample(logits, sampling, ids, generator):
            if sampling.logits_processor is not asked[0]:
                asked[:] = sampling.logits_processor, len(ids)
            token_id = script[(len(ids) - asked[1]) % len(script)]
            assert sampling.logits_processor(ids, logits)[token_id] > -1e9, (token_id, text)
            return token_id

        monkeypatch.setattr(llama2, "sample", sample)
        return len(script) - 1

    return tell


def events_of(client, path, body):
    reply = client.post(path, json=body | {"stream": True})
    return [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]


def chat_of(client, body):
    """The choice of a chat, which is as its stream says it; the deltas of that; usage. Or an error."""
    body = {"messages": QUESTION, "tools": TOOLS, "logprobs": True, "cache_prompt": False} | body
    body["stream_options"] = {"include_usage": True}
    reply = client.post(CHAT, json=body).json()
    if "error" in reply:
        return reply["error"]["message"]
    (choice,) = reply["choices"]
    *chunks, last = events_of(client, CHAT, body)
    chunks = [chunk["choices"][0] for chunk in chunks]
    deltas = [chunk["delta"] for chunk in chunks[1:]]
    message = join(deltas)
    for one in (message, choice["message"]):
        for call in one.get("tool_calls", ()):
            assert len(call.pop("id")) == 9
    assert message == choice["message"]
    entries = [entry for chunk in chunks for entry in chunk["logprobs"]["content"]]
    assert entries == choice["logprobs"]["content"]
    reasons = [chunk["finish_reason"] for chunk in chunks]
    assert reasons == [*[None] * len(deltas), choice["finish_reason"]]
    assert last["usage"] == reply["usage"]
    return choice, deltas, reply["usage"]


@pytest.fixture
def say(sessions, tell):
    """say(source, text, ...) -> the choice of a chat, whole and streamed, in which it says the text."""

    def say(source, text, **body):
        count = tell(text)
        said = chat_of(sessions(source), body)
        if isinstance(said, str):
            return said
        assert len(said[0]["logprobs"]["content"]) == said[2]["completion_tokens"] == count
        return said[:2]

    return say


@pytest.fixture
def started(monkeypatch):
    """A list of what each answer begins with: the prompt's ids, and options."""
    calls, begin = [], Choice.begin

    def note(choice, step):
        job = choice.job
        calls.append((choice.ids, [job.answer, job.options, job.sampling, job.seed]))
        return begin(choice, step)

    monkeypatch.setattr(Choice, "begin", note)
    return calls


HERMES, LLAMA = UNDERSTOOD[0], UNDERSTOOD[1]
CALL = '<tool_call>\n{"name": "wind", "arguments": {"city": "Rome"}}\n</tool_call>'

LLAMA_3 = r"""{"name": "wind", "parameters": {"city": "Rome"}}
{"type": "function", "name": "wind", "parameters": {"city": "Rome"}}
{"name":"wind","parameters":{"city":"Rome"}}
{\n  "name": "wind",\n  "parameters": {\n    "city": "Rome"\n  }\n}
{ "type":"function", "name" : "wind" , "parameters" : { "city": "Rome" } }"""


def test_llama_3_writes_any_white_space_and_a_type(say):
    """As llama.cpp reads it, with text in front, and where a call is required."""
    source = source_of(LLAMA)
    for text in (line.replace("\\n", "\n") for line in LLAMA_3.splitlines()):
        for before, choice in (("", "auto"), ("Well {x: \n", "auto"), ("", "required")):
            answer = say(source, before + text, tool_choice=choice)[0]
            (call,) = answer["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
            assert answer["message"]["content"] == (before.strip() or None)
            assert answer["finish_reason"] == "tool_calls"
    for text in (
        *('{"name":"window"}', '{"name": "x", "parameters": {}}', "{", "{ {"),
        *('{"type": "function", "x": 1}', '{"type": "function"'),
    ):
        assert say(source, text)[0]["message"]["content"] == text
    refused = "the server failed: AssertionError"
    assert say(source, '{"name":"wind","parameters":{"town"') == refused


def test_a_control_token_in_a_wrong_place_is_not_shown(tokenizer):
    reader = tools.Reader(tools.Answer(reasoning=("<think>", MARKS[0])))
    reader.feed(f"a{MARKS[0]}b", ended=True)
    assert reader.message["content"] == "ab"


def test_what_a_call_must_be(say):
    """Once it has begun, it fits a tool's schema, and is the only one if that was asked for."""
    source = source_of(HERMES)
    for text, body in (
        ('<tool_call>\n{"name": "rain', {}),
        ('<tool_call>\n{"name": "wind", "arguments": {"town', {}),
        ('<tool_call>\n{"name": "wind", "arguments": {}', {}),
        (f"{CALL}\n", {"parallel_tool_calls": False}),
        ("Hello", {"tool_choice": "required"}),
        (CALL, {"tool_choice": {"type": "function", "function": {"name": "winds"}}}),
    ):
        assert say(source, text, **body) == "the server failed: AssertionError"
    for body in ({"parallel_tool_calls": False}, {"tool_choice": "required"}):
        assert say(source, CALL, **body)[0]["finish_reason"] == "tool_calls"
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    for text in (CALL, '{"city": "Rome"}'):  # with a form for the last answer, too
        choice, _ = say(source, text, response_format=form)
        assert bool(choice["message"]["content"]) is (text != CALL)
    form = {"type": "json_object"}  # behind reasoning
    choice, _ = say(THINKING, "<think>Hm</think>\n{}", tools=[], response_format=form)
    assert choice["message"]["content"] == "{}"


def test_a_schema_is_compiled_once(sessions, monkeypatch):
    """Though the request is checked, and there are several answers to it."""
    compiled = MagicMock(wraps=grammar.LLMatcher)
    monkeypatch.setattr(grammar, "LLMatcher", compiled)
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": [[], "once"]}}}
    body = {"messages": QUESTION, "n": 3, "response_format": form}
    assert len(sessions(source_of(HERMES)).post(CHAT, json=body).json()["choices"]) == 3
    assert compiled.call_count == 1


def test_prompts_that_clients_render(sessions, tokenizer):
    """Texts of control tokens are these tokens, where the server or a request says so."""
    client = sessions(BOTH, "--quiet", "--parse-special")
    ids = tokenizer.encode("A[C]", parse_special=True)
    reply = client.post("/v1/completions", json={"prompt": "A[C]", "max_tokens": 1})
    assert reply.json()["usage"]["prompt_tokens"] == len(ids)
    body = {"content": "A[C]", "add_special": True}
    assert client.post("/tokenize", json=body).json()["tokens"] == ids
    reply = client.post("/tokenize", json=body | {"parse_special": False})
    assert reply.json()["tokens"] == tokenizer.encode("A[C]")


def test_control_tokens_begin_calls(say):
    """Their text does not."""
    source = source_of("Mistral Nemo").replace("[TOOL_CALLS]", "[C]")
    call = '[{"name": "wind", "arguments": {"city": "Rome"}, "id": "123456789"}]'
    choice, _ = say(source, f"Hi [C]{call}")
    assert choice["message"]["content"] == f"Hi [C]{call}"
    choice, _ = say(source, f"Hi ¤ {call}")
    assert choice["message"]["content"] == "Hi"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    assert "[C]" in [entry["token"] for entry in choice["logprobs"]["content"]]


def test_templates_that_cannot_call(say):
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for choice in ("auto", "required"):
        assert "no place for tools that is understood" in say(source, "Hi", tool_choice=choice)
    message = {"role": "assistant", "tool_calls": called(["wind"])}
    assert "has no place for tool_calls" in say(source, "Hi", messages=[*QUESTION, message])


SENT = r"""[{"role": "assistant", "content": null, "refusal": null, "tool_calls": [{"id": "abcdefgh1",
"type": "function", "function": {"name": "wind", "arguments": "{\"city\": \"Rome\"}"}}]},
{"role": "tool", "tool_call_id": "abcdefgh1", "content": "calm"},
{"role": "assistant", "content": "B", "reasoning": "C", "tool_calls": []}]"""
SEEN = """[{"role": "assistant", "content": null, "tool_calls": [{"id": "abcdefgh1",
"type": "function", "function": {"name": "wind", "arguments": {"city": "Rome"}}}]},
{"role": "tool", "tool_call_id": "abcdefgh1", "content": "calm", "name": "wind"},
{"role": "assistant", "content": "B", "reasoning": "C", "reasoning_content": "C"}]"""


def test_messages_reach_the_template(sessions, tokenizer):
    """Arguments as it takes them, a result's name, reasoning by both names, no empty keys."""
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}{# tool_calls #}"
    body = {"messages": json.loads(SENT), "max_tokens": 1}
    usage = sessions(source).post(CHAT, json=body).json()["usage"]
    assert usage["prompt_tokens"] == len(llama2.encode_chat(tokenizer, json.loads(SEEN), source))


# --------------------------------------------------------------------------------------------------
# /v1/responses, by OpenAI's client

TEXT_EVENTS = (
    "output_item.added content_part.added {0}.delta {0}.done content_part.done output_item.done"
)
EVENTS = f"""created in_progress
{TEXT_EVENTS.format("reasoning_text")} {TEXT_EVENTS.format("output_text")} output_item.added
function_call_arguments.delta function_call_arguments.done output_item.done completed"""
BOTH = TEMPLATE % (FORMATS[HERMES]["calls"], "")
BOTH = BOTH.replace(
    "{{ m.content", "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content"
)
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture
def responses(sessions):
    openai = pytest.importorskip("openai")
    http = sessions(BOTH)
    return openai.OpenAI(base_url="http://localhost/v1", api_key="any", http_client=http).responses


def test_responses(responses, tell):
    """The same whole and as events, in OpenAI's order."""
    tell(f"<think>Hm</think>Well.\n{CALL}")
    asked = {"model": "m", "input": "A", "tools": FUNCTIONS, "store": True, "metadata": {"a": "b"}}
    whole = responses.create(**asked)
    with responses.stream(**asked) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        streamed = stream.get_final_response()
    assert [kind for kind, _ in itertools.groupby(kinds)] == EVENTS.split()
    for response in (whole, streamed):
        thought, message, call = response.output
        assert (thought.content[0].text, message.content[0].text) == ("Hm", "Well.")
        assert (call.name, json.loads(call.arguments)) == ("wind", {"city": "Rome"})
        assert (response.status, response.store, response.metadata) == (
            "completed",
            True,
            {"a": "b"},
        )
        assert response.usage.output_tokens_details.reasoning_tokens > 2


def test_responses_go_on(responses, tell, sessions, tokenizer):
    """From the last one, by its id or by those of its items, as if all of it were sent again."""
    tell(f"<think>Hm</think>Well.\n{CALL}")
    options = {"model": "m", "tools": FUNCTIONS, "extra_body": {"cache_prompt": False}}
    options["instructions"] = "S"
    first = responses.create(**options, input="A")
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "calm"}
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    output = [item.model_dump(exclude_none=True) for item in first.output]
    question = {"role": "user", "content": [{"type": "input_text", "text": "A"}]}
    tell("Calm.")
    whole = responses.create(**options, input=[question, *output, result])
    with responses.stream(**options, input=[question, *references, result]) as stream:
        by_items = stream.until_done().get_final_response()
    by_id = responses.create(**options, input=[result], previous_response_id=first.id)
    calls = called(["wind"], arguments={"city": "Rome"})
    said = {"role": "assistant", "content": "Well.", "reasoning": "Hm", "tool_calls": calls}
    messages = [{"role": "system", "content": "S"}, *QUESTION, said]
    messages.append({"role": "tool", "content": "calm"})
    ids = llama2.encode_chat(tokenizer, messages, BOTH)
    assert {r.usage.input_tokens for r in (whole, by_items, by_id)} == {len(ids)}
    assert by_id.previous_response_id == first.id
    tell("Yes.")
    third = responses.create(**options, input="Sure?", previous_response_id=by_id.id)
    messages += [{"role": "assistant", "content": "Calm."}, {"role": "user", "content": "Sure?"}]
    assert third.usage.input_tokens == len(llama2.encode_chat(tokenizer, messages, BOTH))
    kept = responses.retrieve(first.id)
    assert (kept.output, kept.usage, kept.store) == (first.output, first.usage, True)
    again = sessions(BOTH).get(f"{RESPONSES}/{first.id}?stream=true").json()  # is refused
    assert again["error"]["param"] == "stream"
    assert sessions(BOTH).delete(f"{RESPONSES}/{first.id}").json()["deleted"]
    assert by_id.id in sessions(BOTH).get(f"{RESPONSES}/{by_id.id}?stream=false").text


def test_responses_that_are_not_kept(sessions, tell):
    """Unknown ids are OpenAI's errors."""
    tell("A.")
    for client, more in ((sessions(BOTH), {"store": False}), (sessions(BOTH, "--no-store"), {})):
        made = client.post(RESPONSES, json={"input": "A", **more}).json()
        assert made["store"] is False
        for name in (made["id"], "resp_1"):
            for method in (client.get, client.delete):
                reply = method(f"{RESPONSES}/{name}")
                assert reply.status_code == 404 and "not found" in reply.json()["error"]["message"]
            reply = client.post(RESPONSES, json={"input": "A", "previous_response_id": name})
            error = reply.json()["error"]
            about = reply.status_code, error["param"], error["code"]
            assert about == (400, "previous_response_id", "previous_response_not_found")
            assert error["message"] == f"Previous response with id '{name}' not found."
        reply = client.post(RESPONSES, json={"input": [{"type": "item_reference", "id": "msg_1"}]})
        assert reply.status_code == 404 and "Item with id 'msg_1'" in reply.text


def test_few_responses_are_kept(monkeypatch):
    """A number of them, and of their bytes."""
    store = server_responses.Store()
    store.limit = 3
    for i in range(9):
        store.keep({"id": i, "output": []}, [])
    assert [*store] == [6, 7, 8]
    monkeypatch.setattr(server_responses, "KEPT_BYTES", 300)
    store.keep({"id": 9, "output": []}, ["a" * 200])
    assert 9 in store and len(store) < 4
    store.keep({"id": 10, "output": []}, ["a" * 300])
    assert not store


def test_items_of_other_types(sessions, tell, capsys):
    """What other servers called and what clients add is left out, with a line in the log."""
    tell("A.")
    items = [{"role": "user", "content": "A"}, {"type": "web_search_call", "id": "1", "action": {}}]
    items += [{"type": "ghost_snapshot"}, {"type": "message", "role": "user", "content": []}]
    client = sessions(BOTH, "--dtype", "float32")
    capsys.readouterr()
    assert client.post(RESPONSES, json={"input": items}).status_code == 200
    assert "; forgot web_search_call in the input, ghost_snapshot in" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Whole and in a stream: the same

FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}
WINDS = {"type": "function", "name": "winds"}
SAYS = """
Well <tool_box>, <think> { | {}
Well.\\nC | {}
C | {"tool_choice": "required"}
C | {"tool_choice": WINDS, "parallel_tool_calls": false}
J | {"text": {"format": FORM}, "tools": []}
C | {"text": {"format": FORM}}
C | {"text": {"format": FORM}, "tool_choice": "required"}
C | {"text": {"format": FORM}, "tool_choice": WINDS}
"""  # what is said (C: calls, J: JSON), and fields of a request to /v1/responses
SAYS = table(SAYS.replace("FORM", json.dumps(FORM)).replace("WINDS", json.dumps(WINDS)))
# What begins a thought: of the prompt, of the answer.
THINKS = [(None, ""), ("", "<think>"), ("<think>\n", ""), ("<think>\n", "<think>")]
ASKS = [*itertools.product(THINKS, SAYS)]


def asked_of_chats(body):
    """The fields of a request for a chat, by those of one to /v1/responses."""
    body = {"max_tokens" if key == "max_output_tokens" else key: body[key] for key in body}
    if form := body.pop("text", {}).get("format"):
        body["response_format"] = {"type": form["type"], "json_schema": form}
    if body.get("tool_choice") == WINDS:
        body["tool_choice"] = {"type": "function", "function": {"name": "winds"}}
    return body


def response_of(client, body):
    """The same of a response, as a message."""
    body = {"input": "A", "tools": FUNCTIONS, **body}
    whole = client.post(RESPONSES, json=body).json()
    events = events_of(client, RESPONSES, body)
    said = [""] * len(events[-1]["response"]["output"])
    for event in events:
        if event["type"].endswith(".delta"):
            said[event["output_index"]] += event["delta"]
    message = {}
    for response in (whole, events[-1]["response"]):
        for item in response["output"]:
            del item["id"]
            item.pop("call_id", None)
    for item, text in zip(whole["output"], said, strict=True):
        assert text == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
        if "arguments" in item:
            message.setdefault("calls", []).append((item["name"], text))
        else:
            message[item["type"]] = text
    for key in ("output", "status", "incomplete_details", "usage"):
        assert whole[key] == events[-1]["response"][key]
    return message, whole["status"], whole["usage"]


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_a_stream_is_the_whole_answer(tokenizer, sessions, tell, name):
    """In its content, reasoning, calls, log-probabilities, usage, and why it ended, wherever a limit
    or a stop text cuts it; and a call that must come comes, whatever else was asked."""
    entry, rng = FORMATS[name], random.Random(name)
    asks = ASKS[UNDERSTOOD.index(name) :: len(UNDERSTOOD)] if ANSWERS == 1 else ASKS
    for (opened, begun), (say, asked) in asks:  # each by one format, or by all
        say, asked = say.replace("\\n", "\n"), json.loads(asked)
        is_winds = asked.get("tool_choice") == WINDS
        names, calls = calls_of(tokenizer, name, ["winds", "winds"][is_winds:])
        text = say.replace("C", calls).replace("J", '{"city": "a"}')
        source = source_of(name)
        if opened is not None:
            text = f"{begun}I <think so </thin\n</think>\n{text}"
            source = TEMPLATE % (entry["calls"], opened + entry.get("prompt", ""))
            source += "{# </think> #}"
        client, count = sessions(source), tell(text)
        cuts = [{"max_output_tokens": k} for k in range(1, count + 1)]
        cuts += [{"stop": [text[i : i + 3]]} for i in range(len(text) - 3)]
        forced = asked.get("tool_choice")
        for cut in ({}, rng.choice(cuts)):
            body = asked | cut | {"cache_prompt": False}
            said = chat_of(client, asked_of_chats(body))
            assert len(said) == 3, said
            choice, deltas, usage = said
            message, reason = choice["message"], choice["finish_reason"]
            entries = choice["logprobs"]["content"]
            said, status, counts = response_of(client, body)
            assert message["content"] == said.get("message", None if "calls" in said else "")
            for key in ("reasoning", "reasoning_content"):
                assert message.get(key) == said.get("reasoning")
            functions = [call["function"] for call in message.get("tool_calls", ())]
            assert said.get("calls", []) == [(f["name"], f["arguments"]) for f in functions]
            assert (status == "incomplete") is (reason == "length")
            assert usage["completion_tokens"] == counts["output_tokens"]
            assert not forced or not message["content"]
            if not cut or (forced and "stop" in cut and opened is None):
                assert len(entries) == usage["completion_tokens"] == count
                assert_called(message, names if "C" in say else [])
                assert (message["content"] or "") == say.strip("C\n").replace("J", '{"city": "a"}')
                assert message.get("reasoning") == (
                    None if opened is None else "I <think so </thin"
                )
                assert opened is None or len(deltas) > 5
                assert reason == ("tool_calls" if functions else "stop")


# --------------------------------------------------------------------------------------------------
# What becomes of a field

VALUES = """{"messages": [{"role": "user", "content": "A"}], "prompt": "A", "input": "A",
"model": "x", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 1,
"max_completion_tokens": 1, "max_output_tokens": 16, "temperature": 1, "top_p": 1, "top_k": -1,
"min_p": 0, "repetition_penalty": 1, "seed": -1, "n": 2, "presence_penalty": 0, "stop": ["", "x"],
"frequency_penalty": 0, "logit_bias": {}, "logprobs": 1, "top_logprobs": 1, "echo": true,
"tools": [], "tool_choice": "auto", "parallel_tool_calls": false, "instructions": "A",
"response_format": {"type": "text"}, "text": {"verbosity": "low", "format": {"type": "text"}},
"reasoning_effort": "low", "reasoning": {"effort": null, "summary": "auto"}, "cache_prompt": false,
"chat_template_kwargs": {"enable_thinking": false}, "continue_final_message": false,
"do_sample": false, "penalty_last_n": -1, "parse_special": true, "include_stop_token": true, "store": false, "include": ["reasoning.encrypted_content"]}"""
PROMPTS = {
    CHAT: {"messages": QUESTION},
    RESPONSES: {"input": "A"},
    "/v1/completions": {"prompt": "A"},
}
PATHS = {
    "/v1/completions": "prompt echo parse_special logprobs n",
    RESPONSES: "store previous_response_id input instructions text reasoning max_output_tokens include",
}
TABLE = (
    (Path(__file__).parent.parent / "docs/usage.md")
    .read_text("utf-8")
    .partition("| field | here |")[2]
)
ROWS = [row.split(" | ") for row in TABLE.partition("\n\n")[0].splitlines()[2:]]
FIELDS = [
    (verdict.split()[0].strip(",;"), name)
    for names, verdict, *_ in ROWS
    if "in a" not in names
    for name in re.findall("`([a-z_]+)`", names)
]


@pytest.mark.parametrize("verdict, name", FIELDS)
def test_fields_of_the_table(sessions, capsys, verdict, name):
    """What the documents say becomes of each; the log names what was forgotten."""
    path = next((path for path, names in PATHS.items() if name in names.split()), CHAT)
    value = json.loads(VALUES).get(name, ["x"])
    body = {"max_tokens": 1} if path != RESPONSES else {"max_output_tokens": 1}
    if name == "previous_response_id":
        value = (
            sessions(BOTH, "--dtype", "float32").post(path, json=PROMPTS[path] | body).json()["id"]
        )
    capsys.readouterr()
    body |= {**PROMPTS[path], name: value}
    body |= {"logprobs": True} if name == "top_logprobs" else {}
    body |= {"stream": True} if name == "stream_options" else {}
    reply = sessions(BOTH, "--dtype", "float32").post(path, json=body)
    log = capsys.readouterr().err
    if verdict == "refused":
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    else:
        assert (reply.status_code, "forgot " in log) == (200, verdict == "forgotten"), log
        assert verdict == "followed" or f"; forgot {name}" in log


FOLLOWED_ELSEWHERE = ["echo", "tools", "tool_choice", "top_logprobs", "continue_final_message"]
FOLLOWED_ELSEWHERE += ["include", "n_predict", "num_predict"]


def test_the_table_is_whole():
    """All that the server knows stands in it, and nothing twice."""
    named = [name for _, name in FIELDS]
    refused = {name for verdict, name in FIELDS if verdict == "refused"}
    assert len(named) == len({*named})
    assert {*server_fields.LIMITS} <= {*named} - refused
    for pattern in re.sub(r"\(.*?\)|\s", "", server_fields.REFUSED.pattern).split("|"):
        assert pattern in FOLLOWED_ELSEWHERE or any(
            re.fullmatch(pattern, name) for name in refused
        ), pattern


TABLE = TABLE.partition("| here | OpenAI |")[2].partition("\n\n")[0]
SYNONYMS = {
    ours: names
    for ours, *names in (re.findall("`([a-z_]+)`", row) for row in TABLE.splitlines()[2:])
}
EQUAL = json.loads("""{"max_tokens": 1, "repetition_penalty": 1.5, "penalty_last_n": -1,
"stop": ["x", "y"], "schema": {"type": "array"}, "response_format": {"type": "array"}}""")


def test_names_of_other_servers(sessions, started):
    """Those of the table mean what it says; two that differ do not. A schema has several forms."""
    assert {ours: {*names} - {"response_format"} for ours, names in SYNONYMS.items()} == {
        ours: {*names.split()} for ours, names in server_fields.SYNONYMS.items()
    }
    client = sessions(BOTH)
    forms = [{"response_format": {"type": "json_object", "schema": EQUAL["schema"]}}]
    forms += [
        {name: EQUAL["schema"]} for name in ("schema", *server_fields.SYNONYMS["schema"].split())
    ]
    groups = [forms]
    for ours, names in SYNONYMS.items():
        if ours != "schema":
            groups.append([{name: EQUAL[ours]} for name in (ours, *names)])
    for group in groups:
        started.clear()
        for body in group:
            body = PROMPTS[CHAT] | {"max_tokens": 1, "repetition_penalty": 1.2} | body
            body.pop("repetition_penalty" if {"repeat_penalty", "rep_pen"} & {*body} else "", None)
            assert client.post(CHAT, json=body).status_code == 200, body
        assert len({re.sub(" at 0x.*?>", "", str(call)) for call in started}) == 1, started
    for body in (
        {"max_tokens": 5, "n_predict": 6},
        {"repeat_last_n": 5},
        {"rep_pen": 0},
        {"n_predict": "5"},
    ):
        error = client.post(CHAT, json=PROMPTS[CHAT] | body).json()["error"]
        assert error["param"] in {*body, "penalty_last_n"}
    assert client.post(CHAT, json=PROMPTS[CHAT] | {"n_predict": -1, "max_tokens": 1}).is_success


METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS QUERY"
SERVED = """
/ | GET HEAD | null
/health | GET HEAD | null
/v1/models | GET HEAD | null
/v1/models/ORG/NAME | GET HEAD | null
/v1/chat/completions | POST | {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1}
/v1/responses | POST | {"input": "A", "max_output_tokens": 1}
/v1/completions | POST | {"prompt": "A", "max_tokens": 1}
/tokenize | POST | {"content": "A"}
/detokenize | POST | {"tokens": [5]}
/v1/responses/resp_0 | DELETE GET HEAD | null
/v1 |  | {}
/v1/ |  | {}
/v1/files |  | {}
/v1/responses/compact |  | {}
/v1/responses/input_tokens |  | {}
/v2/models |  | {}
/api/chat |  | {}
"""


@cases("path, allowed, body", SERVED)
def test_methods_paths_and_content_types(sessions, path, allowed, body):
    """405 says what a path takes, 404 which there are; nothing is 500, or 200 and did nothing."""
    allowed = allowed.split()
    paths = {path, path.removeprefix("/v1")} if allowed else {path}
    kinds = ("application/json", "text/plain", "multipart/form-data; boundary=x", "")
    for place, method, kind in itertools.product(paths, METHODS.split(), kinds):
        head = {"Content-Type": kind} if kind else {}
        data = None if method in ("GET", "HEAD") else body
        reply = sessions(BOTH).request(method, place, content=data, headers=head)
        expected, said = 200, ""
        if not allowed:
            expected, said = 404, "there are /, /health, /v1/models"
        elif method not in allowed:
            expected = 405
            assert {*reply.headers["allow"].split(", ")} == {*allowed}
        elif path.endswith("resp_0"):
            expected, said = 404, "not found"
        elif method == "POST" and kind.startswith(("text", "multi")):
            expected = 415
        assert reply.status_code == expected, (method, place, kind, reply.text)
        assert method == "HEAD" or said in reply.text
        assert len(reply.headers["x-request-id"]) == 24


HISTORIES = """
{"role": "assistant", "content": "B", "provider_specific_fields": {"reasoning": "t"}, "annotations": [{"type": "x"}], "reasoning_details": [{"type": "reasoning.text", "text": "t"}], "refusal": "", "id": "msg_1", "cache_control": {"type": "ephemeral"}, "thinking_blocks": [{}], "function_call": null} | {"role": "assistant", "content": "B"}
{"role": "assistant", "content": [{"type": "text", "text": "B", "cache_control": {}, "annotations": []}]} | {"role": "assistant", "content": "B"}
{"role": "assistant", "content": [{"type": "refusal", "refusal": "B"}]} | {"role": "assistant", "content": "B"}
{"role": "assistant"} | {"role": "assistant", "content": ""}
{"role": "assistant", "content": null} | {"role": "assistant", "content": ""}
{"role": "tool", "tool_call_id": "1", "content": null} | {"role": "tool", "tool_call_id": "1", "content": ""}
{"role": "tool", "tool_call_id": "1", "content": []} | {"role": "tool", "tool_call_id": "1", "content": ""}
{"type": "function_call_output", "call_id": "1", "output": null} | {"type": "function_call_output", "call_id": "1", "output": ""}
{"type": "function_call_output", "call_id": "1", "output": []} | {"type": "function_call_output", "call_id": "1", "output": ""}
{"role": "user", "content": [{"type": "image_url", "image_url": {}}]} | 'image_url' in a
{"role": "user", "content": [{"type": "input_file"}]} | 'input_file' in a message
{"role": "assistant", "content": "A", "audio": {"id": "x"}} | audio in a message
{"role": "user", "content": null} | expected a list of messages
{"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]} | input: 'input_image' in a message is not supported
"""


@cases("message, means", HISTORIES)
def test_what_clients_add_to_a_history(sessions, message, means):
    """It makes no difference, or is refused. Contents may be null or empty; a refusal is a text."""

    def reply_to(message):
        path, key, limit = CHAT, "messages", "max_tokens"
        if "type" in message:
            path, key, limit = RESPONSES, "input", "max_output_tokens"
        body = {key: [*QUESTION, message, *QUESTION], limit: 1, "cache_prompt": False, "seed": 1}
        return sessions(BOTH).post(path, json=body).json()

    reply = reply_to(json.loads(message))
    if means.startswith("{"):
        assert reply["usage"] == reply_to(json.loads(means))["usage"]
    else:
        assert means in reply["error"]["message"]


WEB = json.loads("""[{"type": "web_search"},
{"type": "custom", "name": "patch", "format": {"type": "grammar"}}]""")


def test_tools_that_are_no_functions(sessions, tell, capsys):
    """They are left out, with a line in the log; one that must be called is refused."""
    for path, functions in ((CHAT, TOOLS), (RESPONSES, FUNCTIONS)):
        tell(CALL)
        body = {**PROMPTS[path], "tools": [*WEB, *functions]}
        reply = sessions(BOTH, "--dtype", "float32").post(path, json=body)
        assert '"name":"wind"' in reply.text
        assert "; forgot web_search among the tools, custom among" in capsys.readouterr().err
        tell("Hello")
        body = {**PROMPTS[path], "tools": WEB}
        assert sessions(BOTH).post(path, json=body).status_code == 200
        for choice in ("required", {"type": "custom", "name": "patch"}):
            reply = sessions(BOTH).post(path, json=body | {"tool_choice": choice})
            assert reply.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_calls_that_were_cut(sessions, tell, started, tokenizer, name):
    """Arguments that are no JSON stay what they are, and end no conversation."""
    cut = '{"city": "Ro'
    call = {"type": "function_call", "call_id": "abcdefgh1", "name": "wind", "arguments": cut}
    result = {"type": "function_call_output", "call_id": "abcdefgh1", "output": "no JSON"}
    message = {"role": "assistant", "content": None, "tool_calls": called(["wind"], arguments=cut)}
    answer = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "no JSON"}
    tell("A.")
    for path, body in (
        (CHAT, {"messages": [*QUESTION, message, answer, *QUESTION], "tools": TOOLS}),
        (RESPONSES, {"input": [*QUESTION, call, result, *QUESTION], "tools": FUNCTIONS}),
    ):
        reply = sessions(source_of(name)).post(path, json=body)
        assert reply.status_code == 200, reply.text
    shown = [tokenizer.decode(ids) for ids, _ in started]
    assert shown[0] == shown[1]
    assert cut in shown[0] or json.dumps(cut)[1:-1] in shown[0]


def test_a_stream_says_that_it_is_alive(sessions, tell, monkeypatch):
    """While a prompt is prefilled; clients drop the comments."""
    monkeypatch.setattr(server_answer, "PATIENCE", 0.05)
    step = Choice.__call__
    monkeypatch.setattr(Choice, "__call__", lambda *args: (time.sleep(0.1), step(*args))[1])
    for path in (CHAT, RESPONSES, "/v1/completions"):
        tell("Hello")
        text = sessions(BOTH).post(path, json=PROMPTS[path] | {"stream": True}).text
        events = text.split("\n\n")
        assert events.count(": at work") > 1
        assert all(event.startswith((":", "data: ", "event: ")) for event in events if event)
        tell("Hello")
        assert "at work" not in sessions(BOTH).post(path, json=PROMPTS[path]).text


PATH = {"type": "object", "properties": {"at": {"type": "string", "format": "path"}}}
ODD = r"""[{"name": "read", "parameters": {"properties": {"at": {"format": "path", "type": "string"}}}},
{"name": "find", "parameters": {"properties": {"n": {"items": {"pattern": "^(?!x)"}}}}}]"""


def test_schemas_that_cannot_be_held(sessions, tell, capsys):
    """Under "auto" the rest holds, and the log says what does not; what is strict is refused by its
    tool, its path and its keyword."""
    for path in (CHAT, RESPONSES):
        functions = json.loads(ODD)
        odd = [{"function": function} if path == CHAT else function for function in functions]
        odd = [{"type": "function", **tool} for tool in odd]
        body = {**PROMPTS[path], "tools": odd}
        client = sessions(BOTH, "--dtype", "float32")
        call = '<tool_call>\n{"name": "read", "arguments": {"at": %s}}\n</tool_call>'
        tell(call % '"/a"')
        assert '"name":"read"' in client.post(path, json=body).text
        log = capsys.readouterr().err
        assert "; tools: read is not held to properties/at/format; " in log
        assert "; tools: find is not held to properties/n/items/pattern" in log
        tell(call % "5")
        assert "server failed" in client.post(path, json=body).text
        (odd[1].get("function") or odd[1])["strict"] = True
        error = client.post(path, json=body).json()["error"]
        assert error["param"] == "tools"
        assert error["message"].startswith("tools: find: properties/n/items/pattern: regex parse")
    form = {"type": "json_schema", "json_schema": {"schema": PATH}}
    for tools_too in ({}, {"tools": TOOLS}):
        body = {**PROMPTS[CHAT], "response_format": form, **tools_too}
        error = sessions(BOTH).post(CHAT, json=body).json()["error"]
        assert error["param"] == "response_format"
        assert "response_format: properties/at/format: Unknown format: path" in error["message"]


EFFORTS = (
    """{{ messages[0].content }}<{{ enable_thinking }}|{{ thinking }}|{{ reasoning_effort }}>"""
)


ASKED = """
{} | <||>
{"reasoning_effort": "low"} | <True|True|low>
{"reasoning": {"effort": "low", "summary": "auto"}} | <True|True|low>
{"reasoning": {"summary": "auto"}} | <||>
{"reasoning": {}} | <||>
{"reasoning_effort": {"effort": "low"}} | <True|True|low>
{"reasoning_effort": "none"} | <False|False|>
{"chat_template_kwargs": {"enable_thinking": false}} | <False||>
{"reasoning_effort": "low", "chat_template_kwargs": {"thinking": false}} | <True|False|low>
{"chat_template_kwargs": {"messages": [], "template": "x", "tools": 1}} | <||>
"""


@json_cases("asked, seen", ASKED)
def test_effort_reaches_the_template(sessions, tokenizer, asked, seen):
    for path, limit in ((CHAT, "max_tokens"), (RESPONSES, "max_output_tokens")):
        body = {**PROMPTS[path], **asked, limit: 1}
        usage = sessions(EFFORTS).post(path, json=body).json()["usage"]
        expected = [{"role": "user", "content": f"A{seen}"}]
        ids = llama2.encode_chat(tokenizer, expected, "{{ messages[0].content }}")
        assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(ids)


def test_effort_that_a_template_refuses(sessions, capsys):
    """A hint that cannot be followed is forgotten."""
    source = "{{ raise_exception('no') if enable_thinking is defined else messages[0].content }}"
    body = {**PROMPTS[CHAT], "reasoning_effort": "high", "max_tokens": 1}
    reply = sessions(source, "--dtype", "float32").post(CHAT, json=body)
    assert reply.status_code == 200
    said = "; the template takes no enable_thinking, thinking, reasoning_effort"
    assert said in capsys.readouterr().err
