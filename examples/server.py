"""An HTTP server with OpenAI's interface: an example of llama2.py as a library.

    pip install "starlette>=1.6" "anyio>=4.1" uvicorn
    python examples/server.py --model llama-2-7b-chat.Q4_0.gguf   # without: the small bundled one
    curl http://127.0.0.1:8080/v1/completions -d '{"prompt": "Once upon a time"}'

The event loop talks to clients. A second thread runs the model (serving.py), one request at a time
in the order they came, each until its client hangs up. Of a chat that goes on, only what is new is
computed: the last caches are kept. What is not supported is refused; guard.py refuses other sites.
"""

import argparse
import asyncio
import itertools
import json
import os
import secrets
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
try:
    import anyio.from_thread
    import torch
    import uvicorn
    from guard import Connection, guard
    from serving import Score, Session
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    import llama2
except ImportError as error:
    needed = 'pip install "starlette>=1.6" "anyio>=4.1" uvicorn'
    print(f"server.py: {error.name} is missing: {needed}", file=sys.stderr)
    sys.exit(2)

MAX_BODY, MAX_PROMPTS, MAX_WAITING = 10**6, 128, 64  # bytes, prompts in a request, queued requests
TURN = anyio.Lock()  # with the model: first come, first served
LIMITS = {
    "temperature": (0, 2),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, 20),
    "top_logprobs": (0, 20),
    "max_tokens": (0, 2**31 - 1),
    "max_completion_tokens": (0, 2**31 - 1),
}
# Fields that change nothing here, and those that would with any but these values.
IGNORED = "user metadata store service_tier safety_identifier prompt_cache_key parallel_tool_calls"
NEUTRAL = {
    "n": ["1"],
    "best_of": ["1"],
    "suffix": ['""'],
    "tools": ["[]"],
    "functions": ["[]"],
    "tool_choice": ['"none"', '"auto"'],
    "function_call": ['"none"', '"auto"'],
    "modalities": ['["text"]'],
    "echo": ["false"],
    "top_logprobs": ["0"],
}


class Refusal(HTTPException):
    """An error for the client; `about` may hold OpenAI's `param` (the wrong field) and `code`."""

    def __init__(self, status: int, message: str, **about: str) -> None:
        super().__init__(status, message, {"Retry-After": "2"} if status == 503 else None)
        self.about = about


def refuse(request: Any, error: Any) -> Response:
    """OpenAI's form of an error. The log has its text, too."""
    if not isinstance(error, HTTPException):  # its text may quote a prompt or a path
        error = Refusal(500, f"the server failed: {type(error).__name__}")
    message = utf8(error.detail)
    if request is not None:
        request.scope["log"] = [message]
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    body = {"message": message, "type": kind, "param": None, "code": None}
    body |= getattr(error, "about", {})
    return JSONResponse({"error": body}, error.status_code, error.headers)


