"""An HTTP server with OpenAI's interface: an example of llama2.py as a library.

    pip install starlette uvicorn
    python examples/server.py                                     # the small bundled model
    python examples/server.py --model llama-2-7b-chat.Q4_0.gguf   # the real thing

    curl http://127.0.0.1:8080/v1/chat/completions \\
        -d '{"messages": [{"role": "user", "content": "Hello"}], "stream": true}'

GET /health, /v1/models; POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize.

The event loop talks to clients. One thread beside it runs the model for one request after another,
in the order they came; the others wait in its queue. The caches of the last prompts are kept: of a
chat that goes on, only what is new is computed (its logits may differ in the last bits from those
of a prompt read at once). A client that hangs up ends its request before the model's next pass.
Many users at once are better served by llama.cpp's server or vLLM.
"""

import asyncio
import hmac
import json
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    import llama2
except ImportError as error:
    print(f"server.py: {error.name} is missing: pip install starlette uvicorn", file=sys.stderr)
    sys.exit(2)

MAX_BODY = 10**6  # bytes
MAX_WAITING = 64  # requests in the queue
MAX_PROMPTS = 128  # in one request
MAX_CACHES = 4  # that are kept: fewer if they would take more than CACHE_BYTES, but one at least
CACHE_BYTES = 2**32
BODY_SECONDS = 30  # for a body to arrive
CLOSING_SECONDS = 3  # for clients to read the rest, after SIGTERM
Body = dict[str, Any]
Test = Callable[[Any], bool]

# --------------------------------------------------------------------------------------------------
# Requests


