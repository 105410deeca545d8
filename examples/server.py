"""An HTTP server with OpenAI's interface: an example of llama2.py as a library.

    pip install "starlette>=1.6" "anyio>=4.1" uvicorn
    python examples/server.py --model llama-2-7b-chat.Q4_0.gguf   # without: the small bundled one
    curl http://127.0.0.1:8080/v1/completions -d '{"prompt": "Once upon a time"}'

The event loop talks to clients. A second thread runs the model (serving.py), one request at a time
in the order they came, each until its client hangs up. Of a chat that goes on, only what is new is
computed: the last caches are kept. What is not supported is refused; guard.py refuses other sites.
"""

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
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
try:
    import anyio.from_thread
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
LIMITS = llama2.SAMPLING_LIMITS | {
    "temperature": (0, 2), "seed": (-(2**63), 2**63 - 1), "logprobs": (0, 20),
    "top_logprobs": (0, 20), "max_tokens": (0, 2**31 - 1), "max_completion_tokens": (0, 2**31 - 1),
}  # fmt: skip
# Fields that change nothing here, and those that would with any but these values.
IGNORED = "user metadata store service_tier safety_identifier prompt_cache_key parallel_tool_calls"
NEUTRAL = {
    ("n", "1"), ("best_of", "1"), ("suffix", '""'), ("tools", "[]"), ("functions", "[]"),
    ("tool_choice", '"none"'), ("tool_choice", '"auto"'), ("function_call", '"none"'),
    ("function_call", '"auto"'), ("modalities", '["text"]'), ("echo", "false"),
    ("top_logprobs", "0"), ("response_format", '{"type": "text"}'),
}  # fmt: skip


class Refusal(HTTPException):
    """An error for the client; `about` may hold OpenAI's `param` (the wrong field) and `code`."""

    def __init__(self, status: int, message: str, **about: str) -> None:
        super().__init__(status, message, {"Retry-After": "2"} if status == 503 else None)
        self.about = about


def refuse(request: Any, error: Any) -> Response:
    """OpenAI's form of an error."""
    if not isinstance(error, HTTPException):  # its text may quote a prompt or a path
        error = Refusal(500, f"the server failed: {type(error).__name__}")
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    body = {"message": llama2.well_formed(error.detail), "type": kind, "param": None, "code": None}
    body |= getattr(error, "about", {})
    return JSONResponse({"error": body}, error.status_code, error.headers)


def take(body: dict, name: str, kind: type, default: Any = None) -> Any:
    """Remove a field and return its value, or its default if it is absent or null."""
    value = body.pop(name, None)
    if value is None:
        return default
    limits = LIMITS[name] if kind in (int, float) else ()
    fits = type(value) is kind or (kind is float and type(value) is int)  # but true is not 1
    if not fits or (limits and not limits[0] <= value <= limits[1]):
        needed = f"{kind.__name__}{' from {} to {}' if limits else ''}".format(*limits)
        raise Refusal(400, f"{name} is {json.dumps(value)[:40]}; must be {needed}", param=name)
    return value


def take_sampling(body: dict, vocab_size: int) -> llama2.Sampling:
    """The fields of Sampling. A seed may be negative."""
    defaults = {name: getattr(llama2.Sampling, name) for name in llama2.SAMPLING_LIMITS}
    values = {k: take(body, k, int if v is None else type(v), v) for k, v in defaults.items()}
    values["seed"] = values["seed"] and values["seed"] % 2**63
    try:
        bias = {int(key): value for key, value in take(body, "logit_bias", dict, {}).items()}
        sampling = llama2.Sampling(**values, logit_bias=bias)
        llama2.sample(llama2.torch.zeros(vocab_size), llama2.Sampling(0, logit_bias=bias))
    except ValueError as error:
        raise Refusal(400, f"logit_bias: {error}", param="logit_bias") from None
    return sampling


