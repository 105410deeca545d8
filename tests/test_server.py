"""Tests of examples/server as a process: by OpenAI's client, and by sockets where that is too kind.

They take the bundled model in float32, and one server for nearly all of them.
"""

import argparse
import asyncio
import json
import math
import os
import random
import re
import select
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

from server import __main__ as program
from server.serving import Session

import llama2
from test_llama2 import SCRIPT, cases, one_line, ran

SERVER = SCRIPT.parent / "examples/server"
STORY = "Once upon a time there was a king who had a daughter"
KEY = "sesame"
GREEDY = {"model": "any", "temperature": 0}
LONG = {"prompt": STORY, "max_tokens": 480, "temperature": 1.5, "seed": 1}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Running:
    """A server."""

    def __init__(self, *options, program=(SERVER,)):
        fixed = "--port", "0", "--threads", "1", "--device", "cpu"
        command = [sys.executable, *program, *fixed, *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while not (line := self.process.stderr.readline()).startswith("listening on "):
            assert line
        self.url = line.split()[-1]
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        self.host, self.port = host.strip("[]"), int(port)
        self.http = openai.DefaultHttpxClient(base_url=self.url, timeout=120)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)
        self.complete = self.client.completions.create
        self.chat = self.client.chat.completions.create

    def stop(self):
        """SIGTERM; returns what it wrote."""
        self.process.terminate()
        _, log = self.process.communicate(timeout=100)
        assert self.process.returncode == 0
        return log

    def connect(self, data=b""):
        """A connection on which this was sent."""
        connection = socket.create_connection((self.host, self.port), timeout=50)
        connection.sendall(data)
        return connection

    def send(self, **body):
        """A connection on which a long completion was asked for."""
        data = json.dumps(LONG | body)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        return self.connect(
            f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n{data}".encode()
        )

    def get(self, path, **headers):
        """Status of a GET."""
        return self.http.get(path, headers=headers).status_code

    def post(self, path, body, **headers):
        """Status and answer of a POST."""
        data = body if isinstance(body, bytes) else json.dumps(body)
        reply = self.http.post(path, content=data, headers=headers)
        return reply.status_code, reply.json()

    def cached(self, **body):
        """How many tokens of a prompt are not read again."""
        path = CHAT if "messages" in body else COMPLETIONS
        _, reply = self.post(path, {"max_tokens": 5, "temperature": 0, **body})
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def receive(connection):
    return connection.makefile("rb").read()


@pytest.fixture(scope="module")
def server():
    server = Running("--quiet")
    yield server
    assert server.stop() == ""  # nothing of all that went wrong was worth a line


@pytest.fixture(scope="module")
def loaded():
    return llama2.load(llama2.DEFAULT_MODEL, dtype="auto")


def library(loaded, prompt, max_new_tokens, temperature=0, **sampling):
    """What llama2 says without a server."""
    model, tokenizer = loaded
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    options = {"sampling": llama2.Sampling(temperature, **sampling)}
    options["max_new_tokens"] = max_new_tokens
    return "".join(llama2.stream_text(model, tokenizer, ids, **options))


# --------------------------------------------------------------------------------------------------
# What it answers


