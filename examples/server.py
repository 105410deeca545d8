"""An HTTP server with OpenAI's interface: an example of llama2.py as a library.

    pip install "starlette>=1.6" "anyio>=4.1" uvicorn
    python examples/server.py                                     # the small bundled model
    python examples/server.py --model llama-2-7b-chat.Q4_0.gguf   # the real thing

    curl http://127.0.0.1:8080/v1/chat/completions \\
        -d '{"messages": [{"role": "user", "content": "Hello"}], "stream": true}'

GET /health, /v1/models; POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize.

The event loop talks to clients. A thread beside it runs the model for one request after another,
in the order they came, each until its client hangs up. The caches of the last prompts are kept: of
a chat that goes on, only what is new is computed.
"""

import asyncio
import hmac
import itertools
import json
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
try:
    import anyio.from_thread
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    import llama2
except ImportError as error:
    needed = 'pip install "starlette>=1.6" "anyio>=4.1" uvicorn'
    print(f"server.py: {error.name} is missing: {needed}", file=sys.stderr)
    sys.exit(2)

MAX_BODY, BODY_SECONDS = 10**6, 30  # bytes, and the time in which they must arrive
MAX_WAITING, MAX_PROMPTS = 64, 128  # requests in the queue, prompts in one of them
MAX_CACHES, CACHE_BYTES = 4, 2**32  # of all together; one cache at least
NAMES = {bool: "a boolean", int: "an integer", float: "a number", str: "a text", dict: "an object"}
Body = dict[str, Any]


class Refusal(HTTPException):
    """What a client gets instead of an answer; `param` names the field that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None, code: Any = None):
        super().__init__(status, message, {"Retry-After": "2"} if status == 503 else None)
        self.param, self.code = param, code


def refuse(request: Request | None, error: Any) -> Response:
    """OpenAI's form of an error."""
    if not isinstance(error, HTTPException):  # its text may quote a prompt or a path
        error = Refusal(500, f"the server failed: {type(error).__name__}")
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    body = {"message": llama2.well_formed(error.detail), "type": kind}
    body |= {name: getattr(error, name, None) for name in ("param", "code")}
    return JSONResponse({"error": body}, error.status_code, error.headers)


def need(fits: bool, name: str, accepted: str, found: Any = None) -> None:
    """Refuse a field unless it fits. What was found is told where it is no part of a prompt."""
    if not fits:
        told = ":" if found is None else f" is {json.dumps(found)[:40]};"
        raise Refusal(400, f"{name}{told} accepted is {accepted}", name)


def get(body: Body, name: str, kind: type, default: Any = None, low: int = 0, high: int = 0) -> Any:
    """A field, or its default if it is absent or null; numbers are limited."""
    value = body.get(name)
    if value is None:
        return default
    fits = type(value) is kind or (kind is float and type(value) is int)  # but true is not 1
    limits = f" from {low} to {high}" if high else ""
    need(fits and (not limits or low <= value <= high), name, NAMES[kind] + limits, value)
    return value


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


