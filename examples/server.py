"""An HTTP server with OpenAI's interface: an example of llama2.py as a library.

    pip install "starlette>=1.6" "anyio>=4.1" uvicorn
    python examples/server.py --model llama-2-7b-chat.Q4_0.gguf   # without: the small bundled one
    curl http://127.0.0.1:8080/v1/chat/completions \\
        -d '{"messages": [{"role": "user", "content": "Hello"}], "stream": true}'

The event loop talks to clients. A thread beside it runs the model for one request after another, in
the order they came, each until its client hangs up. The caches of the last prompts are kept: of a
chat that goes on, only what is new is computed.
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
MAX_CACHES, CACHE_BYTES = 4, 2**32  # conversations that are kept, if they fit; one at least
TURN = anyio.Lock()  # with the model: first come, first served


class Refusal(HTTPException):
    """An error for the client; `about` may hold OpenAI's `param`, the wrong field, and `code`."""

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


def get(body: dict, name: str, kind: type, default: Any = None, low: int = 0, high: int = 0) -> Any:
    """A field, or its default if it is absent or null; numbers are limited."""
    value = body.get(name)
    if value is None:
        return default
    fits = type(value) is kind or (kind is float and type(value) is int)  # but true is not 1
    if not fits or (high and not low <= value <= high):
        needed = f"{kind.__name__} from {low} to {high}" if high else kind.__name__
        raise Refusal(400, f"{name} is {json.dumps(value)[:40]}; needed is {needed}", param=name)
    return value


class Job:
    """A checked request for completions, and the response to it."""

    def __init__(self, session: llama2.Session, model: str, body: dict, field: str) -> None:
        self.session, self.chat = session, field == "messages"
        self.stream = get(body, "stream", bool, False)
        self.include_usage = get(get(body, "stream_options", dict, {}), "include_usage", bool)
        limit = get(body, "max_tokens", int, session.context if self.chat else 16, 0, 2**31 - 1)
        seed, stop = get(body, "seed", int, None, -(2**63), 2**63 - 1), body.get("stop")
        stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
        if len(stops) > 16 or not all(isinstance(s, str) and 1 <= len(s) <= 256 for s in stops):
            told = f"stop is {json.dumps(stop)[:40]}; needed: up to 16 texts of 1 to 256 characters"
            raise Refusal(400, told, param="stop")
        get(body, "n", int, 1, 1, 1)
        get(body, "model", str)  # any: there is one
        self.options = {  # of stream_text()
            "chat": self.chat,
            "echo": not self.chat and get(body, "echo", bool, False),
            "top": None if self.chat else get(body, "logprobs", int, None, 0, 5),
            "max_new_tokens": get(body, "max_completion_tokens", int, limit, 0, 2**31 - 1),
            "sampling": llama2.Sampling(
                temperature=get(body, "temperature", float, 0.8, 0, 2),
                top_p=get(body, "top_p", float, 0.95, 0, 1),
                seed=seed and seed % 2**63,
            ),
            "stop": stops,
        }
        self.prompts = session.encode(body.get(field), self.chat)
        if len(self.prompts) > MAX_PROMPTS:
            raise ValueError(f"there are {len(self.prompts)}; accepted are up to {MAX_PROMPTS}")
        longest = max(map(len, self.prompts))
        if longest + min(self.options["max_new_tokens"], 1) > session.context:
            told = f"{field}: {longest} tokens; the context holds {session.context} in all"
            raise Refusal(400, told, param=field, code="context_length_exceeded")
        kind = ("chat.completion" + ".chunk" * self.stream) if self.chat else "text_completion"
        self.about = {"id": f"cmpl-{secrets.token_hex(12)}", "object": kind, "model": model}
        self.about["created"] = int(time.time())
        self.replies: asyncio.Queue = asyncio.Queue()  # and None at their end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, as a response of Starlette does, until the client hangs up."""
        if TURN.statistics().tasks_waiting >= MAX_WAITING:
            raise Refusal(503, f"{MAX_WAITING} requests are waiting; try later")

        async def watch() -> None:  # who was sent the whole answer counts as gone, too
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
        choices, reports = [], []
        finish = self.reply if self.stream else choices.append
        for index, ids in enumerate(self.prompts):
            choice: dict = {"index": index, "logprobs": None, "finish_reason": None}
            if self.chat and self.stream:
                self.reply(choice | {"delta": {"role": "assistant", "content": ""}})
            pieces, text = self.session.stream_text(ids, **self.options), ""
            for piece in pieces:
                text += piece
                if self.stream:
                    self.reply(choice | self.said(piece))
            reports.append(pieces.report)
            stopped = pieces.report.stop_reasons[0].startswith("stop")
            choice["finish_reason"] = "stop" if stopped else "length"
            if self.options["top"] is not None:
                choice["logprobs"] = self.table(pieces.report.scores[0])
            finish(choice | self.said("" if self.stream else text))
        if self.include_usage or not self.stream:
            old, new = sum(map(len, self.prompts)), sum(report.new_tokens for report in reports)
            cached = {"cached_tokens": old - sum(report.prompt_tokens for report in reports)}
            usage = {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}
            self.reply(*choices, usage={**usage, "prompt_tokens_details": cached})

    def said(self, text: str) -> dict:
        if not self.chat:
            return {"text": text}
        whole = {"message": {"role": "assistant", "content": text}}
        return {"delta": {"content": text}} if self.stream else whole

    def table(self, scores: list[llama2.Score]) -> dict:
        """OpenAI's form of log-probabilities."""
        names = [piece.replace("\u2581", " ") for piece in self.session.tokenizer.pieces]
        starts = itertools.accumulate((len(score.text) for score in scores), initial=0)
        return {
            "tokens": [score.text for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [s.top and {names[i]: p for i, p in s.top.items()} for s in scores],
            "text_offset": list(starts)[:-1],
        }


def make_app(session: llama2.Session, name: str, api_key: bytes | None) -> Any:
    """The ASGI application."""

    def tokenize(body: dict, field: str) -> Response:
        text, special = body.get(field), get(body, "add_special", bool, False)
        ids = session.tokenizer.encode(text, special and session.tokenizer.add_bos)
        return JSONResponse({"tokens": ids, "count": len(ids)})

    def detokenize(body: dict, field: str) -> Response:
        return JSONResponse({"content": session.tokenizer.decode(body.get(field))})

    async def post(handle: Any, field: str, request: Any) -> Any:
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError("the body is not a JSON object")  # noqa: TRY004
            return await anyio.to_thread.run_sync(handle, body, field)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"{field}: {error}", param=field) from None

    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "llama2.py"}
    job = partial(Job, session, name)
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

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        right = secrets.compare_digest(given, b"Bearer " + (api_key or b""))
        wrong = refuse(None, Refusal(401, "the API key is wrong", code="invalid_api_key"))
        await (app if right or scope["path"] == "/health" else wrong)(scope, receive, send)

    return app if api_key is None else guarded