class Refusal(Exception):
    """What a client gets instead of an answer; `param` names the field that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None, code: Any = None):
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        headers = {503: {"Retry-After": "2"}, 401: {"WWW-Authenticate": "Bearer"}}
        self.response = JSONResponse(self.body, status, headers.get(status))


def within(low: float, high: float, *types: type) -> Test:
    return lambda v: type(v) in types and low <= v <= high  # isinstance would take true for 1


def text(least: int = 0, most: float = math.inf) -> Test:
    return lambda v: isinstance(v, str) and least <= len(v) <= most


def items(accepts: Test, most: float = math.inf) -> Test:
    return lambda v: isinstance(v, list) and len(v) <= most and all(map(accepts, v))


def has(**tests: Test) -> Test:
    return lambda v: isinstance(v, dict) and all(test(v.get(name)) for name, test in tests.items())


def either(*tests: Test) -> Test:
    return lambda v: any(test(v) for test in tests)


is_ids = items(within(0, 2**63, int))
is_prompt = either(text(), is_ids)
is_part = has(type=lambda v: v == "text", text=text())
is_message = has(role=text(), content=either(text(), items(is_part)))
COUNT = "an integer from 0 to 2147483647", within(0, 2**31 - 1, int)
STOPS = "up to 16 texts of 1 to 256 characters", either(text(1, 256), items(text(1, 256), 16))
BOOL = "true or false", within(0, 1, bool)
PROMPTS = f"a text, a list of token ids, or up to {MAX_PROMPTS} of these in a list"
PRIVATE = ("messages", "prompt", "content", "tokens")  # fields that have no default, either
FIELDS: dict[str, tuple[Any, str, Test]] = {  # default, what is accepted
    "messages": (None, "a list of objects with role and content of text", items(is_message)),
    "prompt": (None, PROMPTS, either(is_prompt, items(is_prompt, MAX_PROMPTS))),
    "content": (None, "a text", text()),
    "tokens": (None, "a list of token ids", is_ids),
    "model": (None, "a text", text()),  # any: there is one
    "n": (1, "1", within(1, 1, int)),
    "max_tokens": (None, *COUNT),
    "max_completion_tokens": (None, *COUNT),
    "temperature": (1, "a number from 0 to 2", within(0, 2, int, float)),
    "top_p": (1, "a number from 0 to 1", within(0, 1, int, float)),
    "seed": (None, "an integer of 64 bits", within(-(2**63), 2**63 - 1, int)),
    "stop": ([], *STOPS),
    "stream": (False, *BOOL),
    "stream_options": ({}, "an object", has()),
    "include_usage": (False, *BOOL),
    "echo": (False, *BOOL),
    "logprobs": (None, "an integer from 0 to 5", within(0, 5, int)),
    "add_special": (False, *BOOL),
}


def get(body: Body, name: str) -> Any:
    """A field, or its default if it is absent or null. Other values are refused."""
    value, (default, accepted, accepts) = body.get(name), FIELDS[name]
    if value is None and name not in PRIVATE:
        return default
    if not accepts(value):
        found = f"a {type(value).__name__}" if name in PRIVATE else json.dumps(value)[:40]
        found = "missing" if value is None else found
        raise Refusal(400, f"{name} is {found}; accepted is {accepted}", name)
    return value


def parse(data: bytes) -> Body:
    """A body, which must be a JSON object in UTF-8."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)  # NaN and Infinity are Python's, not JSON's

    try:
        body = json.loads(data.decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # whose texts quote the body
        raise Refusal(400, f"the body is not JSON in UTF-8: {type(error).__name__}") from None
    if not isinstance(body, dict):
        raise Refusal(400, "the body is not an object")
    return body


@dataclass
class Piece:
    """A part of a choice."""

    index: int
    text: str = ""
    logprobs: dict[str, list] | None = None
    finish_reason: str | None = None


@dataclass(eq=False)
class Job:
    """A checked request for completions, and what comes of it."""

    chat: bool
    prompts: list[list[int]]
    options: dict[str, Any]  # of stream_text()
    echo: bool
    stream: bool
    include_usage: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    usage: dict[str, Any] = field(default_factory=dict)
    refusal: Refusal | None = None  # why it is to end early
    arrived: asyncio.Queue = field(default_factory=asyncio.Queue)  # from the model's thread

    async def pieces(self) -> AsyncIterator[Piece]:
        while (piece := await self.arrived.get()) is not None:
            if isinstance(piece, Refusal):
                raise piece
            yield piece


# --------------------------------------------------------------------------------------------------
# The model, and the one thread that runs it


class Engine:
    """A model with its tokenizer, caches and queue."""

    def __init__(self, path: Path, context: int | None, chat_format: str | None) -> None:
        checkpoint = llama2.open_checkpoint(path)
        if context is not None:
            checkpoint = checkpoint.allow_context(context)
        most = checkpoint.config.max_position_embeddings
        self.context = context or min(most, llama2.CHAT_CONTEXT)
        self.chat_format = chat_format or llama2.recognise_chat_format(checkpoint.chat_template)
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
        self.thread = ThreadPoolExecutor(1)
        self.jobs: dict[Job, Future] = {}
        self.closed: Refusal | None = None

    def encode(self, body: Body, chat: bool) -> list[list[int]]:
        """The prompts of a request. ValueError for messages that the chat format cannot have."""
        if chat:
            messages = get(body, "messages")
            for message in messages:
                if isinstance(message["content"], list):
                    message["content"] = "\n".join(part["text"] for part in message["content"])
            return [llama2.encode_chat(self.tokenizer, messages, self.chat_format)]
        prompts, bos = get(body, "prompt"), self.tokenizer.add_bos
        prompts = [prompts] if is_prompt(prompts) else prompts
        return [p if is_ids(p) else self.tokenizer.encode(p, bos) for p in prompts]

    def make_job(self, body: Body, chat: bool) -> Job:
        """Check a request and encode its prompts."""
        config, name = self.model.config, "messages" if chat else "prompt"
        limits = get(body, "max_completion_tokens"), get(body, "max_tokens")
        limit = next((n for n in limits if n is not None), self.context if chat else 16)
        stop_ids, tags = llama2.chat_stops(self.tokenizer, self.chat_format) if chat else ((), ())
        stop, seed = get(body, "stop"), get(body, "seed")
        options = {
            "max_new_tokens": limit,
            "temperature": get(body, "temperature"),
            "top_p": get(body, "top_p") or 1e-9,  # 0: the likeliest alone
            "seed": None if seed is None else seed % 2**63,
            "top": None if chat else get(body, "logprobs"),
            "stop": [*([stop] if isinstance(stop, str) else stop), *tags],
            "stop_ids": {config.eos_token_id, *config.stop_token_ids, *stop_ids},
        }
        get(body, "model"), get(body, "n")  # need no more than to be possible
        echo, stream = not chat and get(body, "echo"), get(body, "stream")
        usage = get(get(body, "stream_options"), "include_usage")
        try:
            prompts = self.encode(body, chat)
            for ids in prompts:
                self.tokenizer.decode(llama2.check_prompt(config, ids, len(ids)))
        except ValueError as error:
            raise Refusal(400, f"{name}: {error}", name) from None
        longest = max(map(len, prompts))
        if longest + min(limit, 1) > self.context:  # a new token needs a place
            found = f"{name} of {longest} tokens; the context holds {self.context} with the answer"
            raise Refusal(400, found, name, "context_length_exceeded")
        return Job(chat, prompts, options, echo, stream, usage)

    def tokenize(self, body: Body) -> Body:
        bos = get(body, "add_special") and self.tokenizer.add_bos
        ids = self.tokenizer.encode(get(body, "content"), bos)
        return {"tokens": ids, "count": len(ids)}

    def detokenize(self, body: Body) -> Body:
        try:
            return {"content": self.tokenizer.decode(get(body, "tokens"))}
        except ValueError as error:
            raise Refusal(400, f"tokens: {error}", "tokens") from None

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue, if there is room."""
        if self.closed or len(self.jobs) > MAX_WAITING:
            raise self.closed or Refusal(503, f"{MAX_WAITING} requests are waiting; try later")
        self.jobs[job] = future = self.thread.submit(self.run, job, asyncio.get_running_loop())
        future.add_done_callback(lambda _: self.jobs.pop(job))

    def stop(self, job: Job, refusal: Refusal) -> None:
        """End a job: at once if it waits, before the model's next pass if it runs."""
        job.refusal, future = refusal, self.jobs.get(job)
        if future and future.cancel():
            job.arrived.put_nowait(refusal)

    def close(self) -> None:
        """End all jobs and take no more."""
        self.closed = Refusal(503, "the server is shutting down")
        for job in list(self.jobs):
            self.stop(job, self.closed)

    def check(self, *_: Any) -> None:
        """Before each pass of the model: between tokens, and between the chunks of a prompt."""
        if self.job.refusal:
            raise self.job.refusal

    def run(self, job: Job, loop: asyncio.AbstractEventLoop) -> None:
        """What the thread does with a job."""
        self.job, end = job, None
        with suppress(RuntimeError):  # of a loop that is closed: nobody waits
            try:
                for piece in self.complete(job):
                    loop.call_soon_threadsafe(job.arrived.put_nowait, piece)
            except Refusal as refusal:
                end = refusal
            except Exception as error:  # noqa: BLE001 (memory that ran out, weights that are NaN)
                end = Refusal(500, f"the model failed: {type(error).__name__}")
            loop.call_soon_threadsafe(job.arrived.put_nowait, end)

    def take(self, ids: list[int]) -> llama2.Cache:
        """The cache that holds the most of a prompt, if that is half of it; else the oldest."""
        shared = {cache: llama2.common_prefix(held, ids) for cache, held in self.held.items()}
        best = max(shared, key=shared.__getitem__)
        cache = best if 2 * shared[best] >= len(ids) else next(iter(shared))
        self.held[cache] = self.held.pop(cache)
        return cache

    def complete(self, job: Job) -> Iterator[Piece]:
        """Read each prompt and continue it."""
        new_tokens, cached_tokens, top = 0, 0, job.options["top"]
        for index, ids in enumerate(job.prompts):
            cache, scored = self.take(ids), job.echo and top is not None
            rest = llama2.rewind(cache, [] if scored else self.held[cache], ids)
            cached_tokens, self.held[cache] = cached_tokens + len(ids) - len(rest), ids
            prompt = "" if job.chat else self.tokenizer.decode(ids)
            shown = Shown(self.tokenizer, top is not None, job.echo or not prompt)
            if scored:
                scores, rest = prompt_scores(self.model, ids, top, cache), ids[-1:]
            if job.echo:
                yield Piece(index, prompt, shown.take(scores if scored else []))
            options = {**job.options, "first": not prompt, "cache": cache}
            stream = llama2.stream_text(self.model, self.tokenizer, rest, **options)
            report, begun, sent = stream.report, not job.chat, len(prompt) * job.echo
            try:
                for text in stream:
                    text = text if begun else text.lstrip()
                    begun, sent = begun or text != "", sent + len(text)
                    if text:
                        yield Piece(index, text, shown.take(report.scores[0], sent))
            finally:
                self.held[cache] = [*ids, *report.new_ids[0]]
            reason = report.stop_reasons[0]
            end = sent if reason.startswith("stop text") else math.inf
            finish = "stop" if reason.startswith("stop") else "length"
            yield Piece(index, "", shown.take(report.scores[0], end), finish)
            new_tokens += report.new_tokens
        prompt_tokens = sum(map(len, job.prompts))
        job.usage = {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens}
        job.usage["total_tokens"] = prompt_tokens + new_tokens
        job.usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}


