"""Tests of examples/server.py as a process: by OpenAI's client, and by sockets where that is too kind.

They take the bundled model in float32, and one server for nearly all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import launch
import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

from helpers import SHAPE, config_keys, gguf_name, make_weights, vocabulary_keys, write_gguf

import llama2

ROOT = Path(llama2.__file__).resolve().parent
SERVER = ROOT / "examples" / "server.py"
STORY = "Once upon a time there was a king who had a daughter"
SAID = " €𝄞 was"
KEY = "sesame"
GREEDY = {"model": "any", "temperature": 0}


class Running:
    """A server, the port that it said, and what it wrote after that."""

    def __init__(self, *options: str) -> None:
        command = [*launch.command(SERVER), "--port", "0", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.notes: list[str] = []  # what it says before it listens
        while not (line := self.process.stderr.readline()).startswith("listening on http://"):
            assert line
            self.notes.append(line)
        self.port = int(line.rsplit(":", 1)[1])
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=KEY, max_retries=0, timeout=30
        )

    def stop(self) -> str:
        """SIGTERM; returns what it wrote."""
        self.process.terminate()
        try:
            _, log = self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert self.process.returncode == 0
        return log

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def send(self, path: str, body: bytes | dict, *headers: str) -> socket.socket:
        """A connection on which a POST was sent."""
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            f"Content-Length: {len(body)}",
            *headers,
        ]
        connection = self.connect()
        connection.sendall("\r\n".join([*head, "Connection: close", "", ""]).encode() + body)
        return connection

    def post(self, path: str, body: bytes | dict, *headers: str) -> tuple[int, dict]:
        """Status and answer of a POST."""
        with self.send(path, body, *headers) as connection:
            return answer(connection)

    def idle(self) -> bool:
        """Whether a short request is served at once."""
        start = time.perf_counter()
        self.client.completions.create(prompt="A", max_tokens=1, **GREEDY)
        return time.perf_counter() - start < 1


def receive(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            data += part
    return data


def answer(connection: socket.socket) -> tuple[int, dict]:
    head, _, body = receive(connection).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The bundled model with its weights dequantised once and not for each token."""
    path = tmp_path_factory.mktemp("float32") / llama2.DEFAULT_MODEL.name
    llama2.save_gguf(llama2.open_checkpoint(llama2.DEFAULT_MODEL), path, "F32")
    return path


@pytest.fixture(scope="module")
def server(path):
    server = Running("--model", str(path), "--quiet")
    yield server
    assert server.stop() == ""  # nothing of all that went wrong was worth a line


@pytest.fixture(scope="module")
def loaded(path):
    return llama2.load(path)


# --------------------------------------------------------------------------------------------------
# What it answers


def test_completion_is_that_of_the_library(server, loaded):
    model, tokenizer = loaded
    ids = tokenizer.encode(STORY)
    options = {"sampling": llama2.Sampling(0), "max_new_tokens": 40}
    stream = llama2.stream_text(model, tokenizer, ids, **options)
    expected = "".join(stream)
    reply = server.client.completions.create(prompt=STORY, max_tokens=40, **GREEDY)
    assert reply.choices[0].text == expected
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.prompt_tokens == len(ids)
    assert reply.usage.completion_tokens == 40
    assert reply.usage.total_tokens == len(ids) + 40
    by_ids = server.client.completions.create(prompt=ids, max_tokens=40, echo=True, **GREEDY)
    assert by_ids.choices[0].text == STORY + expected


def test_seed_temperature_and_top_p_are_those_of_the_library(server, loaded):
    model, tokenizer = loaded
    options = {"temperature": 0.9, "top_p": 0.8, "seed": 7}
    ids = tokenizer.encode(STORY)
    sampling = {"sampling": llama2.Sampling(**options), "max_new_tokens": 30}
    stream = llama2.stream_text(model, tokenizer, ids, **sampling)
    reply = server.client.completions.create(model="", prompt=STORY, max_tokens=30, **options)
    assert reply.choices[0].text == "".join(stream)


def test_several_prompts(server):
    prompts = [STORY, "The wolf", "In the forest"]
    many = server.client.completions.create(prompt=prompts, max_tokens=9, **GREEDY)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    for prompt, choice in zip(prompts, many.choices, strict=True):
        one = server.client.completions.create(prompt=prompt, max_tokens=9, **GREEDY)
        assert one.choices[0].text == choice.text
    chunks = server.client.completions.create(prompt=prompts, max_tokens=9, stream=True, **GREEDY)
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in many.choices]