class Job:
    """A validated completion request, and its response."""

    def __init__(self, session: Session, about: dict, reuse: bool, body: dict, field: str):
        self.session, self.chat, prompt = session, field == "messages", body.pop(field, None)
        self.stream, stop = take(body, "stream", bool, False), body.pop("stop", None)
        options, _ = take(body, "stream_options", dict, {}), take(body, "model", str)
        self.include_usage = take(options, "include_usage", bool) or not self.stream
        stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
        if len(stops) > 16 or not all(isinstance(s, str) and 1 <= len(s) <= 256 for s in stops):
            problem = (
                f"stop is {json.dumps(stop)[:40]}; must be up to 16 texts of 1 to 256 characters"
            )
            raise Refusal(400, problem, param="stop")
        top = take(body, "logprobs", bool if self.chat else int)
        if self.chat:
            top = take(body, "top_logprobs", int, 0) if top else None
        most = take(body, "max_tokens", int, session.context if self.chat else 16)
        # A seed promises the same text, and rounding may differ with what is read at a time.
        reuse &= take(body, "cache_prompt", bool, body.get("seed") is None)
        self.options = {  # of stream_text()
            "chat": self.chat,
            "echo": not self.chat and take(body, "echo", bool, False),
            "top": top,
            "max_new_tokens": take(body, "max_completion_tokens", int, most),
            "sampling": take_sampling(body, session.tokenizer.vocab_size),
            "stop": stops,
            "reuse": reuse,
        }
        body |= options
        messages = prompt if self.chat and isinstance(prompt, list) else []
        for message in (m for m in messages if isinstance(m, dict)):
            if others := [k for k in message if k not in ("role", "content") and message[k]]:
                raise ValueError(f"{others[0][:40]} in a message is not supported")
            if message.get("role") == "developer":
                message["role"] = "system"
        self.prompts = session.encode(prompt, self.chat)
        if len(self.prompts) > MAX_PROMPTS:
            raise ValueError(f"there are {len(self.prompts)}; must be at most {MAX_PROMPTS}")
        longest = max(map(len, self.prompts))
        if longest + min(self.options["max_new_tokens"], 1) > session.context:
            problem = f"{field}: {longest} tokens; the context holds {session.context} in all"
            raise Refusal(400, problem, param=field, code="context_length_exceeded")
        kind = ("chat.completion" + ".chunk" * self.stream) if self.chat else "text_completion"
        name = f"{'chat' * self.chat}cmpl-{secrets.token_hex(12)}"
        self.about = {"id": name, "object": kind, "created": int(time.time()), **about}
        self.log: list[str] = []  # tokens and their speed
        self.replies: asyncio.Queue = asyncio.Queue()  # and None at their end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, as a response of Starlette does, until the client hangs up."""
        if TURN.statistics().tasks_waiting >= MAX_WAITING:
            raise Refusal(503, f"{MAX_WAITING} requests are waiting; try later")

        scope["log"] = self.log

        async def watch() -> None:  # a client that got the whole answer has disconnected, too
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        async def respond() -> None:
            stream = StreamingResponse(self.events(), media_type="text/event-stream")
            await (stream if self.stream else await self.replies.get())(scope, receive, send)

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            group.start_soon(respond)
            async with TURN:
                try:
                    await anyio.to_thread.run_sync(self.complete)
                except Exception as error:  # noqa: BLE001 (memory that ran out, weights with NaN)
                    self.replies.put_nowait(refuse(None, error))
            self.replies.put_nowait(None)

    async def events(self) -> Any:
        while reply := await self.replies.get():
            yield b"data: " + reply.body + b"\n\n"
        yield b"data: [DONE]\n\n"

    def reply(self, *choices: dict, **usage: dict) -> None:
        reply = JSONResponse({**self.about, "choices": choices, **usage})
        anyio.from_thread.run_sync(self.replies.put_nowait, reply)

    def complete(self) -> None:
        """Continue the prompts."""
        choices, reports, start = [], [], time.perf_counter()
        finish = self.reply if self.stream else choices.append
        for index, ids in enumerate(self.prompts):
            choice: dict = {"index": index, "logprobs": None, "finish_reason": None}
            if self.chat and self.stream:
                self.reply(choice | {"delta": {"role": "assistant", "content": ""}})
            (pieces, scores), text = self.session.stream_text(ids, **self.options), ""
            reports.append(pieces.report)
            for piece in pieces:
                text += piece
                if self.stream:
                    self.reply(choice | self.content(piece))
            stopped = pieces.report.stop_reasons[0].startswith("stop")
            choice["finish_reason"] = "stop" if stopped else "length"
            if self.options["top"] is not None:
                choice["logprobs"] = self.table(scores)
            finish(choice | self.content("" if self.stream else text))
        old, new = sum(map(len, self.prompts)), sum(len(r.new_ids[0]) for r in reports)
        cached = old - sum(report.prompt_tokens for report in reports)
        rate = new / (time.perf_counter() - start)
        self.log.append(f"read {old - cached} + {cached} cached, made {new}, {rate:.1f} tokens/s")
        if self.include_usage:
            usage = {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}
            usage |= {"prompt_tokens_details": {"cached_tokens": cached}}
            self.reply(*choices, usage=usage)

    def content(self, text: str) -> dict:
        if not self.chat:
            return {"text": text}
        whole = {"message": {"role": "assistant", "content": text}}
        return {"delta": {"content": text}} if self.stream else whole

    def table(self, scores: list[Score]) -> dict:
        """OpenAI's form of log-probabilities; a token's own comes first, named as its text."""
        tokenizer, rows = self.session.tokenizer, []
        for score in scores:
            row: dict[str, dict] = {}
            for token_id, logprob in {score.token_id: score.logprob, **(score.top or {})}.items():
                data = tokenizer.token_bytes(token_id)  # maybe a part of a character
                text = data.decode(errors="backslashreplace") if row else score.text
                text = tokenizer.pieces[token_id] if row and text in ("", *row) else text
                row[text] = {"token": text, "logprob": logprob, "bytes": [*data]}
            rows.append([*row.values()])
        if self.chat:
            return {"content": [{**row[0], "top_logprobs": row} for row in rows], "refusal": None}
        tops = [{entry["token"]: entry["logprob"] for entry in row} for row in rows]
        starts = itertools.accumulate((len(score.text) for score in scores), initial=0)
        return {
            "tokens": [score.text for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [score.top and top for score, top in zip(scores, tops, strict=True)],
            "text_offset": list(starts)[:-1],
        }


def make_app(session: Session, name: str, args: Any) -> Any:
    """The ASGI application."""

    def tokenize(body: dict, field: str) -> Response:
        text, special = body.pop(field, None), take(body, "add_special", bool, False)
        ids = session.tokenizer.encode(text, special and session.tokenizer.add_bos)
        return JSONResponse({"tokens": ids, "count": len(ids)})

    def detokenize(body: dict, field: str) -> Response:
        return JSONResponse({"content": session.tokenizer.decode(take(body, field, list, []))})

    async def post(handle: Any, field: str, request: Any) -> Any:
        body: Any = None
        with suppress(ValueError, RecursionError, AttributeError):
            body = {k: v for k, v in (await request.json()).items() if v is not None}
        if body is None:
            raise Refusal(400, "the body must be a JSON object")
        try:
            reply = await anyio.to_thread.run_sync(handle, body, field)
            for key, found in ((key, json.dumps(value)) for key, value in body.items()):
                if key not in IGNORED.split() and (key, found) not in NEUTRAL:
                    problem = f"{key[:40]} is {found[:40]}, which is not supported"
                    raise Refusal(400, problem, param=llama2.well_formed(key[:40]))
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"{field}: {error}", param=field) from None
        return reply

    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "llama2.py"}
    job = partial(Job, session, {"model": name}, args.prompt_cache)
    routes = [
        Route("/health", JSONResponse({"status": "ok"}), methods=["GET"]),
        Route("/v1/models", JSONResponse({"object": "list", "data": [model]}), methods=["GET"]),
        Route("/v1/chat/completions", partial(post, job, "messages"), methods=["POST"]),
        Route("/v1/completions", partial(post, job, "prompt"), methods=["POST"]),
        Route("/tokenize", partial(post, tokenize, "content"), methods=["POST"]),
        Route("/detokenize", partial(post, detokenize, "tokens"), methods=["POST"]),
    ]
    errors = {HTTPException: refuse, Exception: refuse}
    app = Starlette(routes=routes, exception_handlers=errors, max_body_size=MAX_BODY)

    say = (lambda text: None) if args.quiet else llama2.note
    return guard(app, partial(refuse, None), Refusal, say, args.host, args.api_key, args.cors)