def prompt_scores(
    model: llama2.Llama, ids: list[int], top: int, cache: llama2.Cache
) -> list[llama2.Score]:
    """The scores of a prompt, whose first token has none. The cache then holds all but the last."""
    logprobs, top_logprobs, top_ids = (t.tolist() for t in llama2.score(model, ids, top, cache))
    best = [list(zip(*row)) for row in zip(top_ids, top_logprobs)]
    return [llama2.Score(ids[0], None, []), *map(llama2.Score, ids[1:], logprobs, best)]


class Shown:
    """`logprobs` of a choice, if wanted: its tokens as texts that join to its text."""

    def __init__(self, tokenizer: llama2.Tokenizer, wanted: bool, first: bool) -> None:
        self.tokenizer, self.wanted, self.offset = tokenizer, wanted, 0
        self.decoder = llama2.StreamDecoder(tokenizer, first)

    def name(self, token_id: int) -> str:
        """A token that was likely, too."""
        if token_id >= self.tokenizer.vocab_size:
            return f"[{token_id}]"
        data, token_type = self.tokenizer.piece(token_id)
        if token_type == llama2.BYTE:
            return f"bytes:\\x{data[0]:02x}"
        return data.decode() or self.tokenizer.sp.id_to_piece(token_id)

    def take(self, scores: list[llama2.Score], end: float = math.inf) -> Body | None:
        """Move the tokens that begin before character `end` from the scores to the columns."""
        if not self.wanted:
            return None
        columns = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        while scores and self.offset < end:
            token_id, logprob, best = scores.pop(0)
            text = self.decoder.decode(token_id)
            top = [(text if i == token_id else self.name(i), p) for i, p in best]
            top.append((text, logprob))  # in any case; of the same name twice, the likelier stays
            row = text, logprob, None if logprob is None else dict(reversed(top)), self.offset
            for column, value in zip(columns.values(), row):
                column.append(value)
            self.offset += len(text)
        return columns


