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
from collections.abc import AsyncIterator
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
MAX_WAITING = 64  # requests in the queue
MAX_PROMPTS = 128  # in one request
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


async def read(request: Request) -> Body:
    """The JSON object that a request brings."""
    with suppress(ValueError, RecursionError, asyncio.TimeoutError):
        body = await asyncio.wait_for(request.json(), BODY_SECONDS)
        if isinstance(body, dict):
            return body
    raise Refusal(400, f"the body is not a JSON object that arrives in {BODY_SECONDS} s")


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


class Job:
    """A checked request for completions, which answers it, too."""

    def __init__(self, engine: "Engine", body: Body, chat: bool) -> None:
        limit = get(body, "max_tokens", int, engine.context if chat else 16, 0, 2**31 - 1)
        limit = get(body, "max_completion_tokens", int, limit, 0, 2**31 - 1)
        seed = get(body, "seed", int, None, -(2**63), 2**63 - 1)
        stop = body.get("stop")
        stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
        fits = all(isinstance(text, str) and 1 <= len(text) <= 256 for text in stops)
        need(fits and len(stops) <= 16, "stop", "up to 16 texts of 1 to 256 characters", stop)
        get(body, "n", int, 1, 1, 1)
        get(body, "model", str)  # any: there is one
        self.engine, self.chat, self.stream = engine, chat, get(body, "stream", bool, False)
        self.include_usage = get(get(body, "stream_options", dict, {}), "include_usage", bool)
        self.echo = not chat and get(body, "echo", bool, False)
        self.options = {  # of stream_text()
            "max_new_tokens": limit,
            "temperature": get(body, "temperature", float, 1, 0, 2),
            "top_p": get(body, "top_p", float, 1, 0, 1) or 1e-9,  # 0: the likeliest alone
            "seed": None if seed is None else seed % 2**63,
            "top": None if chat else get(body, "logprobs", int, None, 0, 5),
            "stop": stops,
        }
        name = "messages" if chat else "prompt"
        try:
            if chat:
                self.prompts = [engine.encode_chat(body.get(name), self.options)]
            else:
                self.prompts = engine.encode(body.get(name))
        except ValueError as error:
            raise Refusal(400, f"{name}: {error}", name) from None
        longest = max(map(len, self.prompts))
        if longest + min(limit, 1) > engine.context:  # a new token needs a place
            found = f"{name} of {longest} tokens; the context holds {engine.context} in all"
            raise Refusal(400, found, name, "context_length_exceeded")
        kind = ("chat.completion" + ".chunk" * self.stream) if chat else "text_completion"
        self.about = {"id": f"cmpl-{uuid.uuid4().hex}", "object": kind, "model": engine.name}
        self.about["created"] = int(time.time())
        self.replies: asyncio.Queue = asyncio.Queue()  # and None at their end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, as a response of Starlette does, until the client hangs up."""
        if self.engine.jobs > MAX_WAITING:
            raise Refusal(503, f"{MAX_WAITING} requests are waiting; try later")
        self.engine.jobs += 1
        self.loop = asyncio.get_running_loop()
        stream = StreamingResponse(self.events(), media_type="text/event-stream")
        async with anyio.create_task_group() as group:
            group.start_soon(self.run)
            group.start_soon(self.watch, receive, group.cancel_scope)
            response = stream if self.stream else await self.replies.get()
            await response(scope, receive, send)
            group.cancel_scope.cancel()  # watch() is still waiting

    async def watch(self, receive: Any, scope: anyio.CancelScope) -> None:
        """Cancel a scope when the client has gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def run(self) -> None:
        """Wait for a turn with the model, and take it in a thread."""
        try:
            await anyio.to_thread.run_sync(self.engine.complete, self, limiter=self.engine.turn)
        except Exception as error:  # noqa: BLE001 (memory that ran out, weights that are NaN)
            self.replies.put_nowait(refuse(None, error))
        finally:
            self.engine.jobs -= 1  # though a slow client may still read
        self.replies.put_nowait(None)

    async def events(self) -> AsyncIterator[bytes]:
        while reply := await self.replies.get():
            yield b"data: " + reply.body + b"\n\n"
        yield b"data: [DONE]\n\n"

    def choice(self, index: int, text: str, logprobs: Body, finish: str | None = None) -> Body:
        """A choice of a reply, or a piece of one."""
        said: Body = {"text": text}
        if self.chat:
            whole = {"message": {"role": "assistant", "content": text}}
            said = {"delta": {"content": text}} if self.stream else whole
        shown = None if self.options["top"] is None else logprobs
        return {"index": index, **said, "logprobs": shown, "finish_reason": finish}

    def send(self, choices: list[Body], usage: Body | None = None) -> None:
        """Hand a reply, or an event of it, from the model's thread to the event loop."""
        response = JSONResponse({**self.about, "choices": choices, "usage": usage})
        self.loop.call_soon_threadsafe(self.replies.put_nowait, response)