def utf8(text: str) -> str:
    """The text with question marks for what UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


# --------------------------------------------------------------------------------------------------
# What is asked


@dataclass
class Request:
    """A completion that a client asks for."""

    chat: bool
    prompts: list[list[int]]
    stream: bool
    include_usage: bool
    echo: bool
    options: dict[str, Any]  # of Session.start()


def take(body: dict, name: str, kind: type, default: Any = None) -> Any:
    """Remove a field and return its value, or its default if it is absent or null."""
    value = body.pop(name, None)
    if value is None:
        return default
    fits = type(value) is kind or (kind is float and type(value) is int)  # but true is not 1
    needed = kind.__name__
    if name in LIMITS and kind in (int, float):
        low, high = LIMITS[name]
        fits = fits and low <= value <= high
        needed += f" from {low} to {high}"
    if not fits:
        raise Refusal(400, f"{name} is {json.dumps(value)[:40]}; expected {needed}", param=name)
    return value


def take_sampling(body: dict, vocab_size: int) -> llama2.Sampling:
    """The fields of Sampling. A seed may be negative."""
    sampling = llama2.Sampling()
    for item in fields(sampling):
        if item.name in ("logit_bias", "logits_processor"):
            continue
        kind = int if item.default is None else type(item.default)
        value = take(body, item.name, kind, item.default)
        if item.name == "seed" and value is not None:
            value %= 2**63
        try:
            sampling = replace(sampling, **{item.name: value})
        except ValueError as error:
            raise Refusal(400, str(error), param=item.name) from error
    bias = take(body, "logit_bias", dict, {})
    try:
        sampling = replace(sampling, logit_bias={int(key): value for key, value in bias.items()})
        llama2.sample(torch.zeros(vocab_size), replace(sampling, temperature=0), [0])
    except ValueError as error:
        raise Refusal(400, f"logit_bias: {error}", param="logit_bias") from error
    return sampling


def take_stops(body: dict) -> list[str]:
    """The texts that end an answer."""
    stop = body.pop("stop", None)
    stops = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if len(stops) > 16 or not all(isinstance(text, str) and 0 < len(text) <= 256 for text in stops):
        found = json.dumps(stop)[:40]
        problem = f"stop is {found}; expected up to 16 texts of 1 to 256 characters"
        raise Refusal(400, problem, param="stop")
    return stops


def take_schema(body: dict, session: Session) -> dict | None:
    """The JSON schema of `response_format`; None if the answer may be any text."""
    asked = take(body, "response_format", dict, {"type": "text"})
    schema = {"type": "object"} if asked == {"type": "json_object"} else None
    try:
        if asked.get("type") == "json_schema":
            inner = asked["json_schema"]
            known = {"name", "description", "schema", "strict"}  # answers are strict in any case
            if not inner.keys() <= known or not isinstance(inner["schema"], dict):
                raise ValueError("json_schema must have a name and a schema")
            schema = inner["schema"]
        elif schema is None and asked != {"type": "text"}:
            raise ValueError("its type must be text, json_object or json_schema")
        if schema is not None:
            session.grammar(schema)
    except (ValueError, KeyError, AttributeError) as error:
        raise Refusal(400, f"response_format: {error}", param="response_format") from error
    return schema


def check_messages(messages: Any) -> None:
    """Refuse what a message must not have; a developer becomes the system. ValueError."""
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        raise ValueError("expected a list of messages with role and content")
    for message in messages:
        for key, value in message.items():
            if value and key not in ("role", "content"):
                raise ValueError(f"{key[:40]} in a message is not supported")
        content = message.get("content")
        if not isinstance(content, (str, list)):
            raise ValueError("a message has no text")
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and part.get("type", "text") != "text":
                raise ValueError(f"a message has a part of type {part['type']!r:.40}, not text")
        if message.get("role") == "developer":
            message["role"] = "system"


def read_request(session: Session, body: dict, field: str, reuse: bool) -> Request:
    """Take all that a completion knows out of a body; what is left in it is not supported.

    Raises Refusal, or ValueError about the prompt, which is in `field`.
    """
    chat = field == "messages"
    prompt = body.pop(field, None)
    take(body, "model", str)
    stream = take(body, "stream", bool, False)
    stream_options = take(body, "stream_options", dict, {})
    include_usage = take(stream_options, "include_usage", bool, False) or not stream
    top = take(body, "logprobs", bool if chat else int)
    if chat:
        top = take(body, "top_logprobs", int, 0) if top else None
    most = take(body, "max_tokens", int, session.context if chat else 16)
    most = take(body, "max_completion_tokens", int, most)
    echo = not chat and take(body, "echo", bool, False)
    options = {
        "stop": take_stops(body),
        "chat_format": session.chat_format if chat else None,
        "max_new_tokens": most,
        # A seed promises the same text, and rounding may differ with what is read at a time.
        "reuse": reuse and take(body, "cache_prompt", bool, body.get("seed") is None),
        "sampling": take_sampling(body, session.tokenizer.vocab_size),
        "schema": take_schema(body, session),
        "score_prompt": echo,
        "top": top,
    }
    body |= stream_options
    if chat:
        check_messages(prompt)
        prompts = session.encode_chat(prompt)
    else:
        prompts = session.encode(prompt)
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"there are {len(prompts)}; expected at most {MAX_PROMPTS}")
    longest = max(map(len, prompts), default=0)
    if longest == 0:
        raise ValueError("there is none; expected one at least")
    if longest + min(most, 1) > session.context:
        problem = f"{field}: {longest} tokens; the context holds {session.context} in all"
        raise Refusal(400, problem, param=field, code="context_length_exceeded")
    return Request(chat, prompts, stream, include_usage, echo, options)


def refuse_rest(body: dict) -> None:
    """Refuse the fields that nothing has taken, unless they change nothing."""
    for key, value in body.items():
        text = json.dumps(value)
        if key not in IGNORED.split() and text not in NEUTRAL.get(key, []):
            problem = f"{key[:40]} is {text[:40]}, which is not supported"
            raise Refusal(400, problem, param=utf8(key[:40]))


# --------------------------------------------------------------------------------------------------
# What is answered


class Job:
    """The response to a request, as an application of ASGI."""

    def __init__(self, session: Session, request: Request, model_name: str) -> None:
        self.session = session
        self.request = request
        kind = "text_completion"
        if request.chat:
            kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self.about = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model_name,
        }
        self.replies: asyncio.Queue = asyncio.Queue()  # and None at their end
        self.log: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer until the client hangs up."""
        scope["log"] = self.log
        if TURN.statistics().tasks_waiting >= MAX_WAITING:
            raise Refusal(503, f"{MAX_WAITING} requests are waiting; try later")

        async def watch() -> None:  # a client that got the whole answer has disconnected, too
            while (await receive())["type"] != "http.disconnect":
                pass
            if not self.log:  # complete() has not ended
                self.log.append("aborted: the client hung up")
            group.cancel_scope.cancel()

        async def respond() -> None:
            stream = StreamingResponse(self.events(), media_type="text/event-stream")
            response = stream if self.request.stream else await self.replies.get()
            await response(scope, receive, send)

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            group.start_soon(respond)
            async with TURN:
                try:
                    await anyio.to_thread.run_sync(self.complete)
                except Exception as error:  # noqa: BLE001 (memory that ran out, weights with NaN)
                    response = refuse(None, error)
                    self.log.append(json.loads(response.body)["error"]["message"])
                    self.replies.put_nowait(response)
            self.replies.put_nowait(None)

    async def events(self) -> Any:
        """The replies as server-sent events."""
        while reply := await self.replies.get():
            yield b"data: " + reply.body + b"\n\n"
        yield b"data: [DONE]\n\n"

    def reply(self, *choices: dict, **usage: dict) -> None:
        """Send an event, or the whole answer, from the model's thread."""
        reply = JSONResponse({**self.about, "choices": choices, **usage})
        anyio.from_thread.run_sync(self.replies.put_nowait, reply)

    def complete(self) -> None:
        """Continue the prompts, in the model's thread."""
        start = time.perf_counter()
        pairs = [self.complete_one(*pair) for pair in enumerate(self.request.prompts)]
        seconds = time.perf_counter() - start
        old = sum(map(len, self.request.prompts))
        new = sum(len(report.rows[0].new_ids) for _, report in pairs)
        read = sum(report.prompt_tokens for _, report in pairs)
        rate = new / seconds
        self.log.append(f"read {read} + {old - read} cached, made {new}, {rate:.1f} tokens/s")
        usage = {
            "prompt_tokens": old,
            "completion_tokens": new,
            "total_tokens": old + new,
            "prompt_tokens_details": {"cached_tokens": old - read},
        }
        choices = [] if self.request.stream else [choice for choice, _ in pairs]
        if self.request.include_usage:
            self.reply(*choices, usage=usage)

    def complete_one(self, index: int, ids: list[int]) -> tuple[dict, Any]:
        """Continue a prompt; returns its choice and the generation's report."""
        request = self.request
        choice: dict = {"index": index, "logprobs": None, "finish_reason": None}
        if request.chat and request.stream:
            self.reply(choice | {"delta": {"role": "assistant", "content": ""}})
        stream, scorer = self.session.start(ids, **request.options)
        before = [self.session.tokenizer.decode(ids)] if request.echo else []
        texts = []
        for text in itertools.chain(before, stream):
            texts.append(text)
            if request.stream:
                self.reply(choice | self.content(text))
        row = stream.report.rows[0]
        choice["finish_reason"] = "stop" if row.stop_reason.startswith("stop") else "length"
        if scorer:
            choice["logprobs"] = self.table(scorer.finish(row, "".join(texts[len(before) :])))
        choice |= self.content("" if request.stream else "".join(texts))
        if request.stream:
            self.reply(choice)
        return choice, stream.report

    def content(self, text: str) -> dict:
        """A text as a part of a choice."""
        if not self.request.chat:
            return {"text": text}
        if self.request.stream:
            return {"delta": {"content": text}}
        return {"message": {"role": "assistant", "content": text}}

    def entries(self, score: Score) -> list[dict]:
        """A token and the likeliest in its place, the token first. Names differ from each other."""
        tokenizer = self.session.tokenizer
        rows: dict[str, dict] = {}
        for token_id, logprob in {score.token_id: score.logprob, **(score.top or {})}.items():
            data = tokenizer.token_bytes(token_id)  # maybe a part of a character
            name = score.text
            if rows:
                name = data.decode(errors="backslashreplace")
                name = tokenizer.pieces[token_id] if name in ("", *rows) else name
            rows[name] = {"token": name, "logprob": logprob, "bytes": [*data]}
        return [*rows.values()]

    def table(self, scores: list[Score]) -> dict:
        """OpenAI's form of log-probabilities."""
        rows = [self.entries(score) for score in scores]
        if self.request.chat:
            return {"content": [{**row[0], "top_logprobs": row} for row in rows], "refusal": None}
        tops: list[dict | None] = [{e["token"]: e["logprob"] for e in row} for row in rows]
        if scores and scores[0].top is None:  # nothing comes before it
            tops[0] = None
        lengths = (len(score.text) for score in scores)
        return {
            "tokens": [score.text for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": tops,
            "text_offset": [*itertools.accumulate(lengths, initial=0)][:-1],
        }


# --------------------------------------------------------------------------------------------------
# The application


def make_app(session: Session, name: str, args: argparse.Namespace) -> Any:
    """The ASGI application."""

    def complete(body: dict, field: str) -> Any:
        return Job(session, read_request(session, body, field, args.prompt_cache), name)

    def tokenize(body: dict, field: str) -> Response:
        text = body.pop(field, None)
        special = take(body, "add_special", bool, False)
        ids = session.tokenizer.encode(text, special and session.tokenizer.add_bos)
        return JSONResponse({"tokens": ids, "count": len(ids)})

    def detokenize(body: dict, field: str) -> Response:
        return JSONResponse({"content": session.tokenizer.decode(body.pop(field, None))})

    async def post(handle: Any, field: str, request: Any) -> Any:
        body: Any = None
        with suppress(ValueError, RecursionError, AttributeError):
            body = {k: v for k, v in (await request.json()).items() if v is not None}
        if body is None:
            raise Refusal(400, "the body must be a JSON object")
        try:
            reply = await anyio.to_thread.run_sync(handle, body, field)
            refuse_rest(body)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"{field}: {error}", param=field) from error
        return reply

    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "llama2.py"}
    routes = [
        Route("/health", JSONResponse({"status": "ok"}), methods=["GET"]),
        Route("/v1/models", JSONResponse({"object": "list", "data": [model]}), methods=["GET"]),
        Route("/v1/chat/completions", partial(post, complete, "messages"), methods=["POST"]),
        Route("/v1/completions", partial(post, complete, "prompt"), methods=["POST"]),
        Route("/tokenize", partial(post, tokenize, "content"), methods=["POST"]),
        Route("/detokenize", partial(post, detokenize, "tokens"), methods=["POST"]),
    ]
    errors = {HTTPException: refuse, Exception: refuse}
    app = Starlette(routes=routes, exception_handlers=errors, max_body_size=MAX_BODY)
    log = say if not args.quiet else lambda text: None
    return guard(app, refuse, Refusal, log, args.host, args.api_key, args.cors)