# --------------------------------------------------------------------------------------------------
# HTTP


def reply(job: Job, model: str, pieces: list[Piece], **more: Any) -> Body:
    """The object that a client gets, whole or as a chunk of a stream."""
    choices = [dict(vars(piece)) for piece in pieces]
    for choice in choices if job.chat else []:
        role = {} if job.stream else {"role": "assistant"}
        choice["delta" if job.stream else "message"] = {**role, "content": choice.pop("text")}
    kind = ("chat.completion" + ".chunk" * job.stream) if job.chat else "text_completion"
    about = {"id": f"cmpl-{job.id}", "object": kind, "created": job.created, "model": model}
    return {**about, "choices": choices, **more}


async def events(job: Job, model: str) -> AsyncIterator[str]:
    """A reply as server-sent events."""
    usage = {"usage": None} if job.include_usage else {}

    def event(data: Body) -> str:
        return f"data: {json.dumps(data)}\n\n"

    try:
        if job.chat:
            first = reply(job, model, [Piece(0)], **usage)
            first["choices"][0]["delta"]["role"] = "assistant"
            yield event(first)
        async for piece in job.pieces():
            yield event(reply(job, model, [piece], **usage))
        if job.include_usage:
            yield event(reply(job, model, [], usage=job.usage))
    except Refusal as refusal:
        yield event(refusal.body)
    yield "data: [DONE]\n\n"


async def collect(job: Job) -> list[Piece]:
    """The choices of a reply, each of one piece."""
    choices: dict[int, Piece] = {}
    async for piece in job.pieces():
        choice = choices.setdefault(piece.index, piece)
        if choice is not piece:
            choice.text += piece.text
            choice.finish_reason = piece.finish_reason
            for name, column in (choice.logprobs or {}).items():
                column += piece.logprobs[name]
    return list(choices.values())