class Engine:
    """A model with its tokenizer, its caches, and the queue of jobs for it."""

    def __init__(self, path: Path, context: int | None, chat_format: str | None) -> None:
        checkpoint = llama2.open_checkpoint(path)
        if context is not None:
            checkpoint = checkpoint.allow_context(context)
        most = checkpoint.config.max_position_embeddings
        self.context = context or min(most, llama2.CHAT_CONTEXT)
        self.chat_format, self.chat_template = chat_format, checkpoint.chat_template
        self.name = llama2.well_formed(path.resolve().stem)
        device = llama2.choose_device("auto", checkpoint)
        dtype, cache_dtype, exact = llama2.choose_dtypes("auto", device, checkpoint)
        plan = llama2.memory_plan(checkpoint, self.context, dtype, device, cache_dtype)
        count = max(1, min(MAX_CACHES, CACHE_BYTES // plan["cache"]))
        plan["cache"] *= count
        llama2.check_memory(plan, self.context, device, llama2.free_memory(device))
        self.model, self.tokenizer = llama2.load(checkpoint, device, dtype, exact=exact)
        self.model.register_forward_pre_hook(self.check)
        shape = checkpoint.config, 1, self.context, cache_dtype, device
        self.held: dict[llama2.Cache, list[int]]  # the ids in each cache, that used last the last
        self.held = {llama2.Cache(*shape): [] for _ in range(count)}
        self.turn = anyio.CapacityLimiter(1)  # first come, first served
        self.jobs = 0  # that wait, and the one that runs
        self.closing = lambda: False  # whether the server is about to end

    def encode(self, prompt: Any) -> list[list[int]]:
        """The ids of one prompt or of several."""
        prompts = prompt if isinstance(prompt, list) and not is_ids(prompt) else [prompt]
        fits = all(isinstance(p, str) or is_ids(p) for p in prompts)
        accepted = f"a text, a list of token ids, or up to {MAX_PROMPTS} of these in a list"
        need(fits and len(prompts) <= MAX_PROMPTS, "prompt", accepted)
        bos = self.tokenizer.add_bos
        rows = [p if is_ids(p) else self.tokenizer.encode(p, bos) for p in prompts]
        for ids in rows:
            self.tokenizer.decode(llama2.check_prompt(self.model.config, ids, len(ids)))
        return rows

    def encode_chat(self, messages: Any, options: Body) -> list[int]:
        """The ids of a chat; the options get what ends its answer."""
        try:
            for message in messages:
                if isinstance(message["content"], list):
                    message["content"] = "\n".join(part["text"] for part in message["content"])
        except (TypeError, LookupError):
            raise ValueError("accepted is a list of objects with role and content") from None
        chat_format = self.chat_format or llama2.recognise_chat_format(self.chat_template)
        stop_ids, tags = llama2.chat_stops(self.tokenizer, chat_format)
        config = self.model.config
        options["stop_ids"] = {config.eos_token_id, *config.stop_token_ids, *stop_ids}
        options["stop"] += tags
        return llama2.encode_chat(self.tokenizer, messages, chat_format)

    def check(self, *_: Any) -> None:
        """Before each pass of the model: between tokens, and between the chunks of a prompt."""
        anyio.from_thread.check_cancelled()
        if self.closing():
            raise Refusal(503, "the server is shutting down")

    def take(self, ids: list[int]) -> llama2.Cache:
        """The cache that holds the most of a prompt, if that is half of it; else the oldest."""
        shared = {cache: llama2.common_prefix(held, ids) for cache, held in self.held.items()}
        best = max(shared, key=shared.__getitem__)
        cache = best if 2 * shared[best] >= len(ids) else next(iter(shared))
        self.held[cache] = self.held.pop(cache)
        return cache

    def score(self, ids: list[int], top: int, cache: llama2.Cache) -> list[llama2.Score]:
        """The scores of a prompt, whose first token has none; its last is not put in the cache."""
        scored = llama2.score(self.model, ids, top, cache)
        logprobs, top_logprobs, top_ids = (column.tolist() for column in scored)
        best = [list(zip(*row)) for row in zip(top_ids, top_logprobs)]
        return [llama2.Score(ids[0], None, []), *map(llama2.Score, ids[1:], logprobs, best)]

    def complete(self, job: Job) -> None:
        """Continue each prompt; what is to be streamed is sent in pieces."""
        choices, new_tokens, cached_tokens, top = [], 0, 0, job.options["top"]
        if job.chat and job.stream:
            job.send([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        for index, ids in enumerate(job.prompts):
            cache, scores, scored = self.take(ids), [], job.echo and top is not None
            rest = llama2.rewind(cache, [] if scored else self.held[cache], ids)
            cached_tokens, self.held[cache] = cached_tokens + len(ids) - len(rest), ids
            if scored:
                scores, rest = self.score(ids, top, cache), ids[-1:]
            prompt = "" if job.chat else self.tokenizer.decode(ids)
            options = {**job.options, "first": not prompt, "cache": cache}
            stream = llama2.stream_text(self.model, self.tokenizer, rest, **options)
            stream.report.scores = [scores]  # those of new tokens follow
            logprobs = Logprobs(self.tokenizer, scores, job.echo or not prompt)
            text, size = "", 0
            for part in itertools.chain([prompt] * job.echo, stream):
                part = part.lstrip() if job.chat and not size else part
                text, size = text + part, size + len(part)
                if job.stream and text:
                    job.send([job.choice(index, text, logprobs.take(size))])
                    text = ""
            self.held[cache] = ids + stream.report.new_ids[0]
            new_tokens += stream.report.new_tokens
            reason = stream.report.stop_reasons[0]
            table = logprobs.take(size + (not reason.startswith("stop text")))
            finish = "stop" if reason.startswith("stop") else "length"
            choices.append(job.choice(index, text, table, finish))
            if job.stream:
                job.send([choices.pop()])
        if not job.stream or job.include_usage:
            prompt_tokens = sum(map(len, job.prompts))
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens}
            usage["total_tokens"] = prompt_tokens + new_tokens
            job.send(choices, {**usage, "prompt_tokens_details": {"cached_tokens": cached_tokens}})


class Logprobs:
    """Scores as OpenAI's table, its tokens as texts that join to that of the choice."""

    def __init__(self, tokenizer: llama2.Tokenizer, scores: list[llama2.Score], first: bool):
        self.decoder, self.names = llama2.StreamDecoder(tokenizer, first), tokenizer.pieces
        self.scores, self.offset = scores, 0

    def take(self, end: int) -> Body:
        """Move the tokens that begin before character `end` from the scores to a table."""
        table: Body = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        while self.scores and self.offset < end:
            token_id, logprob, best = self.scores.pop(0)
            text, best = self.decoder.decode(token_id), [*best, (token_id, logprob)]
            top = {self.names[i].replace("\u2581", " "): p for i, p in best if i < len(self.names)}
            row = text, logprob, None if logprob is None else top, self.offset
            for column, value in zip(table.values(), row):
                column.append(value)
            self.offset += len(text)
        return table


def make_app(engine: Engine, api_key: bytes | None) -> Any:
    """The ASGI application."""
    tokenizer = engine.tokenizer

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
    add("--chat-format", choices=llama2.CHAT_FORMAT_NAMES, help="default: the model's own")
    try:
        args = parser.parse_args()
        engine = Engine(args.model, args.context, args.chat_format)
        listener = socket.create_server((args.host, args.port), backlog=1024)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else events wait 40 ms
    except (ValueError, OverflowError, OSError, MemoryError, RuntimeError) as error:
        print(f"server.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    silent = {"log_config": None, "log_level": "critical", "access_log": False}
    options = {"http": "h11", "ws": "none", "lifespan": "off", "timeout_graceful_shutdown": 3}
    server = uvicorn.Server(uvicorn.Config(make_app(engine, args.api_key), **options, **silent))
    engine.closing = lambda: server.should_exit

    async def serve() -> None:
        line = f"listening on http://{args.host}:{listener.getsockname()[1]}"
        asyncio.get_running_loop().call_soon(llama2.note, line)  # once it minds signals
        await server.serve([listener])

    with suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        asyncio.run(serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