def say(text: str) -> None:
    """A line on stderr, if it can be written to."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Serve a Llama model.")
    parser.add_argument("--model", metavar="MODEL", default=llama2.DEFAULT_MODEL)
    parser.add_argument("--chat-format", metavar="NAME", help="default: what its template says")
    parser.add_argument(
        "--host", default="127.0.0.1", help="default: %(default)s, for this machine"
    )
    parser.add_argument(
        "--port", type=int, default=8080, help="default: %(default)s; 0: a free one"
    )
    key = "required for every path but /health"
    parser.add_argument("--api-key", metavar="KEY", type=os.fsencode, help=key)
    cors = "a site whose pages may use the server; *: any"
    parser.add_argument("--cors", metavar="ORIGIN", help=cors)
    context = "maximum tokens of a prompt and its answer"
    parser.add_argument("--context", metavar="N", type=int, help=context)
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, default="auto", help="of the activations")
    hidden = "read every prompt anew: neither times nor usage tell of others' prompts"
    parser.add_argument("--no-prompt-cache", dest="prompt_cache", action="store_false", help=hidden)
    parser.add_argument("--quiet", action="store_true", help="no log of requests")
    return parser.parse_args()


def main() -> int:
    """Load the model and serve it; returns the exit status."""
    args = parse_args()
    try:
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        session = Session(args)
        listener = socket.create_server((args.host, args.port))
    except (ValueError, OverflowError, OSError, MemoryError, RuntimeError) as error:
        say(f"server.py: error: {utf8(str(error))}")
        return 2
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else events wait 40 ms
    name = utf8(Path(getattr(session.model, "name_or_path", "") or args.model).stem)
    app = make_app(session, name, args)
    options = {"http": Connection, "ws": "none", "lifespan": "off", "log_level": "critical"}
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=3, **options))

    def check() -> None:
        anyio.from_thread.check_cancelled()
        if server.should_exit:
            raise Refusal(503, "the server is shutting down")

    session.check = check
    with suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if session.chat_format is None:
            say("the model's chat template is unknown; chats need --chat-format")
        say(f"listening on http://{args.host}:{listener.getsockname()[1]}")
        server.run([listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
