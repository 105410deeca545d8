"""An HTTP server with OpenAI's interface: an example of llama2.py as a library.

    pip install "starlette>=1.6" "anyio>=4.1" uvicorn
    python examples/server.py --model llama-2-7b-chat.Q4_0.gguf   # without: the small bundled one
    curl http://127.0.0.1:8080/v1/completions -d '{"prompt": "Once upon a time"}'

The event loop talks to clients. A second thread runs the model (serving.py): one request at a time,
in the order they came, each until its client hangs up. The last KV caches are kept, so that only the
new tokens of a conversation are prefilled. Fields that are not supported are refused by name.
guard.py refuses other sites.
"""

import argparse
import asyncio
import base64
import hashlib
import itertools
import json
import os
import re
import secrets
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
try:
    import anyio.from_thread
    import torch
    import uvicorn
    from guard import Connection, guard
    from serving import Adjustment, Score, Session
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    import llama2
except ImportError as error:
    needed = 'pip install "starlette>=1.6" "anyio>=4.1" uvicorn'
    print(f"server.py: {error.name} is missing: {needed}", file=sys.stderr)
    sys.exit(2)

MAX_BODY, MAX_PROMPTS, MAX_WAITING = 10**6, 128, 64  # bytes, prompts in a request, queued requests
TURN = anyio.Lock()  # to use the model: first come, first served
LIMITS = {
    "temperature": (0, 2),
    "top_k": (0, 2**31),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "seed": (-(2**63), 2**63 - 1),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "logprobs": (0, 20),
    "top_logprobs": (0, 20),
    "max_tokens": (0, 2**31 - 1),
    "max_completion_tokens": (0, 2**31 - 1),
}
# Fields that change nothing, and fields that may only have these values.
IGNORED = "user metadata store service_tier safety_identifier prompt_cache_key"
NEUTRAL = {
    "n": "1",
    "tools": "[]",
    "tool_choice": '"none" "auto"',
    "parallel_tool_calls": "false",
    "echo": "false",
    "top_logprobs": "0",
}


class Refusal(HTTPException):
    """An error for the client; `about` may hold OpenAI's `param` (the wrong field) and `code`."""

    def __init__(self, status: int, message: str, **about: str) -> None:
        super().__init__(status, message, {"Retry-After": "2"} if status == 503 else None)
        self.about = about


def refuse(request: Any, error: Any) -> Response:
    """An error in OpenAI's form. Its message is logged, too."""
    if not isinstance(error, HTTPException):  # its text may quote a prompt or a path
        error = Refusal(500, f"the server failed: {type(error).__name__}")
    if error.status_code == 404 and not isinstance(error, Refusal):
        paths = ", ".join(route.path for route in request.app.routes)
        error = Refusal(
            404,
            f"{request.url.path[:60]} does not exist; there are {paths}; "
            "in place of /v1/responses use /v1/chat/completions",
        )
    message = utf8(error.detail)
    if request is not None:
        request.scope["log"] = [message]
    error_type = "invalid_request_error" if error.status_code < 500 else "server_error"
    about = getattr(error, "about", {})
    body = {"message": message, "type": error_type, "param": None, "code": None, **about}
    return JSONResponse({"error": body}, error.status_code, error.headers)