class Engine:
    """A model with its tokenizer and its caches, and the queue for it."""

    def __init__(self, path: Path, context: int | None) -> None:
        checkpoint = llama2.open_checkpoint(path)
        if context is not None:
            checkpoint = checkpoint.allow_context(context)
        self.config, self.chat_template = checkpoint.config, checkpoint.chat_template
        most = self.config.max_position_embeddings
        self.context = context or min(most, llama2.CHAT_CONTEXT)
        self.name = llama2.well_formed(path.resolve().stem)
        device = llama2.choose_device("auto", checkpoint)
        dtype, cache_dtype, exact = llama2.choose_dtypes("auto", device, checkpoint)
        plan = llama2.memory_plan(checkpoint, self.context, dtype, device, cache_dtype)
        count = max(1, min(MAX_CACHES, CACHE_BYTES // plan["cache"]))
        plan["cache"] *= count
        llama2.check_memory(plan, self.context, device, llama2.free_memory(device))
        self.model, self.tokenizer = llama2.load(checkpoint, device, dtype, exact=exact)
        self.model.register_forward_pre_hook(self.check)
        shape = self.config, 1, self.context, cache_dtype, device
        caches = [llama2.Cache(*shape) for _ in range(count)]
        self.session = llama2.Session(self.model, self.tokenizer, caches)
        self.turn = anyio.CapacityLimiter(1)  # first come, first served
        self.jobs = 0  # that wait, and the one that runs
        self.closing = lambda: False  # whether the server is about to end

    def check(self, *_: Any) -> None:
        """Before each pass of the model: between tokens, and between the chunks of a prompt."""
        anyio.from_thread.check_cancelled()
        if self.closing():
            raise Refusal(503, "the server is shutting down")


class Job:
    """A checked request for completions, and the response to it."""

    def __init__(self, engine: Engine, body: Body, chat: bool) -> None:
        self.engine, self.chat, self.stream = engine, chat, get(body, "stream", bool, False)
        self.include_usage = get(get(body, "stream_options", dict, {}), "include_usage", bool)
        self.echo = not chat and get(body, "echo", bool, False)
        self.top = None if chat else get(body, "logprobs", int, None, 0, 5)
        limit = get(body, "max_tokens", int, engine.context if chat else 16, 0, 2**31 - 1)
        seed, stop = get(body, "seed", int, None, -(2**63), 2**63 - 1), body.get("stop")
        stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
        fits = all(isinstance(text, str) and 1 <= len(text) <= 256 for text in stops)
        need(fits and len(stops) <= 16, "stop", "up to 16 texts of 1 to 256 characters", stop)
        get(body, "n", int, 1, 1, 1)
        get(body, "model", str)  # any: there is one
        self.options = {  # of stream_text()
            "max_new_tokens": get(body, "max_completion_tokens", int, limit, 0, 2**31 - 1),
            "temperature": get(body, "temperature", float, 1, 0, 2),
            "top_p": get(body, "top_p", float, 1, 0, 1) or 1e-9,  # 0: the likeliest alone
            "seed": None if seed is None else seed % 2**63,
            "top": self.top,
            "stop": stops,
            "strip": chat,
        }
        name = "messages" if chat else "prompt"
        try:
            self.prompts = (self.encode_chat if chat else self.encode)(body.get(name))
        except ValueError as error:
            raise Refusal(400, f"{name}: {error}", name) from None
        longest = max(map(len, self.prompts))
        if longest + min(self.options["max_new_tokens"], 1) > engine.context:
            found = f"{name} of {longest} tokens; the context holds {engine.context} in all"
            raise Refusal(400, found, name, "context_length_exceeded")
        kind = ("chat.completion" + ".chunk" * self.stream) if chat else "text_completion"
        self.about = {"id": f"cmpl-{uuid.uuid4().hex}", "object": kind, "model": engine.name}
        self.about["created"] = int(time.time())
        self.replies: asyncio.Queue = asyncio.Queue()  # and None at their end

    def encode(self, prompt: Any) -> list[list[int]]:
        """The ids of one prompt or of several."""
        prompts = prompt if isinstance(prompt, list) and not is_ids(prompt) else [prompt]
        fits = all(isinstance(p, str) or is_ids(p) for p in prompts)
        accepted = f"a text, a list of token ids, or up to {MAX_PROMPTS} of these in a list"
        need(fits and len(prompts) <= MAX_PROMPTS, "prompt", accepted)
        tokenizer = self.engine.tokenizer
        rows = [p if is_ids(p) else tokenizer.encode(p, tokenizer.add_bos) for p in prompts]
        for ids in rows:
            tokenizer.decode(llama2.check_prompt(self.engine.config, ids, len(ids)))
        return rows

    def encode_chat(self, messages: Any) -> list[list[int]]:
        """The ids of a chat; the options get what ends its answer."""
        try:
            for message in messages:
                if isinstance(message["content"], list):
                    message["content"] = "\n".join(part["text"] for part in message["content"])
        except (TypeError, LookupError):
            raise ValueError("accepted is a list of objects with role and content") from None
        chat_format = llama2.recognise_chat_format(self.engine.chat_template)
        stop_ids, tags = llama2.chat_stops(self.engine.tokenizer, chat_format)
        config = self.engine.config
        self.options["stop_ids"] = {config.eos_token_id, *config.stop_token_ids, *stop_ids}
        self.options["stop"] += tags
        return [llama2.encode_chat(self.engine.tokenizer, messages, chat_format)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, as a response of Starlette does, until the client hangs up."""
        if self.engine.jobs > MAX_WAITING:
            raise Refusal(503, f"{MAX_WAITING} requests are waiting; try later")
        self.engine.jobs += 1

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(self.run, asyncio.get_running_loop())
            group.start_soon(watch)
            stream = StreamingResponse(self.events(), media_type="text/event-stream")
            response = stream if self.stream else await self.replies.get()
            await response(scope, receive, send)
            group.cancel_scope.cancel()  # watch() is still waiting

    async def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for a turn with the model, and take it in a thread."""

        def work() -> None:
            for choices, usage in self.complete():
                reply = JSONResponse({**self.about, "choices": choices, "usage": usage})
                loop.call_soon_threadsafe(self.replies.put_nowait, reply)

        try:
            await anyio.to_thread.run_sync(work, limiter=self.engine.turn)
        except Exception as error:  # noqa: BLE001 (memory that ran out, weights that are NaN)
            self.replies.put_nowait(refuse(None, error))
        finally:
            self.engine.jobs -= 1  # though a slow client may still read
        self.replies.put_nowait(None)

    async def events(self) -> AsyncIterator[bytes]:
        """The replies as server-sent events."""
        while reply := await self.replies.get():
            yield b"data: " + reply.body + b"\n\n"
        yield b"data: [DONE]\n\n"

    def choice(self, index: int, text: str, finish: str | None = None, table: Any = None) -> Body:
        """A choice of a reply, or a piece of one."""
        said: Body = {"text": text, "logprobs": table}
        if self.chat:
            whole = {"message": {"role": "assistant", "content": text}}
            said = {"delta": {"content": text}} if self.stream else whole
        return {"index": index, **said, "finish_reason": finish}

    def complete(self) -> Iterator[tuple[list[Body], Body | None]]:
        """Continue each prompt: yields choices, in a stream piece by piece, and the usage."""
        engine, choices, new_tokens, cached_tokens = self.engine, [], 0, 0
        if self.chat and self.stream:
            yield [{"index": 0, "delta": {"role": "assistant", "content": ""}}], None
        for index, ids in enumerate(self.prompts):
            scores = []
            if self.echo and self.top is not None:  # the first id has no score
                scores = [llama2.Score(ids[0], None, []), *engine.session.score(ids, self.top)]
            prompt = "" if self.chat else engine.tokenizer.decode(ids)
            stream = engine.session.stream_text(ids, first=not prompt, **self.options)
            texts, report = [], stream.report
            for text in itertools.chain([prompt] * self.echo, stream):
                texts.append(text)
                if self.stream:
                    yield [self.choice(index, text)], None
            text, reason = "".join(texts), report.stop_reasons[0]
            new_tokens += report.new_tokens
            cached_tokens += len(ids) - report.prompt_tokens
            table = None
            if self.top is not None:
                end = len(text) + (not reason.startswith("stop text"))
                table = self.table(scores + report.scores[0], self.echo or not prompt, end)
            finish = "stop" if reason.startswith("stop") else "length"
            choices.append(self.choice(index, "" if self.stream else text, finish, table))
            if self.stream:
                yield [choices.pop()], None
        if not self.stream or self.include_usage:
            prompt_tokens = sum(map(len, self.prompts))
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens}
            usage["total_tokens"] = prompt_tokens + new_tokens
            yield choices, {**usage, "prompt_tokens_details": {"cached_tokens": cached_tokens}}

    def table(self, scores: list[llama2.Score], first: bool, end: int) -> Body:
        """OpenAI's table of the tokens whose texts, joined, begin before character `end`."""
        tokenizer, rows, offset = self.engine.tokenizer, [], 0
        decoder, names = llama2.StreamDecoder(tokenizer, first), tokenizer.pieces
        for token_id, logprob, best in scores:
            text, best = decoder.decode(token_id), [*best, (token_id, logprob)]
            top = {names[i].replace("\u2581", " "): p for i, p in best if i < len(names)}
            if offset < end:
                rows.append((text, logprob, None if logprob is None else top, offset))
            offset += len(text)
        columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[i] for row in rows] for i, name in enumerate(columns)}