def test_chat_is_encoded_in_the_models_format(server, loaded):
    model, tokenizer = loaded
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Who?"}]
    ids = llama2.encode_chat(tokenizer, messages, "llama-2")
    _, tags = llama2.chat_stops(tokenizer, "llama-2")  # texts, none of them a token
    options = {"stop": tags, "stop_ids": (tokenizer.eos_id,), "max_new_tokens": 25}
    stream = llama2.stream_text(model, tokenizer, ids, sampling=llama2.Sampling(0), **options)
    expected = "".join(stream).lstrip()
    messages[1]["content"] = [{"type": "text", "text": "Who?"}]
    reply = server.client.chat.completions.create(messages=messages, max_tokens=25, **GREEDY)
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == expected
    assert reply.usage.prompt_tokens == len(ids)


def test_chat_stream(server):
    messages = [{"role": "user", "content": "Tell me a tale"}]
    options = {"messages": messages, "max_completion_tokens": 20, **GREEDY}
    whole = server.client.chat.completions.create(**options)
    usage = {"include_usage": True}
    chunks = [*server.client.chat.completions.create(**options, stream=True, stream_options=usage)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_as_bytes(server):
    body = {"prompt": STORY, "max_tokens": 3, "stream": True, "temperature": 0}
    with server.send("/v1/completions", body) as connection:
        data = receive(connection)
    head, _, _ = data.partition(b"\r\n\r\n")
    assert b"text/event-stream" in head
    assert data.count(b"data: ") == 5  # three tokens, the end of the choice, [DONE]
    assert b"data: [DONE]\n\n" in data


def test_stop_texts_that_span_tokens(server, loaded):
    text = server.client.completions.create(prompt=STORY, max_tokens=40, **GREEDY).choices[0].text
    stop = text[20:31]
    assert len(loaded[1].encode(stop, bos=False)) > 1
    cut = text[: text.index(stop)]
    for stops in (stop, ["never there", stop]):
        options = {"prompt": STORY, "max_tokens": 40, "stop": stops, **GREEDY}
        reply = server.client.completions.create(**options)
        assert reply.choices[0].text == cut
        assert reply.choices[0].finish_reason == "stop"
        assert reply.usage.completion_tokens < 40
        chunks = [*server.client.completions.create(**options, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == cut
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_tokenize(server, loaded):
    ids = loaded[1].encode(STORY, bos=False)
    assert server.post("/tokenize", {"content": STORY})[1]["tokens"] == ids
    with_bos = server.post("/tokenize", {"content": STORY, "add_special": True})[1]
    assert with_bos == {"tokens": [1, *ids], "count": len(ids) + 1}
    assert server.post("/detokenize", {"tokens": ids})[1]["content"] == STORY
    assert server.post("/detokenize", {"tokens": [10**9]})[0] == 400


def test_models(server):
    (model,) = server.client.models.list().data
    assert model.id == "fairytales"


# --------------------------------------------------------------------------------------------------
# Log-probabilities


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_evaluation_harness(server, loaded, max_tokens):
    """The request of lm-evaluation-harness' local-completions, read as its parse_logprobs does."""
    model, tokenizer = loaded
    ids = [tokenizer.encode(text) for text in (STORY, "Once upon a time a fox: come in")]
    body = {"model": "m", "prompt": ids, "temperature": 0, "max_tokens": max_tokens}
    status, reply = server.post(
        "/v1/completions", {**body, "logprobs": 1, "seed": 1234, "echo": True}
    )
    assert status == 200
    for choice, prompt in zip(reply["choices"], ids, strict=True):
        table = choice["logprobs"]
        expected = llama2.score(model, prompt)
        assert {len(column) for column in table.values()} == {len(prompt) + max_tokens}
        assert table["token_logprobs"][0] is None
        assert table["top_logprobs"][0] is None
        found = table["token_logprobs"][1 : len(prompt)]
        assert found == pytest.approx(expected.tolist(), abs=1e-4)
        logits = model(llama2.torch.tensor([prompt]))[0]
        greedy = [max(top.values()) == p for top, p in zip(table["top_logprobs"][1:], found)]
        assert greedy == (logits[:-1].argmax(-1) == llama2.torch.tensor(prompt[1:])).tolist()
        assert any(greedy) and not all(greedy)
        for text, start in zip(table["tokens"], table["text_offset"], strict=True):
            assert choice["text"][start : start + len(text)] == text
        assert "".join(table["tokens"]) == choice["text"]


def test_logprobs_of_new_tokens(server, loaded):
    model, tokenizer = loaded
    options = {"prompt": STORY, "max_tokens": 12, "logprobs": 3, **GREEDY}
    (choice,) = server.client.completions.create(**options).choices
    table = choice.logprobs
    assert "".join(table.tokens) == choice.text
    assert all(len(top) == 3 for top in table.top_logprobs)
    assert [max(top.values()) for top in table.top_logprobs] == table.token_logprobs
    ids = tokenizer.encode(STORY + choice.text)
    expected = llama2.score(model, ids)
    assert table.token_logprobs == pytest.approx(expected[-12:].tolist(), abs=1e-4)
    *_, last = server.client.completions.create(**options, stream=True)
    streamed = last.choices[0].logprobs
    assert streamed.token_logprobs == pytest.approx(table.token_logprobs, abs=1e-4)
    assert streamed.tokens == table.tokens


def test_logprobs_end_before_a_stop_text(server):
    text = server.client.completions.create(prompt=STORY, max_tokens=40, **GREEDY).choices[0].text
    stop = text[20:31]
    options = {"prompt": STORY, "max_tokens": 40, "logprobs": 0, "stop": stop, **GREEDY}
    (choice,) = server.client.completions.create(**options).choices
    table = choice.logprobs
    assert all(start < len(choice.text) for start in table.text_offset)
    assert "".join(table.tokens).startswith(choice.text)


# --------------------------------------------------------------------------------------------------
# One model, many clients


def test_many_clients_get_what_they_would_alone(server):
    def ask(i: int) -> str:
        prompt = f"{STORY}. {i} years later"
        options = {"prompt": prompt, "max_tokens": 5, "temperature": 0.7, "seed": i, "model": ""}
        if i % 2:
            return server.client.completions.create(**options).choices[0].text
        chunks = server.client.completions.create(**options, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    assert together == [ask(i) for i in range(16)]
    assert len(set(together)) > 8


def test_a_chat_that_goes_on_reads_only_what_is_new(server):
    messages = [{"role": "user", "content": "Tell me of the wolf and of the seven little kids"}]
    options = {"max_tokens": 10, **GREEDY}
    first = server.client.chat.completions.create(messages=messages, **options)
    said = first.choices[0].message.content
    more = [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    prompts = {"messages": [*messages, *more], **options}
    second = server.client.chat.completions.create(**prompts)
    reused = second.usage.prompt_tokens_details.cached_tokens
    assert reused >= first.usage.prompt_tokens - 2
    for i in range(6):  # others take the caches
        server.client.completions.create(prompt=f"{i} {STORY}", max_tokens=1, **GREEDY)
    anew = server.client.chat.completions.create(**prompts)
    assert anew.usage.prompt_tokens_details.cached_tokens < 5
    assert anew.choices[0].message.content == second.choices[0].message.content


LONG = {"prompt": STORY, "max_tokens": 480, "temperature": 1.5, "seed": 1, "logit_bias": {}}


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_is_not_served_on(server, stream):
    running = server.send("/v1/completions", {**LONG, "stream": stream})
    waiting = [server.send("/v1/completions", {**LONG, "stream": stream}) for _ in range(20)]
    time.sleep(0.2)
    for connection in (*waiting, running):
        connection.close()
    assert server.idle()  # 21 answers of 480 tokens would take half a minute


def wait_for_answers(held: list[socket.socket], count: int) -> list[socket.socket]:
    """Those that have something to read, once they are so many, or after ten seconds."""
    deadline = time.monotonic() + 10
    while len(answered := select.select(held, [], [], 0)[0]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return answered


def test_full_queue(server):
    held = [server.send("/v1/completions", LONG) for _ in range(66)]  # one runs, 64 wait
    wait_for_answers(held, 1)
    with pytest.raises(openai.InternalServerError) as error:
        server.client.completions.create(prompt="A", model="")
    assert error.value.status_code == 503
    assert int(error.value.response.headers["retry-after"]) > 0
    for connection in held:
        connection.close()
    assert server.idle()


def test_the_queue_is_bounded_for_those_who_come_at_once(server):
    body = json.dumps(LONG).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: [::1]:80\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    held = [server.connect() for _ in range(100)]
    for connection in held:
        connection.sendall(head + body)
    answered = wait_for_answers(held, 35)  # which have no place
    refused = [connection.recv(64).startswith(b"HTTP/1.1 503 ") for connection in answered]
    assert sum(refused) >= 30  # as answers may end meanwhile
    for connection in held:
        connection.close()
    assert server.idle()


def test_slow_reader_holds_up_nobody(server):
    with server.send("/v1/completions", {**LONG, "max_tokens": 50, "stream": True}) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        server.client.completions.create(prompt="A", max_tokens=1, **GREEDY)
        assert b"[DONE]" in receive(connection)


def test_health_while_a_long_prompt_is_read(server):
    """Each answer in 50 ms, but for a few that a busy machine delays."""
    prompt = {"prompt": [7] * 511, "max_tokens": 1, "echo": True, "logprobs": 5}
    seconds = []
    with server.send("/v1/completions", prompt) as connection, server.connect() as other:
        done = threading.Event()
        threading.Thread(target=lambda: (receive(connection), done.set())).start()
        while not done.is_set():
            start = time.perf_counter()
            other.sendall(b"GET /health HTTP/1.1\r\nHost: [::1]:80\r\n\r\n")
            data = b""
            while b'{"status":"ok"}' not in data:
                data += other.recv(4096)
            seconds.append(time.perf_counter() - start)
    assert len(seconds) > 10
    assert sorted(seconds)[len(seconds) // 2] < 0.02
    assert sorted(seconds)[len(seconds) * 9 // 10] < 0.05


# --------------------------------------------------------------------------------------------------
# What it refuses

PROMPT = {"prompt": "A", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1}
BAD_FIELDS = [
    *[("max_tokens", v) for v in (-1, 1.5, "5", True, [], {}, 2**31, 10**400)],
    *[("max_completion_tokens", v) for v in (-1, "5", False)],
    *[("temperature", v) for v in (-0.1, 2.1, "0", True, [], 10**400)],
    *[("top_p", v) for v in (-0.1, 1.1, "1", False, {})],
    *[("seed", v) for v in (1.5, "1", "", False, 2**63, -(2**63) - 1, [])],
    *[("n", v) for v in (0, 2, "1", True, 1.0)],
    *[("stop", v) for v in ("", [""], [1], 1, {}, ["a"] * 17, "a" * 257, [["a"]])],
    *[("stream", v) for v in ("true", 1, 0, [])],
    *[("stream_options", v) for v in (1, "a", [], True)],
    *[("model", v) for v in (1, [], {}, False)],
]
UNSUPPORTED = [
    *(("tools", [{"type": "function"}]), ("tool_choice", "required"), ("functions", [{}])),
    *(("response_format", {"type": "json_object"}), ("suffix", "B"), ("best_of", 2), ("n", 3)),
    *(("max_token", 5), ("modalities", ["audio"]), ("reasoning_effort", "low"), ("prediction", {})),
    *(("stream_options", {"include_obfuscation": True, "odd": 1}), ("grammar", "root ::= x"))[1:],
    *[("logit_bias", v) for v in ([], {"x": 1}, {"5": "1"}, {"999999": 1}, {"-1": 1}, {"1": None})],
    *(("top_k", -1), ("top_k", 1.5), ("min_p", 2), ("repetition_penalty", 0), ("seed", 2**63)),
    *(("presence_penalty", 101), ("frequency_penalty", "1"), ("cache_prompt", 1)),
]
NEUTRAL = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "n": 1,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "suffix": None,
    "logit_bias": {},
    "best_of": 1,
    "echo": False,
    "top_p": 1,
    "presence_penalty": 0,
    "parallel_tool_calls": True,
    "stop": None,
    "seed": None,
    "stream": None,
    "unknown": None,
    "stream_options": {"include_usage": False},
    "safety_identifier": "x",
    "logprobs": None,
}
BAD_PROMPTS = [
    *(None, 1, 1.5, True, {}, [], [[]], [[], "a"], [1.5], [True], [-1], [10**6], [10**30]),
    *([[1], [10**6]], ["a", 1], [None], ["a"] * 129, [["a"]], [{"a": 1}], "a " * 600, [5] * 512),
]
BAD_MESSAGES = [
    *(None, [], "A", {}, ["A"], [[]], [{}], [{"role": "user"}], [{"content": "A"}], 1, [None]),
    *([{"role": "user", "content": c}] for c in (None, 1, {}, ["A"], [{"type": "image_url"}])),
    *([{"role": r, "content": "A"}] for r in ("assistant", "tool", "", None, 1, [])),
    [{"role": "user", "content": "a " * 600}],
    [{"role": "user", "content": "a [/INST] b"}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}],
    [{"role": "\ud800", "content": "A"}],
    [{"role": "user", "content": "A", "tool_calls": [{"id": "1"}]}],
    [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}],
]
BAD_BODIES = [
    *(b"", b"{", b"[]", b"1", b"null", b'"a"', b"\xff\xfe", b'{"prompt": "\xff"}', b"{} {}", b"\0"),
    *(b'{"prompt": "A", "temperature": %s}' % v for v in (b"NaN", b"Infinity", b"-Infinity")),
    *(b"[" * 200_000, b'{"a":' * 100_000, b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}"),
    *(b'{"seed": ' + b"9" * 10_000 + b', "prompt": "A"}', "{}".encode("utf-16"), b"prompt=A"),
]


def test_impossible_fields(server):
    for name, value in BAD_FIELDS:
        for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
            status, reply = server.post(path, {**body, name: value})
            assert status == 400, (name, value)
            assert reply["error"]["param"] == name
            assert name in reply["error"]["message"]
            assert json.dumps(value)[:10] in reply["error"]["message"]
    for name, value in (("logprobs", 21), ("logprobs", True), ("echo", 1)):
        assert server.post("/v1/completions", {**PROMPT, name: value})[0] == 400
    for name in ("max_tokens", "temperature"):  # infinity, but JSON
        body = b'{"prompt": "A", "%s": 1e999}' % name.encode()
        assert server.post("/v1/completions", body)[1]["error"]["param"] == name
    options = {"include_usage": 1}
    status, reply = server.post("/v1/completions", {**PROMPT, "stream_options": options})
    assert (status, reply["error"]["param"]) == (400, "include_usage")
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        for name, value in UNSUPPORTED:
            status, reply = server.post(path, {**body, name: value})
            assert (status, reply["error"]["param"]) == (400, name)
    chat = "/v1/chat/completions"
    for name, value in (("logprobs", 1), ("echo", True), ("top_logprobs", 5)):
        assert server.post(chat, {**CHAT, name: value})[1]["error"]["param"] == name
    over = {**CHAT, "logprobs": True, "top_logprobs": 21}
    assert server.post(chat, over)[1]["error"]["param"] == "top_logprobs"
    bans = {"logit_bias": dict.fromkeys(map(str, range(4096)), -1e39)}
    status, reply = server.post("/v1/completions", {**PROMPT, **bans})
    assert status == 400 and "leaves no token" in reply["error"]["message"]
    assert server.post("/tokenize", {"content": "A", "with_pieces": True})[0] == 400
    assert server.post("/detokenize", {"tokens": [5], "other": 1})[0] == 400


def test_bad_prompts_and_bodies(server):
    assert len(BAD_FIELDS) + len(BAD_PROMPTS) + len(BAD_MESSAGES) + len(BAD_BODIES) > 100
    for prompt in BAD_PROMPTS:
        status, reply = server.post("/v1/completions", {"prompt": prompt})
        assert (status, reply["error"]["param"]) == (400, "prompt"), str(prompt)[:60]
    for messages in BAD_MESSAGES:
        status, reply = server.post("/v1/chat/completions", {"messages": messages})
        assert (status, reply["error"]["param"]) == (400, "messages"), str(messages)[:60]
    for body in BAD_BODIES:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            status, reply = server.post(path, body)
            assert status == 400, body[:60]
            assert set(reply["error"]) == {"message", "type", "param", "code"}
            is_object = False
            with contextlib.suppress(ValueError, RecursionError):
                is_object = isinstance(json.loads(body), dict)
            assert is_object == (reply["error"]["param"] is not None), body[:60]


def test_too_long_prompt_has_openais_code(server):
    with pytest.raises(openai.BadRequestError) as error:
        server.client.completions.create(prompt=[5] * 512, model="")
    assert error.value.code == "context_length_exceeded"
    reply = server.client.completions.create(prompt=[5] * 511, max_tokens=9, **GREEDY)
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (1, "length")


def test_neutral_fields_are_taken(server):
    """What clients send that changes nothing: openai's, LangChain's, editors'."""
    assert server.post("/v1/completions", {**PROMPT, **NEUTRAL})[0] == 200
    chat = {**CHAT, **NEUTRAL, "logprobs": False, "top_logprobs": 0}
    assert server.post("/v1/chat/completions", chat)[0] == 200
    message = {"role": "user", "content": "A", "name": None, "tool_calls": [], "refusal": None}
    assert server.post("/v1/chat/completions", {**CHAT, "messages": [message]})[0] == 200


def test_odd_texts_are_served(server):
    for text in ("", "\ud800", "\0", "é" * 9, "</s><s>", "𝄞"):
        body = {"prompt": text, "echo": True, "max_tokens": 1, "logprobs": 5}
        assert server.post("/v1/completions", body)[0] == 200, text


def test_paths_and_methods(server):
    assert server.post("/v1/nothing", {})[0] == 404
    assert server.post("/health", {})[0] == 405
    assert server.post("/v1/nothing", {})[1]["error"]["type"] == "invalid_request_error"


def test_large_bodies_are_refused_before_they_are_read(server):
    with server.connect() as connection:
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: [::1]:80\r\nContent-Length: 1000001\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    with server.connect() as connection:
        head = b"POST /tokenize HTTP/1.1\r\nHost: [::1]:80\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + (b"186a0\r\n" + b"a" * 100_000 + b"\r\n") * 11)
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    body = b'{"content": "' + b"a" * (10**6 - 15) + b'"}'
    assert len(body) == 10**6
    assert server.post("/tokenize", body)[0] == 200


def test_half_sent_bodies_hold_up_nobody(server):
    held = []
    for _ in range(20):
        connection = server.connect()
        connection.sendall(
            b'POST /tokenize HTTP/1.1\r\nHost: [::1]:80\r\nContent-Length: 99\r\n\r\n{"con'
        )
        held.append(connection)
    assert server.idle()
    for connection in held:
        connection.close()
    assert server.idle()


@pytest.fixture(scope="module")
def parrot(tmp_path_factory, loaded):
    """A server with a key, whose model says SAID and EOS after "A": each token has one successor.

    Its chat template is unknown.
    """
    tokenizer = loaded[1]
    said = tokenizer.encode("A" + SAID, bos=False) + [tokenizer.eos_id]
    assert len(set(said)) == len(said)
    config = llama2.Config(**SHAPE | {"vocab_size": tokenizer.vocab_size})
    weights = make_weights(config)
    for name, weight in weights.items():
        if "_proj" in name:
            weight[:] = 0
    rows = weights["embed_tokens.weight"]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    weights["lm_head.weight"][:] = 0
    for token_id, successor in itertools.pairwise(said):
        weights["lm_head.weight"][successor] = 9 * rows[token_id]
    path = tmp_path_factory.mktemp("parrot") / "parrot.gguf"
    keys = config_keys(config) | vocabulary_keys(tokenizer.sp)
    keys["tokenizer.chat_template"] = "{{ odd }}"
    write_gguf(path, keys, {gguf_name(name): weight for name, weight in weights.items()})
    server = Running("--api-key", KEY, "--context", "48", "--model", str(path), "--quiet")
    yield server
    assert server.stop() == ""


def test_characters_are_whole(parrot):
    """Bytes of a character come in one chunk, though each is a token."""
    chunks = parrot.client.completions.create(prompt="A", max_tokens=30, stream=True, **GREEDY)
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == SAID
    assert "€" in texts
    assert "𝄞" in texts


def test_end_of_text(parrot, loaded):
    options = {"prompt": "A", "max_tokens": 30, "logprobs": 1, "echo": True, **GREEDY}
    reply = parrot.client.completions.create(**options)
    (choice,) = reply.choices
    new = len(loaded[1].encode("A" + SAID)) - 2
    assert choice.text == "A" + SAID
    assert choice.finish_reason == "stop"
    assert reply.usage.completion_tokens == new
    assert len(choice.logprobs.tokens) == 2 + new + 1  # BOS, A and EOS, whose score harnesses drop
    cut = parrot.client.completions.create(**{**options, "max_tokens": 2})
    assert cut.choices[0].text == "A \ufffd"  # one of the three bytes of a character
    assert cut.choices[0].finish_reason == "length"


def test_stop_text_of_bytes(parrot):
    options = {"prompt": "A", "max_tokens": 30, "stop": ["𝄞"], **GREEDY}
    assert parrot.client.completions.create(**options).choices[0].text == SAID.partition("𝄞")[0]


def test_unknown_chat_template(parrot):
    """The model is served all the same; what cannot be is a chat, which is said at the start."""
    assert "unknown chat template '{{ odd }}'; choose --chat-format" in parrot.notes[0]
    with pytest.raises(openai.BadRequestError, match="template is unknown") as error:
        parrot.client.chat.completions.create(**CHAT, model="")
    assert error.value.param == "messages"


def test_api_key_and_context(parrot):
    for header in (
        "X: y",
        "Authorization: Bearer x",
        "Authorization: Bearer",
        f"Authorization: {KEY}",
    ):
        for path in ("/v1/completions", "/tokenize", "/v1/nothing"):
            status, reply = parrot.post(path, {"content": "A"}, header)
            assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
    with parrot.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: [::1]:80\r\nConnection: close\r\n\r\n")
        assert answer(connection) == (200, {"status": "ok"})
    assert parrot.post("/tokenize", {"content": "A"}, f"Authorization: Bearer {KEY}")[0] == 200
    with pytest.raises(openai.BadRequestError) as error:
        parrot.client.completions.create(prompt=[5] * 48, model="")
    assert error.value.code == "context_length_exceeded"


# --------------------------------------------------------------------------------------------------
# Log-probabilities of a chat, sampling, what is reused


def test_logprobs_of_a_chat(server, loaded):
    """OpenAI's form; each token is among its `top_logprobs`, a newline is a newline."""
    model, tokenizer = loaded
    messages = [{"role": "user", "content": "Tell me of a king"}]
    options = {"messages": messages, "max_tokens": 30, "logprobs": True, "seed": 3, "model": ""}
    reply = server.client.chat.completions.create(**options, top_logprobs=20, temperature=1.5)
    (choice,) = reply.choices
    content = choice.logprobs.content
    ids = llama2.encode_chat(tokenizer, messages, "llama-2")
    for entry in content:
        tops = {top.token: top.logprob for top in entry.top_logprobs}
        assert tops[entry.token] == entry.logprob and len(tops) in (20, 21)
        assert "<0x0A>" not in tops and "\u2581" not in "".join(tops)
    assert any("\n" in {top.token for top in entry.top_logprobs} for entry in content)
    assert b"".join(bytes(e.bytes) for e in content).decode().lstrip() == choice.message.content
    pieces = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids += [pieces[bytes(entry.bytes)] for entry in content]
    expected = llama2.score(model, ids)
    assert [e.logprob for e in content] == pytest.approx(
        expected[-len(content) :].tolist(), abs=1e-4
    )
    plain = server.client.chat.completions.create(**options, temperature=1.5)
    assert plain.choices[0].message.content == choice.message.content
    *_, last = server.client.chat.completions.create(**options, temperature=1.5, stream=True)
    assert [entry.token for entry in last.choices[0].logprobs.content] == [e.token for e in content]
    assert reply.id.startswith("chatcmpl-") and last.id.startswith("chatcmpl-")


def test_sampling_is_that_of_the_library(server, loaded):
    model, tokenizer = loaded
    fields = {"temperature": 1.2, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.3}
    fields |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 5}
    ids, sampling = (
        tokenizer.encode(STORY),
        llama2.Sampling(**fields, logit_bias={300: 4, 13: -100}),
    )
    options = {"sampling": sampling, "max_new_tokens": 30}
    wanted = "".join(llama2.stream_text(model, tokenizer, ids, **options))
    body = {"prompt": STORY, "max_tokens": 30, **fields, "logit_bias": {"300": 4, "13": -100}}
    assert server.post("/v1/completions", body)[1]["choices"][0]["text"] == wanted


def test_a_field_with_a_name_that_utf_8_cannot_hold(server):
    status, reply = server.post("/v1/completions", {"prompt": "A", "max_tokens": 1, "\ud800": 1})
    assert status == 400 and {*reply["error"]["param"]} == {"\ufffd"}


def test_a_developer_is_the_system(server):
    replies = []
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "Be brief"}, {"role": "user", "content": "Who?"}]
        options = {"messages": messages, "max_tokens": 5, **GREEDY}
        replies.append(server.client.chat.completions.create(**options))
    first, second = replies
    assert first.choices[0].message == second.choices[0].message
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    two = [*messages, {"role": "user", "content": "B"}]
    with pytest.raises(openai.BadRequestError, match="expected the roles"):
        server.client.chat.completions.create(messages=two, model="")


def cached(server, **body):
    """How many tokens of a prompt were not read again."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, reply = server.post(path, {"max_tokens": 5, "temperature": 0, **body})
    assert status == 200
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_chats_with_one_system_prompt_share_it(server):
    """Three chats, four caches: each goes on from its own turns, and begins with the others' prompt."""
    system = {"role": "system", "content": "You tell tales of kings and of their daughters. " * 6}
    chats = [[system, {"role": "user", "content": f"{i} {STORY}"}] for i in range(3)]
    for i in range(4):  # nothing of it is held
        cached(server, prompt=f"{i} another matter altogether")
    first = [cached(server, messages=chat) for chat in chats]
    assert first[0] < 5 and min(first[1:]) > 60
    for turn in range(2):
        for chat in chats:
            before = server.post(
                "/v1/chat/completions", {"messages": chat, "max_tokens": 5, **GREEDY}
            )
            usage = before[1]["usage"]
            said = before[1]["choices"][0]["message"]["content"]
            chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
            assert cached(server, messages=chat) >= usage["prompt_tokens"] - 3, turn


def test_a_cached_beginning_is_not_used_unless_wanted(server):
    """Not for `"cache_prompt": false`, nor by itself where a seed is given."""
    assert cached(server, prompt=STORY) >= 0
    assert cached(server, prompt=STORY) > 5
    assert cached(server, prompt=STORY, cache_prompt=False) == 0
    assert cached(server, prompt=STORY, seed=1) == 0
    assert cached(server, prompt=STORY, seed=1, cache_prompt=True) > 5
    assert cached(server, prompt=STORY, echo=True, logprobs=1) == 0


def test_seeded_text_does_not_depend_on_others(server):
    """Whatever prefix another client has left in a cache."""
    body = {"prompt": STORY * 2, "max_tokens": 12, "temperature": 1, "seed": 4}
    texts = set()
    for n in (0, 9, 20, 30, len(STORY)):
        cached(server, prompt=(STORY * 2)[: n + 1])
        texts.add(server.post("/v1/completions", body)[1]["choices"][0]["text"])
    assert len(texts) == 1


# --------------------------------------------------------------------------------------------------
# Browsers, connections, the log


def get(server, path, *headers, method="GET"):
    """The head and the body of the answer to a request."""
    with server.connect() as connection:
        head = [f"{method} {path} HTTP/1.1", *headers, "Connection: close", "", ""]
        connection.sendall("\r\n".join(head).encode())
        head, _, body = receive(connection).partition(b"\r\n\r\n")
    return head.decode().lower(), body


def test_other_sites_are_refused(server):
    """By the name they rebind, by the page's origin, by what forms can send."""
    for host in ("localhost", "localhost:8080", "127.0.0.1:1", "[::1]:1", "10.0.0.7"):
        assert "200 ok" in get(server, "/health", f"Host: {host}")[0]
        assert "200 ok" in get(server, "/health", f"Host: {host}", f"Origin: http://{host}")[0]
    for host in ("evil.com", "localhost.evil.com", "127.0.0.1.evil.com", "", "x"):
        head, body = get(server, "/v1/models", f"Host: {host}")
        assert " 403 " in head and b"data" not in body
    for origin in ("http://evil.com", "null", "https://localhost", "http://localhost:9"):
        assert " 403 " in get(server, "/v1/models", "Host: localhost", f"Origin: {origin}")[0]
    for kind in ("text/plain", "multipart/form-data; boundary=x"):
        assert server.post("/v1/completions", PROMPT, f"Content-Type: {kind}")[0] == 415
    for kind in ("application/json", "application/x-www-form-urlencoded"):  # the latter is curl's
        assert server.post("/v1/completions", PROMPT, f"Content-Type: {kind}")[0] == 200


def test_cors_log_and_private_prompts(path):
    """One site is let in, each request is a line, and no prompt is held for another."""
    site = "https://chat.example"
    server = Running("--model", str(path), "--cors", site, "--no-prompt-cache")
    asks = "Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization"
    head, _ = get(
        server, "/v1/completions", "Host: localhost", f"Origin: {site}", *asks, method="OPTIONS"
    )
    assert " 200 " in head and f"access-control-allow-origin: {site}" in head
    assert "authorization" in head and "post" in head
    head, _ = get(server, "/v1/models", "Host: localhost", f"Origin: {site}")
    assert " 200 " in head and f"access-control-allow-origin: {site}" in head
    head, _ = get(server, "/v1/models", "Host: localhost", "Origin: https://evil.com")
    assert " 403 " in head and "access-control-allow-origin" not in head
    assert [cached(server, prompt=STORY), cached(server, prompt=STORY)] == [0, 0]
    server.post("/v1/completions", {**PROMPT, "tools": [1]})
    get(server, "/v1/%1b[31m", "Host: localhost")
    log = server.stop().splitlines()  # a line is written when all is done: in any order
    assert all(re.match(r"\d\d:\d\d:\d\d /", line) and line.isprintable() for line in log)
    found = sorted(line.partition(" ")[2] for line in log)
    odd, *reads, refused, models, foreign = found
    for line in reads:
        said = r"/v1/completions 200 read 13 \+ 0 cached, made 5, [\d.]+ tokens/s"
        assert re.fullmatch(said, line), line
    assert (len(reads), odd, refused) == (2, r"/v1/\x1b[31m 404", "/v1/completions 400")
    assert (models, foreign) == ("/v1/models 200", "/v1/models 403")


def test_idle_connections(path):
    """1,100 of them: /health answers, a line says that the oldest are closed, SIGTERM is obeyed."""
    server = Running("--model", str(path))
    held = [server.connect() for _ in range(1100)]
    assert b"ok" in get(server, "/health", "Host: localhost")[1]
    assert cached(server, prompt=STORY) == 0
    start = time.perf_counter()
    log = server.stop().splitlines()
    assert time.perf_counter() - start < 5
    assert len(log) == 3 and "connections: idle ones are closed" in log[0]
    for connection in held:
        connection.close()


# --------------------------------------------------------------------------------------------------
# How it begins and ends


def test_sigterm_ends_streams():
    server = Running("--quiet")
    stream = server.send("/v1/completions", {**LONG, "stream": True})
    while b"data: " not in stream.recv(65536):
        pass
    waiting = server.send("/v1/completions", LONG)
    time.sleep(0.3)
    start = time.perf_counter()
    assert server.stop() == ""
    assert time.perf_counter() - start < 4
    assert receive(stream).rstrip(b"\r\n0").endswith(b"data: [DONE]")
    assert answer(waiting)[0] == 503


def run(
    *options: str, python: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*(python or launch.command(SERVER)), *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_what_cannot_be_is_one_line(tmp_path):
    (tmp_path / "uvicorn.py").write_text("raise ImportError(name='uvicorn')")
    missing = run(python=(sys.executable, str(SERVER)), PYTHONPATH=str(tmp_path))
    assert 'uvicorn is missing: pip install "starlette>=1.6"' in missing.stderr
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor() as pool:
        wrong = pool.submit(run, "--model", str(tmp_path / "none.gguf"))
        taken = pool.submit(run, "--port", str(other.getsockname()[1]))
    for result in (missing, wrong.result(), taken.result()):
        assert result.returncode == 2
        assert result.stderr.count("\n") == 1