def utf8(text: str) -> str:
    """The text with question marks for characters that UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


# --------------------------------------------------------------------------------------------------
# Requests


def take(body: dict, name: str, value_type: type, default: Any = None) -> Any:
    """Remove a field and return its value, or its default if it is absent or null."""
    value = body.pop(name, None)
    if value is None:
        return default
    fits = type(value) is value_type or (value_type is float and type(value) is int)  # no bool
    expected = value_type.__name__
    if name in LIMITS:
        low, high = LIMITS[name]
        fits = fits and low <= value <= high
        expected += f" from {low} to {high}"
    if not fits:
        raise Refusal(400, f"{name} is {json.dumps(value)[:40]}; expected {expected}", param=name)
    return value


def take_sampling(body: dict, vocab_size: int) -> llama2.Sampling:
    """The fields of Sampling and Adjustment. A seed may be negative."""
    values = {}
    for item in fields(llama2.Sampling):
        if item.name in LIMITS:
            values[item.name] = take(
                body, item.name, int if item.name == "seed" else type(item.default), item.default
            )
    if values["seed"] is not None:
        values["seed"] %= 2**63
    bias = torch.zeros(vocab_size)
    for key, value in take(body, "logit_bias", dict, {}).items():
        is_id = key.isdecimal() and len(key) < 10 and int(key) < vocab_size
        if not is_id or type(value) not in (int, float) or not -100 <= value <= 100:
            raise Refusal(
                400,
                f"logit_bias has {key[:20]!r}: {value!r:.20}; expected id: -100 to 100",
                param="logit_bias",
            )
        bias[int(key)] = value
    processor = Adjustment(
        bias,
        take(body, "presence_penalty", float, 0),
        take(body, "frequency_penalty", float, 0),
    )
    return llama2.Sampling(logits_processor=processor, **values)


def take_stops(body: dict) -> list[str]:
    """The stop texts."""
    stop = body.pop("stop", [])
    stops = stop if isinstance(stop, list) else [stop]
    if len(stops) > 16 or not all(isinstance(text, str) and 0 < len(text) <= 256 for text in stops):
        raise Refusal(
            400,
            f"stop is {json.dumps(stop)[:40]}; expected up to 16 texts of 1 to 256 characters",
            param="stop",
        )
    return stops


def take_schema(body: dict) -> dict[str, dict]:
    """`response_format` as schemas of a Grammar; {} if the answer may be any text."""
    form = take(body, "response_format", dict, {"type": "text"})
    if form == {"type": "text"}:
        return {}
    if form == {"type": "json_object"}:
        return {"": {"type": "object"}}
    match form:
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"": schema}
    raise Refusal(
        400,
        "response_format: expected type text, json_object, or json_schema with a schema",
        param="response_format",
    )


def take_calls(body: dict, tools: list) -> dict[str, dict]:
    """The tools of which one must be called, as schemas of a Grammar; {} if none must."""
    choice = body.pop("tool_choice", "auto")
    schemas = {}
    for tool in tools:
        match tool:
            case {"function": {"name": str(name), **function}}:
                if choice in ("required", {"type": "function", "function": {"name": name}}):
                    schema = function.get("parameters") or {"type": "object", "properties": {}}
                    schemas[f'{{"name": {json.dumps(name)}, "arguments": '] = schema
            case _:
                raise Refusal(
                    400,
                    f"tools has {json.dumps(tool)[:60]}; expected functions with names",
                    param="tools",
                )
    if not schemas and choice != "none":
        raise Refusal(
            400,
            f"tool_choice is {json.dumps(choice)[:60]}; expected required, a tool, or none",
            param="tool_choice",
        )
    return schemas


def check_messages(messages: Any) -> None:
    """Check messages; the role developer becomes system. Raises ValueError."""
    try:
        for message in messages:
            for key, value in message.items():
                if value and key not in ("role", "content", "name", "tool_calls", "tool_call_id"):
                    raise ValueError(f"{key[:40]} in a message is not supported")
            if message["role"] == "developer":
                message["role"] = "system"
            content = message.get("content")
            if isinstance(content, list):
                message["content"] = "\n".join(part["text"] for part in content)
            calls = message.get("tool_calls") or []
            for call in calls:
                function = call["function"]
                function["arguments"] = json.loads(function["arguments"])  # as templates take them
            if content is None and not calls:
                raise TypeError
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            "expected a list of messages with role, text as content, and functions as tool_calls"
        ) from error


def read_request(session: Session, name: str, reuse: bool, body: dict, field: str) -> "Job":
    """Take all supported fields out of a body; what remains in it is not supported.

    `field` holds the prompt. Raises Refusal, or ValueError for a wrong prompt.
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
    limit = take(body, "max_tokens", int, session.context if chat else 16)
    limit = take(body, "max_completion_tokens", int, limit)
    echo = not chat and take(body, "echo", bool, False)
    continued = chat and take(body, "continue_final_message", bool, False)
    tools = take(body, "tools", list, []) if chat else []
    calls = take_calls(body, tools) if tools else {}
    schemas = calls or take_schema(body)
    options = {
        "chat": chat,
        "strip": chat and not continued,
        "stop": take_stops(body),
        "max_new_tokens": limit,
        # A seed promises the same text, but rounding depends on how many tokens are prefilled at once.
        "reuse": reuse and take(body, "cache_prompt", bool, body.get("seed") is None),
        "sampling": take_sampling(body, session.model.vocab_size),
        "schemas": schemas,
        "score_prompt": echo and top is not None,
        "top": top,
    }
    body |= stream_options
    if schemas:
        param = "tools" if calls else "response_format"
        try:
            session.grammar(schemas, chat)
        except ValueError as error:
            raise Refusal(400, f"{param}: {error}", param=param) from error
    if chat:
        check_messages(prompt)
        prompts = [session.encode_chat(prompt, continued, tools)]
    else:
        prompts = session.encode(prompt)
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"there are {len(prompts)}; expected 1 to {MAX_PROMPTS}")
    longest = max(map(len, prompts))
    if longest + min(limit, 1) > session.context:
        raise Refusal(
            400,
            f"This model's maximum context length is {session.context} tokens, and {field} has "
            f"{longest}",  # clients look for OpenAI's words
            param=field,
            code="context_length_exceeded",
        )
    return Job(session, name, chat, prompts, stream, include_usage, echo, bool(calls), options)