def test_completions_are_those_of_the_library(server, loaded):
    """Of texts and of ids, streamed or not."""
    prompts = [STORY, "The wolf"]
    expected = [prompt + library(loaded, prompt, 9) for prompt in prompts]
    ids = [loaded[1].encode(prompt) for prompt in prompts]
    options = {"max_tokens": 9, "echo": True, **GREEDY}
    reply = server.complete(prompt=ids, **options)
    assert [choice.text for choice in reply.choices] == expected
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids[0] + ids[1]), 18)
    texts = ["", ""]
    for chunk in server.complete(prompt=prompts, **options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


SAMPLING = """{"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 5,
"repetition_penalty": 1.3}"""
ADJUSTMENT = """{"presence_penalty": 0.5, "frequency_penalty": 0.25,
"logit_bias": {"300": 4, "13": -100}}"""


def test_sampling_is_that_of_the_library(server, loaded):
    """Up to a stop text that spans tokens."""

    def adjust(seen, logits):
        logits[300] += 4
        logits[13] -= 100
        recent = seen[-64:]
        for token_id in {*recent}:
            logits[token_id] -= 0.5 + 0.25 * recent.count(token_id)
        return logits

    fields = json.loads(SAMPLING)
    expected = library(loaded, STORY, 80, **fields, logits_processor=adjust)
    stop = expected[-20:-9]
    body = {"prompt": STORY, "max_tokens": 80, "stop": ["never", stop], "logprobs": 0, **fields}
    (choice,) = server.post(COMPLETIONS, body | json.loads(ADJUSTMENT))[1]["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.partition(stop)[0], "stop")
    assert all(start < len(choice["text"]) for start in choice["logprobs"]["text_offset"])


CHATS = """[
[{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Who?"},
 {"role": "assistant", "content": "There was a"}],
[{"role": "developer", "content": "Be brief"},
 {"role": "user", "content": [{"type": "text", "text": "Who?"}]}]
]"""


def test_chats(server, loaded):
    """An answer that goes on from its beginning; other words for the same, streamed."""
    begun, messages = json.loads(CHATS)
    options = {"messages": begun, "max_completion_tokens": 20, **GREEDY}
    reply = server.chat(**options, extra_body={"continue_final_message": True})
    ids = llama2.encode_chat(loaded[1], begun, "llama-2", continue_final_message=True)
    assert reply.choices[0].message.content == library(loaded, ids, 20)
    ids = llama2.encode_chat(loaded[1], begun[:2], "llama-2")
    expected = library(loaded, ids, 20).lstrip()
    options |= {"messages": messages, "stream_options": {"include_usage": True}}
    with server.client.chat.completions.stream(**options) as stream:
        reply = stream.until_done().current_completion_snapshot
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert (choice.finish_reason, reply.usage.total_tokens) == ("length", len(ids) + 20)


def test_tokens_and_models(server, loaded):
    ids = loaded[1].encode(STORY)
    body = {"content": STORY, "add_special": True}
    assert server.post("/tokenize", body)[1] == {"tokens": ids, "count": len(ids)}
    assert server.post("/detokenize", {"tokens": ids})[1]["content"] == STORY
    (model,) = server.client.models.list()
    assert server.client.models.retrieve("stories") == model and not model.chat
    other = server.client.models.retrieve("ORG/NAME")  # as chats take any name
    assert other.id == model.id and other._request_id
    with pytest.raises(openai.APIStatusError, match="DELETE is not for .*; expected (GET|HEAD)"):
        server.client.models.delete("stories")


SCORED = """{"max_tokens": 30, "seed": 3, "model": "", "temperature": 1.5, "logprobs": true,
"top_logprobs": 20}"""


def test_scores_of_new_tokens(server, loaded):
    """In a chat; each token is among its likeliest."""
    model, tokenizer = loaded
    options = QUESTION | json.loads(SCORED)
    (choice,) = server.chat(**options).choices
    content = choice.logprobs.content
    for entry in content:
        assert entry.logprob == {e.token: e.logprob for e in entry.top_logprobs}[entry.token]
    prompt = llama2.encode_chat(tokenizer, QUESTION["messages"], "llama-2")
    generation = llama2.generate(model, prompt, llama2.Sampling(1.5, seed=3), 30)
    assert [bytes(entry.bytes) for entry in content] == [*map(tokenizer.token_bytes, generation)]
    expected = llama2.score(model, generation.ids)[len(prompt) - 1 :].tolist()
    assert [entry.logprob for entry in content] == pytest.approx(expected, abs=1e-4)


FORM = json.loads("""{"prompt": "A", "model": "", "temperature": 0, "extra_body": {"response_format": {
"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["€𝄞"]}}}}}""")


def test_answers_that_fit_a_schema(server):
    """Whole characters; the end has a score; cut answers say "length". See test_schema.py, too."""
    pytest.importorskip("llguidance")
    chunks = server.complete(**FORM, stream=True)
    assert [chunk.choices[0].text for chunk in chunks] == ['"', "€", "𝄞", '"', ""]
    (choice,) = server.complete(**FORM, logprobs=1, echo=True).choices
    assert (choice.text, choice.finish_reason) == ('A"€𝄞"', "stop")
    logprobs = choice.logprobs.token_logprobs  # of BOS, A, nine bytes and EOS
    assert len(logprobs) == 12
    assert logprobs[2] < -1  # the model's own: it would not say "
    (cut,) = server.complete(**FORM, max_tokens=2).choices
    assert (cut.text, cut.finish_reason) == ('"\ufffd', "length")  # half a character
    body = {**QUESTION, **FORM["extra_body"], "max_tokens": 99, "logprobs": True}
    for more in (0, 1):  # the token that ends the text is asked for
        _, reply = server.post(CHAT, body | {"include_stop_token": bool(more)})
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == "stop"
        tokens = reply["usage"]["completion_tokens"]
        assert len(choice["logprobs"]["content"]) == tokens + more


# --------------------------------------------------------------------------------------------------
# One model, many clients


DRAWN = json.loads("""{
"any": [
[{"max_tokens": 0}, {"max_tokens": 1}, {"max_tokens": 9}, {"max_tokens": 40}],
[{}, {}, {"n": 3}],
[{"temperature": 0}, {"temperature": 1.2}],
[{}, {"stop": ["he"]}],
[{"seed": 7}, {"seed": 8}, {"cache_prompt": false, "temperature": 0}, {"cache_prompt": false, "temperature": 0}],
[{}, {}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.3}],
[{}, {}, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["Once upon", 5]}}}}],
[{}, {}, {}, {"top_p": 9}, {"logit_bias": {"5": 100, "7": -100}}]
],
"/v1/completions": [[{}, {"logprobs": 2}], [{}, {}, {"echo": true}]],
"/v1/chat/completions": [[{}, {"logprobs": true}]]
}""")


def mixed(draw):
    """A path and a body whose answer is the same whoever else asks; some are refused, or fail."""
    path = draw.choice((COMPLETIONS, CHAT))
    text = " ".join(draw.choices(STORY.split(), k=draw.choice((1, 5, 30, 150))))
    body = {"prompt": draw.choice((text, [text, "A"]))}
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": text}]}
    for options in DRAWN["any"] + DRAWN[path]:
        body |= draw.choice(options)
    return path, body


def answer_of(server, path, body):
    """What does not differ between two answers to the same request."""
    status, reply = server.post(path, body)
    return status, [reply.get(name) for name in ("choices", "usage", "error")]


MIXED, CLIENTS = 40, 8


def threads_of(server):
    return len([*Path(f"/proc/{server.process.pid}/task").glob("*")])


def test_answers_beside_others_are_those_alone(server):
    """Bit for bit, log-probabilities too, while eight ask, and others hang up at random moments. No
    thread is left."""
    pytest.importorskip("llguidance")
    draw = random.Random(5)
    requests = [mixed(draw) for _ in range(MIXED)]
    expected = [answer_of(server, *request) for request in requests]
    assert len({status for status, _ in expected}) == 2

    def ask(i):
        with server.send(stream=i % 2 == 0, prompt=f"{i} {STORY}" * (1 + i % 3)):
            time.sleep(draw.random() / 10)
        return answer_of(server, *requests[i])

    with ThreadPoolExecutor(CLIENTS) as pool:
        for _ in range(2):
            threads = threads_of(server)  # at last: after the first round
            order = draw.sample(range(MIXED), MIXED)
            actual = dict(zip(order, pool.map(ask, order)))
            for i, request in enumerate(requests):
                assert actual[i] == expected[i], request
    assert threads_of(server) <= threads + 2  # so many prepare, and end when they had nothing to do


def test_a_conversation_goes_on_beside_others(server):
    """From what is remembered of it, as it does alone."""
    answers = []
    for others in (0, 3):
        for i in range(4):
            server.cached(prompt=f"{i} another matter altogether")
        server.cached(prompt=STORY)
        held = [server.send(prompt=f"{i} years ago", stream=True) for i in range(others)]
        for connection in held:
            assert b"data" in connection.recv(9999) + connection.recv(9999)
        body = {
            "prompt": f"{STORY}, and a son. They",
            "max_tokens": 40,
            "temperature": 0,
            "logprobs": 3,
        }
        answers.append(answer_of(server, COMPLETIONS, body))
        for connection in held:
            connection.close()
    alone, beside = answers
    assert beside == alone and alone[1][1]["prompt_tokens_details"]["cached_tokens"] > 9


def test_memory_counts_all_conversations(monkeypatch):
    options = {"model": llama2.DEFAULT_MODEL, "device": "cpu", "dtype": "float32", "quiet": True}
    options |= {"context": 512, "chat_template": None, "parse_special": False, "prompt_cache": True}
    cache = llama2.load(llama2.DEFAULT_MODEL)[0].new_cache(512)
    size = 2 * cache.k.nbytes
    needed = []
    for parallel in (1, 41):
        monkeypatch.setattr(llama2, "free_memory", lambda device: 0)
        with pytest.raises(ValueError, match=r"needs ([\d.]+) GB") as caught:
            Session(argparse.Namespace(**options, parallel=parallel))
        needed.append(1e9 * float(re.search(r"needs (\S+) GB", str(caught.value))[1]))
    assert needed[1] - needed[0] == pytest.approx(40 * 1.05 * size, rel=0.05)
    for free, parallel in ((3.5 * size, 3), (0, 1), (math.inf, 4)):
        monkeypatch.setattr(llama2, "free_memory", MagicMock(side_effect=[math.inf, free]))
        session = Session(argparse.Namespace(**options, parallel=None))
        session.is_closed = lambda: True
        session.wake.set()
        session.thread.join()
        assert session.parallel == len(session.rows) == parallel
        assert session.cache_bytes == parallel * size


def test_chats_with_one_system_prompt_share_it(server):
    """Three chats, four caches: each goes on from its own turns, and begins with the others' prompt."""
    system = {"role": "system", "content": "You tell tales of kings and of their daughters. " * 6}
    chats = [[system, {"role": "user", "content": f"{i} {STORY}"}] for i in range(3)]
    for i in range(4):  # nothing of it is held
        server.cached(prompt=f"{i} another matter altogether")
    first = [server.cached(messages=chat) for chat in chats]
    assert first[0] < 5 and min(first[1:]) > 60
    for chat in chats * 2:
        _, before = server.post(CHAT, {"messages": chat, "max_tokens": 5, **GREEDY})
        chat += [before["choices"][0]["message"], {"role": "user", "content": "And?"}]
        assert server.cached(messages=chat) >= before["usage"]["prompt_tokens"] - 3


def test_seeds_take_nothing_from_others(server):
    """Rounding may depend on what is read at a time, so with a seed a prompt is read anew."""
    server.cached(prompt=STORY)
    assert server.cached(prompt=STORY) > 5
    for options in ({"cache_prompt": False}, {"seed": 1}, {"echo": True, "logprobs": 1}):
        assert server.cached(prompt=STORY, **options) == 0


def test_a_full_queue_and_who_hangs_up(server):
    """One request runs, 64 wait; others are refused at once. Who hangs up is not served on."""
    start = time.perf_counter()
    server.post(COMPLETIONS, LONG)
    one = time.perf_counter() - start
    held = [server.send(stream=i < 20) for i in range(70)]
    refused, *_ = select.select(held[20:], [], [], 100)  # of the others the heads have come
    head = refused[0].recv(4096).lower()
    assert head.startswith(b"http/1.1 503 ") and b"retry-after: 2" in head
    for connection in held:
        connection.close()
    start = time.perf_counter()
    server.cached(prompt="A")
    assert time.perf_counter() - start < 7 * one  # all answers would take ten times as long


def test_slow_clients_hold_up_nobody(server):
    """Neither one that reads nothing, nor one that has sent half a body."""
    slow = server.send(max_tokens=50, stream=True)
    half = b'POST /tokenize HTTP/1.1\r\nHost: [::1]:80\r\nContent-Length: 99\r\n\r\n{"con'
    with server.connect(half):
        assert server.cached(prompt="A") < 2
        assert b"[DONE]" in receive(slow)


def large_schema(number):
    """144 kB, of which no two are the same."""
    names = [f"property_{number}_{i}" for i in range(400)]
    properties = {n: {"type": "string", "pattern": f"^[a-z]{{1,9}}-{18 * n}$"} for n in names}
    return {"type": "object", "properties": properties}


def memory_and_files(server):
    """MB, and how many files are open."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    [kilobytes] = re.findall(r"VmRSS:\s+(\d+)", status)
    return int(kilobytes) / 1000, len(os.listdir(f"/proc/{server.process.pid}/fd"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_abandoned_schemas_hold_up_nobody():
    """Of 40, at most two are compiled when their clients have gone; each once; few are kept."""
    pytest.importorskip("llguidance")
    server = Running("--quiet", "--chat-template", "chatml")
    question = {"messages": [{"role": "user", "content": "A"}], "max_tokens": 2}

    def ask(number):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": large_schema(number)}}
        return json.dumps(question | {"response_format": form})

    assert server.post(CHAT, ask(40).encode())[0] == 200  # the first one opens a vocabulary
    start = time.perf_counter()
    assert server.post(CHAT, ask(41).encode())[0] == 200
    one = time.perf_counter() - start  # 0.4 s, if the machine does nothing else
    before, files = memory_and_files(server)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
    bodies = [ask(i) for i in range(40)]
    held = [server.connect(f"{head}{len(body)}\r\n\r\n{body}".encode()) for body in bodies]
    time.sleep(0.2)
    for connection in held:
        connection.close()
    start = time.perf_counter()
    assert server.post(CHAT, question)[0] == 200
    assert time.perf_counter() - start < max(1, 4 * one)  # not the time of 40
    for i in range(12):  # those that are answered are not kept either
        assert server.post(CHAT, ask(i % 3).encode())[0] == 200
    after, now = memory_and_files(server)
    assert after < before + 100
    assert now <= files + 2
    assert server.stop() == ""


def test_too_many_requests_to_prepare_are_refused(monkeypatch):
    """By their number, and by their bytes."""
    request = AsyncMock(headers={})
    request.body.return_value = b"{}" * 50
    for preparing in ([1] * program.MAX_PREPARING, [program.PREPARING_BYTES - 99]):
        monkeypatch.setattr(program, "PREPARING", preparing)
        with pytest.raises(program.Refusal, match="too many requests") as caught:
            asyncio.run(program.post(None, request))
        assert caught.value.status_code == 503


HASTY = f"""
import sys
sys.path.insert(0, {str(SERVER.parent)!r})
from server import __main__, guard
guard.REQUEST_SECONDS = 3
sys.exit(__main__.main())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_connections_are_limited_and_half_requests_end():
    """In a burst, too. Whoever waits for an answer is not the one that is closed."""
    server = Running("--quiet", program=("-c", HASTY))
    head = b"HTTP/1.1\r\nHost: localhost\r\n"
    get, post = b"GET /health " + head, b"POST /v1/completions " + head
    begun = post + b"Content-Length: 100\r\n\r\n{"
    served = server.send(max_tokens=100, stream=True)
    held = [server.connect(begun) for _ in range(190)]
    for i in range(100):
        held.append(socket.socket())
        held[-1].setblocking(False)
        held[-1].connect_ex((server.host, server.port))
    most = 0
    for _ in range(50):
        most = max(most, memory_and_files(server)[1])
        time.sleep(0.02)
    assert most < 260  # of 307: 200 connections, some that are being closed, files of its own
    assert server.cached(prompt="A") >= 0
    assert b"[DONE]" in receive(served)
    for connection in held:
        connection.close()
    halves = {
        "nothing": server.connect(),
        "half a head": server.connect(get),
        "half a body": server.connect(begun),
        "half a second head": server.connect(get + b"\r\n"),
        "half a second body": server.connect(get + b"\r\n"),
    }
    time.sleep(0.5)
    halves["half a second head"].sendall(get)
    halves["half a second body"].sendall(begun)
    end = time.monotonic() + 6
    for name, connection in halves.items():
        connection.settimeout(max(0.1, end - time.monotonic()))
        try:
            receive(connection)  # until it is closed
        except TimeoutError:
            pytest.fail(name)
        except ConnectionError:
            pass
    assert server.stop() == ""


# --------------------------------------------------------------------------------------------------
# What it refuses

TEXTS = ("be kind \\ud83d", "\\udc00\\ud800", "\\u0000", "\\ud83d\\ude00", "\u2028\ufeff")
PLACES = """
/v1/completions | {"prompt": "TEXT", "max_tokens": 2}
/v1/completions | {"prompt": "a", "stop": "TEXT", "max_tokens": 2}
/v1/completions | {"prompt": "a", "user": "TEXT", "metadata": {"TEXT": "TEXT"}, "max_tokens": 2}
/v1/completions | {"prompt": "a", "TEXT": "TEXT", "max_tokens": 2}
/v1/completions | {"prompt": "a", "max_tokens": 2, "metadata": {"a": 1e999}}
/v1/completions | {"prompt": "a", "max_tokens": 2, "logit_bias": {"TEXT": 1}}
/v1/chat/completions | {"messages": [{"role": "user", "content": "TEXT"}], "max_tokens": 2}
/v1/chat/completions | {"messages": [{"role": "TEXT", "content": "a"}], "max_tokens": 2}
/v1/chat/completions | {"messages": [{"role": "user", "content": "a", "name": "TEXT"}], "max_tokens": 2}
/v1/responses | {"input": "TEXT", "instructions": "TEXT", "max_output_tokens": 2}
/v1/responses | {"input": "a", "metadata": {"TEXT": "TEXT"}, "max_output_tokens": 2}
/v1/responses | {"input": "a", "metadata": {"a": 1e999}, "max_output_tokens": 2, "stream": true}
/v1/responses | {"input": "a", "metadata": {"a": NaN}, "max_output_tokens": 2}
/v1/responses | {"input": "a", "previous_response_id": "TEXT"}
/v1/responses | {"input": [{"type": "item_reference", "id": "TEXT"}]}
/v1/responses | {"input": [{"type": "TEXT", "role": "user", "content": "TEXT"}], "max_output_tokens": 2}
/tokenize | {"content": "TEXT"}
/detokenize | {"tokens": ["TEXT"]}
"""


@cases("path, body", PLACES)
def test_no_text_makes_the_server_fail(server, path, body):
    """Half a character, as a client cuts it out of a text, least of all."""
    for text in TEXTS:
        sent = body.replace("TEXT", text).encode()
        reply = server.http.post(path, content=sent)
        assert reply.status_code in (200, 400, 404), reply.text
        reply.content.decode("utf-8")
        assert "server failed" not in reply.text


BODIES = json.loads("""{
"/v1/completions": {"prompt": "A", "max_tokens": 1},
"/v1/chat/completions": {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1},
"/v1/responses": {"input": "A", "max_output_tokens": 16},
"/tokenize": {"content": "A"},
"/detokenize": {"tokens": [5]}
}""")
PROMPT, QUESTION, *_ = BODIES.values()
WRONG = """{
"completions": {
"max_tokens": [-1, 1.5, "5", true, [], 2147483648],
"max_completion_tokens": [-1, "5", false],
"temperature": [-0.1, 2.1, "0", true],
"top_p": [-0.1, 1.1, "1", false],
"seed": [1.5, "1", false, 9223372036854775808],
"n": [0, 5, "1", true, 1.0],
"best_of": [2],
"stop": [[1], 1, {}, ["a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a"]],
"stream": ["true", 1, []],
"stream_options": [1, "a", []],
"model": [1, [], false],
"logit_bias": [[], {"x": 1}, {"5": "1"}, {"999999": 1}, {"-1": 1}, {"1": null}, {"1": 101}],
"top_k": [-2, 1.5],
"min_p": [2],
"repetition_penalty": [0],
"presence_penalty": [101],
"frequency_penalty": ["1"],
"cache_prompt": [1],
"response_format": [
"text", {"type": "xml"}, {"type": "json_object", "odd": 1},
{"type": "json_schema", "json_schema": {"schema": {"not": {"type": "string"}}}}
],
"tools": [[{"type": "function"}], [{"function": {"name": "\\ud800"}}], [{"function": {"name": "a b"}}]],
"tool_choice": ["required", " "],
"continue_final_message": [1],
"suffix": ["B"],
"max_token": [5],
"modalities": [["audio"]],
"grammar": ["root ::= x"]
},
"/v1/completions": {
"logprobs": [21],
"prompt": [
null, 1, true, {}, [], [[]], [[], "a"], [1.5], [true], [-1], [1000000],
[[1], [1000000]], ["a", 1], [null], [["a"]]
]},
"/v1/chat/completions": {
"echo": [true],
"top_logprobs": [5],
"messages": [
null, [], "A", ["A"], [{"role": "user"}], [{"content": "A"}],
[{"role": "user", "content": {"a": 1}}], [{"role": "user", "content": [{"type": "image_url", "text": "A"}]}],
[{"role": "assistant", "content": "A"}], [{"role": [], "content": "A"}],
[{"role": "\\ud800", "content": "A"}],
[{"role": "user", "content": "A", "tool_calls": [{"id": "1"}]}], [{"role": "user", "name": "A"}],
[{"role": "user", "content": "A", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
[{"role": "user", "content": "A", "audio": "A"}], [{"role": "system", "content": "A"}],
[{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]
]},
"/v1/responses": {
"previous_response_id": [5], "conversation": ["x"], "background": [true], "include": [["x"]],
"max_tokens": [5], "n": [2], "tool_choice": [{"type": "web_search"}], "messages": [[]],
"input": [[{"type": "item_reference"}]], "max_output_tokens": [-1],
"response_format": [{"type": "json_object"}]
},
"/tokenize": {"content": [null, 5, ["a"]], "with_pieces": [true]},
"/detokenize": {"tokens": [null, "abc", [1.5], [[1]], [1000000]]}
}"""
NEUTRAL = """{
"user": "u", "metadata": {"a": "b"}, "store": false, "n": 1, "tools": [], "tool_choice": "none",
"parallel_tool_calls": false, "top_k": -1, "skip_special_tokens": true, "response_format": {"type": "text"}, "suffix": null, "logit_bias": {}, "echo": false, "stop": ["", "§"],
"best_of": 1, "modalities": ["text"], "cache_prompt": true, "unknown": null, "stream_options": {"include_usage": false}, "top_logprobs": 0
}"""
BAD_BODIES = (
    (b"[]", None),
    (b"{} {}", None),
    (b'{"prompt": "A", "temperature": NaN}', None),
    (b'{"prompt": "A", "temperature": 1e400}', None),
    (b"[" * 200_000, None),
    (b'{"prompt": "A", "seed\\ud800": 9}', "seed?"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": [5] * 512}, "prompt"),
)


@pytest.mark.parametrize("path", BODIES)
def test_wrong_fields(server, path):
    wrong = json.loads(WRONG)
    fields = wrong[path] | (wrong["completions"] if path in (COMPLETIONS, CHAT) else {})
    for name, values in fields.items():
        for value in values:
            status, reply = server.post(path, BODIES[path] | {name: value})
            assert (status, reply["error"]["param"]) == (400, name), value
            assert name in reply["error"]["message"]


def test_bad_bodies_and_long_prompts(server):
    for body, param in BAD_BODIES:
        status, reply = server.post(COMPLETIONS, body)
        error = reply["error"]
        assert (status, error["param"]) == (400, param)
        assert {*error} == {"message", "type", "param", "code"}
    assert error["code"] == "context_length_exceeded"
    assert "This model's maximum context length is 512 tokens" in error["message"]


def test_what_is_odd_but_right(server):
    """Fields that change nothing here, as clients send them; a full context. See test_fuzz.py, too."""
    for path in (COMPLETIONS, CHAT):
        assert server.post(path, BODIES[path] | json.loads(NEUTRAL))[0] == 200
    _, reply = server.post(COMPLETIONS, {"prompt": [5] * 511, "max_tokens": 9})
    assert reply["usage"]["completion_tokens"] == 1


def test_large_bodies_are_refused_before_they_are_read(server):
    head = b"POST /tokenize HTTP/1.1\r\nHost: [::1]:80\r\nContent-Length: 1000001\r\n\r\n"
    chunk = b"%x\r\n%s\r\n" % (600_000, b"a" * 600_000)
    chunked = head.replace(b"Content-Length: 1000001", b"Transfer-Encoding: chunked") + chunk * 2
    for data, said in ((head, "more than 1,000,000 bytes"), (chunked, "Content Too Large")):
        with server.connect(data) as connection:
            reply = connection.recv(4096)
            while b"}}" not in reply:
                reply += connection.recv(4096)
        assert reply.startswith(b"HTTP/1.1 413 ")
        assert said in json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert server.post("/tokenize", b'{"content": "%s"}' % (b"a" * 999_985))[0] == 200


HOSTS = {
    200: "localhost:8080 [::1]:1 10.0.0.7 host.docker.internal:8080 box.local",
    403: "evil.com localhost.evil.com 127.0.0.1.evil.com ",  # the last one has no name
}
CONTENT_TYPES = {
    "text/plain": 415,
    "multipart/form-data; boundary=x": 415,
    "application/x-www-form-urlencoded": 200,  # curl's
}


def test_other_sites_are_refused(server):
    """By the name they rebind, by the page's origin, by what forms can send."""
    for status, hosts in HOSTS.items():
        for host in hosts.split(" "):
            assert server.get("/health", Host=host, Origin=f"http://{host}") == status
    for origin in ("http://evil.com", "null", "http://localhost:9"):
        assert server.get("/v1/models", Host="localhost", Origin=origin) == 403
    for content_type, status in CONTENT_TYPES.items():
        assert server.post(COMPLETIONS, PROMPT, **{"Content-Type": content_type})[0] == status


TEMPLATE = """{% if messages[0].role == 'critic' %}{{ raise_exception(messages[0].content) }}{% endif %}
{{ messages[0].content }}"""
SECRETS = """[{"api_key": "sk-1234"}, {"messages": "a private matter"},
{"messages": [{"role": "user", "content": ["a private matter"]}]},
{"messages": [{"role": "critic", "content": "a private matter"}]},
{"tools": [{"type": "function", "function": {"name": "of my own"}}]}, {"stop": ["of my own", 5]},
{"temperature": "of my own"}, {"temperatur": "of my own"}, {"response_format": {"type": "of my own"}}]"""


def test_cors_log_and_private_prompts(tmp_path):
    """One site is let in, each request is a line that says why, and no prompt is held for another."""
    site = "https://chat.example"
    path = tmp_path / "template"
    path.write_text(TEMPLATE)
    server = Running("--cors", site, "--no-prompt-cache", "--chat-template", path, "--host", "::1")
    # An error tells nothing of what hides control tokens, and no role makes one.
    for role, said in (
        ("critic", "TemplateError: </s>"),
        ("/s", "the role or name '/s'; expected"),
    ):
        status, reply = server.post(CHAT, {"messages": [{"role": role, "content": "</s>"}]})
        message = reply["error"]["message"]
        assert status == 400 and said in message and "\u00a7" not in message
    headers = {
        "Origin": site,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    reply = server.http.options(CHAT, headers=headers)
    assert reply.headers["access-control-allow-origin"] == site
    assert server.get("/health", Origin=site) == 200
    server.get("/v1/models", Origin="https://evil.com")
    server.post(COMPLETIONS, {**PROMPT, "tools": [1]})
    for is_token in (True, False):  # the prompt is BOS, "a" and the token or its text
        _, reply = server.post(
            COMPLETIONS, {"prompt": "a</s>", "parse_special": is_token, "max_tokens": 1}
        )
        assert (reply["usage"]["prompt_tokens"] == 3) is is_token
    server.get("/v1/%1b[31m")
    with server.send(stream=True) as stream:
        stream.recv(4096)
    assert server.url.startswith("http://[::1]:")
    # These wait for their turn, until the abandoned stream has ended.
    assert [server.cached(prompt=STORY, cache_prompt=True) for _ in range(2)] == [0, 0]
    for body in json.loads(SECRETS):
        assert server.post(CHAT, {"messages": [], **body}, Authorization="Bearer sk-1234")
    log = server.stop()  # a line is written when all is done: in any order
    assert not re.search("sk-1234|a private matter|of my own", log)
    for line in (
        r"/v1/completions 200 read 13 \+ 0 cached, made 5, [\d.]+ tokens/s",
        r'/v1/completions 200 read 6 .*; </s> in the prompt stays text without "parse_special": true',
        "/v1/completions 200 aborted: the client hung up",
        "/v1/completions 400 tools",
        "/v1/models 403 the origin 'https://evil.com' is refused.*",
        r"/v1/\\x1b\[31m 404 .*; there are /, .*/v1/responses, .*/detokenize",
    ):
        assert re.search(rf"(?m)^\d\d:\d\d:\d\d {line}$", log)


def test_page(server):
    """It may ask this server, and no other. That its script and style may run, test_page.py says."""
    headers = server.http.get("/").headers
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff"
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ") and "connect-src 'self'" in policy


def test_api_key_and_sigterm():
    """Who has no key is refused. Streams end before the server does; it closes idle connections."""
    server = Running("--api-key", KEY, "--quiet")
    idle = [server.connect() for _ in range(220)]  # more than it keeps open
    assert server.client.models.list().data
    assert idle[0].recv(1) == b""  # at once: connect() waits for less than IDLE_SECONDS
    for given in ("Bearer x", KEY, ""):
        status, reply = server.post("/v1/nothing", {}, Authorization=given)
        assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
    assert server.get("/health") == server.get("/") == 200
    stream = server.send(stream=True)
    while b"data: " not in stream.recv(65536):
        pass
    waiting = server.send()
    time.sleep(0.3)
    assert server.stop() == ""
    assert receive(stream).rstrip(b"\r\n0").endswith(b"data: [DONE]")
    assert receive(waiting).startswith(b"HTTP/1.1 503 ")


def test_what_cannot_be_is_one_line(server, tmp_path, monkeypatch):
    (tmp_path / "uvicorn.py").write_text("raise ImportError(name='uvicorn')")
    missing = 'uvicorn is missing: pip install "starlette>=1.6"'
    for path, said in (("", "in use"), (str(tmp_path), missing)):
        monkeypatch.setenv("PYTHONPATH", path)
        assert said in one_line(ran(sys.executable, SERVER, "--port", server.port))