def main() -> None:
    """Load the model and serve it."""
    parser = llama2.Parser(prog="server.py", description="Serve a Llama model.")
    add = parser.add_argument
    add("--model", metavar="PATH", type=Path, default=llama2.DEFAULT_MODEL)
    add("--chat-format", choices=llama2.CHAT_FORMAT_NAMES, help="default: what its template says")
    add("--host", default="127.0.0.1", help="default: %(default)s, for this machine alone")
    add("--port", type=int, default=8080, help="default: %(default)s; 0 finds a free one")
    add("--api-key", metavar="KEY", type=os.fsencode, help="required for every path but /health")
    add("--cors", metavar="ORIGIN", help="a site whose pages may use the server; *: any")
    add("--context", metavar="N", type=int, help="maximum tokens of a prompt and its answer")
    hidden = "read every prompt anew: neither times nor usage tell of others' prompts"
    add("--no-prompt-cache", dest="prompt_cache", action="store_false", help=hidden)
    add("--quiet", action="store_true", help="no log of requests")
    try:
        args = parser.parse_args()
        session = Session.open(args.model, args.context, args.chat_format)
        listener = socket.create_server((args.host, args.port))
    except (ValueError, OverflowError, OSError, MemoryError, RuntimeError) as error:
        sys.exit(llama2.fail(error, "server.py"))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else events wait 40 ms
    app = make_app(session, llama2.well_formed(args.model.resolve().stem), args)
    options = {"http": Connection, "ws": "none", "lifespan": "off", "log_level": "critical"}
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=3, **options))

    def check() -> None:  # before each pass of the model
        anyio.from_thread.check_cancelled()
        if server.should_exit:
            raise Refusal(503, "the server is shutting down")

    session.check = check
    with suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if not session.chat_format:
            llama2.note("the model's chat template is unknown: choose --chat-format")
        llama2.note(f"listening on http://{args.host}:{listener.getsockname()[1]}")
        server.run([listener])


if __name__ == "__main__":
    main()