def refuse_rest(body: dict) -> None:
    """Refuse the fields that remain, unless they change nothing."""
    for key, value in body.items():
        text = json.dumps(value)
        if key not in IGNORED.split() and text not in NEUTRAL.get(key, ""):
            raise Refusal(
                400, f"{key[:40]} is {text[:40]}, which is not supported", param=utf8(key[:40])
            )


# --------------------------------------------------------------------------------------------------
# Responses


@dataclass
class Job:
    """The response to a request, as an ASGI application."""

    session: Session
    model_name: str
    chat: bool
    prompts: list[list[int]]
    stream: bool
    include_usage: bool
    echo: bool
    is_call: bool  # the answer calls a tool
    options: dict[str, Any]  # of Session.start()
    replies: asyncio.Queue = field(default_factory=asyncio.Queue)  # ends with None
    log: list[str] = field(default_factory=list)
    call: str | None = ""  # the beginning of a call of a tool; None once its name is known

    def __post_init__(self) -> None:
        object_type = "text_completion"
        if self.chat:
            object_type = "chat.completion.chunk" if self.stream else "chat.completion"
        self.about = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": object_type,
            "created": int(time.time()),
            "model": self.model_name,
        }

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
            response = stream if self.stream else await self.replies.get()
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
        anyio.from_thread.run_sync(
            self.replies.put_nowait, JSONResponse({**self.about, "choices": choices, **usage})
        )

    def complete(self) -> None:
        """Continue the prompts, in the model's thread."""
        start = time.perf_counter()
        pairs = [self.complete_one(*pair) for pair in enumerate(self.prompts)]
        prompt_tokens = sum(map(len, self.prompts))
        new = sum(len(generation.new_ids) for _, generation in pairs)
        prefilled = sum(generation.prompt_tokens for _, generation in pairs)
        rate = new / (time.perf_counter() - start)
        cached = prompt_tokens - prefilled
        self.log.append(f"read {prefilled} + {cached} cached, made {new}, {rate:.1f} tokens/s")
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new,
            "total_tokens": prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        choices = [] if self.stream else [choice for choice, _ in pairs]
        if self.include_usage:
            self.reply(*choices, usage=usage)

    def complete_one(self, index: int, ids: list[int]) -> tuple[dict, llama2.Generation]:
        """Continue a prompt; returns its choice and the generation."""
        choice = {"index": index, "logprobs": None, "finish_reason": None}
        if self.chat and self.stream:
            self.reply(choice | {"delta": {"role": "assistant", "content": ""}})
        stream, scorer = self.session.start(ids, **self.options)
        before = [self.session.tokenizer.decode(ids)] if self.echo else []
        texts = []
        for text in itertools.chain(before, stream):
            if self.stream:
                self.reply(choice | self.content(text, scorer))
            else:
                texts.append(text)
        choice |= self.content("".join(texts), scorer)
        choice["finish_reason"] = "length"
        if stream.stop_reason.startswith("stop"):
            choice["finish_reason"] = "tool_calls" if self.call is None else "stop"
        if self.stream:
            self.reply(choice)
        return choice, stream.generation

    def content(self, text: str, scorer: Any) -> dict:
        """The fields of a choice for a text, with the log-probabilities of its tokens."""
        choice = {"logprobs": self.table(scorer.take(text))} if scorer else {}
        if not self.chat:
            return choice | {"text": text}
        message = {"content": text}
        if self.is_call:
            message = {"tool_calls": self.tool_calls(text)}
        if self.stream:
            return choice | {"delta": message}
        return choice | {"message": {"role": "assistant", "content": None} | message}

    def tool_calls(self, text: str) -> list[dict]:
        """The fields of a tool call for a text, once the tool's name is known."""
        if self.call is None:
            return [{"index": 0, "function": {"arguments": text}}]
        self.call += text
        head, comma, arguments = self.call.partition(', "arguments": ')
        if not comma:
            return []
        self.call = None
        function = {"name": json.loads(head + "}")["name"], "arguments": arguments}
        return [
            {
                "index": 0,
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": function,
            }
        ]

    def entries(self, score: Score) -> list[dict]:
        """A token, and then the likeliest ones in its place. No two have the same name."""
        tokenizer = self.session.tokenizer
        entries = {}
        for token_id, logprob in score.top.items():
            data = tokenizer.token_bytes(token_id)  # maybe only some bytes of a character
            name = score.text
            if entries:
                name = data.decode(errors="backslashreplace")
                name = tokenizer.vocabulary.pieces[token_id] if name in ("", *entries) else name
            entries[name] = {"token": name, "logprob": logprob, "bytes": [*data]}
        return [*entries.values()]

    def table(self, scores: list[Score]) -> dict:
        """Log-probabilities in OpenAI's form."""
        tokens = [self.entries(score) for score in scores]
        content = [{**token[0], "top_logprobs": token} for token in tokens if token]
        if self.chat:
            return {"content": content, "refusal": None}
        return {
            "content": content,  # has bytes: the names below do not tell </s> from text
            "tokens": [score.text for score in scores],
            "token_logprobs": [score.top.get(score.token_id) for score in scores],
            "top_logprobs": [  # nothing comes before a first token
                {e["token"]: e["logprob"] for e in token} or None for token in tokens
            ],
            "text_offset": [score.start for score in scores],
        }