async def read(request: Request) -> bytes:
    """The body of a request, unless it is too large or too slow."""
    too_large = Refusal(413, f"the body is too large; accepted are {MAX_BODY} bytes")
    if int(request.headers.get("content-length", 0)) > MAX_BODY:
        raise too_large

    async def parts() -> bytes:
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > MAX_BODY:
                raise too_large
        return bytes(data)

    try:
        return await asyncio.wait_for(parts(), BODY_SECONDS)
    except (asyncio.TimeoutError, ClientDisconnect):  # noqa: UP041 (of Python 3.10)
        raise Refusal(408, f"the body did not arrive in {BODY_SECONDS} s") from None


def make_app(engine: Engine, api_key: bytes | None) -> Callable[..., Awaitable[None]]:
    """The ASGI application."""
    started = int(time.time())

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        model = {"id": engine.name, "object": "model", "created": started, "owned_by": "llama2.py"}
        return JSONResponse({"object": "list", "data": [model]})

    async def compute(request: Request, function: Callable[[Body], Any]) -> Any:
        """What a function makes of the body, beside the event loop."""
        data = await read(request)
        return await asyncio.to_thread(lambda: function(parse(data)))

    async def tokenize(request: Request) -> Response:
        return JSONResponse(await compute(request, engine.tokenize))

    async def detokenize(request: Request) -> Response:
        return JSONResponse(await compute(request, engine.detokenize))

    async def complete(request: Request) -> Response:
        chat = request.url.path == "/v1/chat/completions"
        job = await compute(request, lambda body: engine.make_job(body, chat))
        engine.submit(job)

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            engine.stop(job, Refusal(408, "the client has gone"))

        job.watcher = asyncio.create_task(watch())  # a task that nobody holds may vanish
        if job.stream:
            return StreamingResponse(events(job, engine.name), media_type="text/event-stream")
        choices = await collect(job)
        return JSONResponse(reply(job, engine.name, choices, usage=job.usage))

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):  # no such path, or not this method
            error = Refusal(error.status_code, error.detail)
        elif not isinstance(error, Refusal):
            error = Refusal(500, f"the server failed: {type(error).__name__}")
        return error.response

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/chat/completions", complete, methods=["POST"]),
    ]
    handlers = dict.fromkeys((Refusal, HTTPException, Exception), refuse)
    app = Starlette(routes=routes, exception_handlers=handlers)

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        right = hmac.compare_digest(given, b"Bearer " + (api_key or b""))
        wrong = Refusal(401, "the API key is missing or wrong", code="invalid_api_key").response
        await (app if right or scope["path"] == "/health" else wrong)(scope, receive, send)

    return app if api_key is None else guarded


class Server(uvicorn.Server):
    """Says when it listens; on SIGTERM it ends all jobs and returns."""

    def __init__(self, engine: Engine, api_key: bytes | None) -> None:
        silent = {"log_config": None, "log_level": "critical", "access_log": False}
        options = {"http": "h11", "ws": "none", "lifespan": "off", **silent}
        options["timeout_graceful_shutdown"] = CLOSING_SECONDS
        super().__init__(uvicorn.Config(make_app(engine, api_key), **options))
        self.engine = engine

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = sockets[0].getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"listening on http://{host}:{port}", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.should_exit = True
        self.engine.close()


def main() -> int:
    """Load the model and serve it; returns the exit status."""
    parser = llama2.Parser(prog="server.py", description="Serve a Llama 2 model.")
    add = parser.add_argument
    add("--model", metavar="PATH", type=Path, default=llama2.DEFAULT_MODEL)
    add("--host", default="127.0.0.1", help="default: %(default)s, for this machine alone")
    add("--port", type=int, default=8080, help="default: %(default)s; 0 finds a free one")
    add("--api-key", metavar="KEY", help="needed for all but /health")
    add("--context", metavar="N", type=int, help="tokens of a prompt and its answer at most")
    add("--chat-format", choices=llama2.CHAT_FORMAT_NAMES, help="default: the model's own")
    try:
        args = parser.parse_args()
        if args.api_key == "":
            parser.error("--api-key is empty")
        engine = Engine(args.model, args.context, args.chat_format)
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family, backlog=1024)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else events wait 40 ms
    except (ValueError, OverflowError, OSError, MemoryError, RuntimeError) as error:
        print(f"server.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    Server(engine, None if args.api_key is None else os.fsencode(args.api_key)).run([listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