def make_app(engine: Engine, api_key: bytes | None) -> Any:
    """The ASGI application."""
    tokenizer = engine.tokenizer

    async def read(request: Request) -> Body:
        with suppress(ValueError, RecursionError, asyncio.TimeoutError):
            body = await asyncio.wait_for(request.json(), BODY_SECONDS)
            if isinstance(body, dict):
                return body
        raise Refusal(400, f"the body is not a JSON object that arrives in {BODY_SECONDS} s")

    async def tokenize(request: Request) -> Response:
        body = await read(request)
        text, special = body.get("content"), get(body, "add_special", bool, False)
        need(isinstance(text, str), "content", "a text")
        ids = await asyncio.to_thread(tokenizer.encode, text, special and tokenizer.add_bos)
        return JSONResponse({"tokens": ids, "count": len(ids)})

    async def detokenize(request: Request) -> Response:
        ids = (await read(request)).get("tokens")
        fits = is_ids(ids) and all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
        need(fits, "tokens", f"a list of token ids below {tokenizer.vocab_size}")
        return JSONResponse({"content": await asyncio.to_thread(tokenizer.decode, ids)})

    async def complete(request: Request) -> Any:
        chat = request.url.path == "/v1/chat/completions"
        return await asyncio.to_thread(Job, engine, await read(request), chat)

    model = {"id": engine.name, "object": "model", "created": int(time.time())}
    models = {"object": "list", "data": [{**model, "owned_by": "llama2.py"}]}
    routes = [
        Route("/health", JSONResponse({"status": "ok"}), methods=["GET"]),
        Route("/v1/models", JSONResponse(models), methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/chat/completions", complete, methods=["POST"]),
    ]
    errors = {HTTPException: refuse, Exception: refuse}
    app = Starlette(routes=routes, exception_handlers=errors, max_body_size=MAX_BODY)

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        right = hmac.compare_digest(given, b"Bearer " + (api_key or b""))
        wrong = refuse(None, Refusal(401, "the API key is wrong", code="invalid_api_key"))
        await (app if right or scope["path"] == "/health" else wrong)(scope, receive, send)

    return app if api_key is None else guarded


def main() -> int:
    """Load the model and serve it; returns the exit status."""
    parser = llama2.Parser(prog="server.py", description="Serve a Llama 2 model.")
    add = parser.add_argument
    add("--model", metavar="PATH", type=Path, default=llama2.DEFAULT_MODEL)
    add("--host", default="127.0.0.1", help="default: %(default)s, for this machine alone")
    add("--port", type=int, default=8080, help="default: %(default)s; 0 finds a free one")
    add("--api-key", metavar="KEY", type=os.fsencode, help="needed for all but /health")
    add("--context", metavar="N", type=int, help="tokens of a prompt and its answer at most")
    try:
        args = parser.parse_args()
        engine = Engine(args.model, args.context)
        listener = socket.create_server((args.host, args.port), backlog=1024)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else events wait 40 ms
    except (ValueError, OverflowError, OSError, MemoryError, RuntimeError) as error:
        print(f"server.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    silent = {"log_config": None, "log_level": "critical", "access_log": False}
    options = {"http": "h11", "ws": "none", "lifespan": "off", "timeout_graceful_shutdown": 3}
    server = uvicorn.Server(uvicorn.Config(make_app(engine, args.api_key), **options, **silent))
    engine.closing = lambda: server.should_exit
    with suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        llama2.note(f"listening on http://{args.host}:{listener.getsockname()[1]}")
        server.run([listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