# --------------------------------------------------------------------------------------------------
# The application


def open_page() -> Response:
    """The page, which may run its own script and send requests to this server, and nothing else."""
    text = Path(__file__).with_name("chat.html").read_text("utf-8")
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    policy += "connect-src 'self'; img-src data:; require-trusted-types-for 'script'"
    for tag, content in re.findall(r"<(script|style)>(.*?)</", text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        policy += f"; {tag}-src 'sha256-{digest}'"
    return HTMLResponse(
        text,
        headers={
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


async def post(handle: Any, field: str, request: Any) -> Any:
    """Answer a body by `handle`."""
    try:
        body = {k: v for k, v in (await request.json()).items() if v is not None}
    except (ValueError, RecursionError, AttributeError) as error:
        raise Refusal(400, "the body must be a JSON object") from error
    try:
        reply = await anyio.to_thread.run_sync(handle, body, field)
        refuse_rest(body)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Refusal(400, f"{field}: {error}", param=field) from error
    return reply


def make_app(session: Session, name: str, args: argparse.Namespace) -> Any:
    """The ASGI application."""
    model = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "llama2.py",
        "chat": session.has_template,  # if false, the page continues texts
    }

    def get_model(request: Any) -> Response:
        if request.path_params["id"] != name:
            raise Refusal(
                404,
                f"{request.path_params['id'][:60]!r} does not exist; the model is {name!r}",
                code="model_not_found",
            )
        return JSONResponse(model)

    def tokenize(body: dict, field: str) -> Response:
        bos = take(body, "add_special", bool, False) and session.tokenizer.add_bos
        ids = session.tokenizer.encode(body.pop(field, None), bos)
        return JSONResponse({"tokens": ids, "count": len(ids)})

    def detokenize(body: dict, field: str) -> Response:
        return JSONResponse({"content": session.tokenizer.decode(body.pop(field, None))})

    complete = partial(read_request, session, name, args.prompt_cache)
    routes = [
        Route("/", open_page()),
        Route("/health", JSONResponse({"status": "ok"})),
        Route("/v1/models", JSONResponse({"object": "list", "data": [model]})),
        Route("/v1/models/{id:path}", get_model),
    ]
    for path, handle, prompt in (
        ("/v1/chat/completions", complete, "messages"),
        ("/v1/completions", complete, "prompt"),
        ("/tokenize", tokenize, "content"),
        ("/detokenize", detokenize, "tokens"),
    ):
        routes.append(Route(path, partial(post, handle, prompt), methods=["POST"]))
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: refuse, Exception: refuse},
        max_body_size=MAX_BODY,
    )
    return guard(app, refuse, Refusal, (lambda text: None) if args.quiet else say, args)