def main() -> None:
    """Load the model and serve it."""
    parser = llama2.Parser(prog="server.py", description="Serve a Llama 2 model.")
    add = parser.add_argument
    add("--model", metavar="PATH", type=Path, default=llama2.DEFAULT_MODEL)
    add("--host", default="127.0.0.1", help="default: %(default)s, for this machine alone")
    add("--port", type=int, default=8080, help="default: %(default)s; 0 finds a free one")
    add("--api-key", metavar="KEY", type=os.fsencode, help="needed for all but /health")
    add("--context", metavar="N", type=int, help="tokens of a prompt and its answer at most")
    try:
        args = parser.parse_args()
        session = llama2.Session.open(args.model, args.context, MAX_CACHES, CACHE_BYTES)
        listener = socket.create_server((args.host, args.port))
    except (ValueError, OverflowError, OSError, MemoryError, RuntimeError) as error:
        sys.exit(llama2.fail(error, "server.py"))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else events wait 40 ms
    app = make_app(session, llama2.well_formed(args.model.resolve().stem), args.api_key)
    options = {"http": "h11", "ws": "none", "lifespan": "off", "log_level": "critical"}
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=3, **options))

    @session.model.register_forward_pre_hook  # before each pass of the model
    def check(*_: Any) -> None:
        anyio.from_thread.check_cancelled()
        if server.should_exit:
            raise Refusal(503, "the server is shutting down")

    with suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        llama2.note(f"listening on http://{args.host}:{listener.getsockname()[1]}")
        server.run([listener])


if __name__ == "__main__":
    main()