def say(text: str) -> None:
    """A line on stderr, if it can be written to."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = llama2.Parser(description="Serve a Llama model.")
    add = parser.add_argument
    number = llama2.in_range
    add("--model", metavar="MODEL", default=llama2.DEFAULT_MODEL)
    add(
        "--chat-template",
        metavar="NAME|FILE",
        help=f"{', '.join(llama2.CHAT_TEMPLATES)}, or a file in Jinja (default: the model's)",
    )
    add("--host", default="127.0.0.1", help="default: %(default)s, for this machine")
    add(
        "--port",
        type=number(int, 0, 65535),
        default=8080,
        help="default: %(default)s; 0: a free one",
    )
    add(
        "--api-key",
        metavar="KEY",
        type=os.fsencode,
        help="required for every path but / and /health",
    )
    add("--cors", metavar="ORIGIN", help="a site whose pages may use the server; *: any")
    add("--context", metavar="N", type=number(int, 1), help="tokens of a prompt and its answer")
    add("--threads", metavar="N", type=number(int, 1, 1024), help="CPU threads")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add(
        "--no-prompt-cache",
        dest="prompt_cache",
        action="store_false",
        help="read every prompt anew: neither times nor usage tell of others' prompts",
    )
    add("--quiet", action="store_true", help="no log of requests")
    return parser.parse_args()


def main() -> int:
    """Load the model and serve it; returns the exit status."""
    args = parse_args()
    try:
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        session = Session(args)
        path = Path(args.model).absolute()
        name = utf8(path.name.removesuffix(".gguf") if path.exists() else args.model)
        app = make_app(session, name, args)
        listener = socket.create_server((args.host, args.port))
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        say(f"server.py: error: {utf8(str(error))}")
        return 2
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else events wait 40 ms
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_level="critical",
            timeout_graceful_shutdown=3,
        )
    )

    def check() -> None:
        anyio.from_thread.check_cancelled()
        if server.should_exit:
            raise Refusal(503, "the server is shutting down")

    session.check = check
    with suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if not session.has_template:
            say("the model has no chat template: llama-2 is assumed")
        say(f"listening on http://{args.host}:{listener.getsockname()[1]}")
        server.run([listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
