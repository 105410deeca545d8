"""An HTTP server with OpenAI's interface: an example of llama2.py as a library.

    pip install "starlette>=1.6" "anyio>=4.2" uvicorn
    python examples/server --model llama-2-7b-chat.Q4_0.gguf   # without: the small bundled one
    curl http://127.0.0.1:8080/v1/completions -d '{"prompt": "Once upon a time"}'

The event loop talks to clients. A second thread runs the model (serving.py): each pass makes a token
for all answers that are written, and between two, a piece of a prompt is read. An answer is the one
that its request gets alone. The last KV caches are kept, so that only the new tokens of a conversation
are prefilled. A field that an answer cannot follow is refused by its name, or forgotten if it is a hint.

    __main__.py  the command line, the paths, the page (chat.html)
    guard.py     refuses other sites, errors, the log
    fields.py    the fields of a request
    answer.py    the response, whole or as events
    choice.py    one of its answers
    responses.py OpenAI's second interface
    tools.py     how the model calls tools and reasons
    serving.py   the model and its caches
    grammar.py   what holds an answer to a schema
"""

import argparse
import base64
import hashlib
import json
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import prelude

with prelude.imports(__name__, '"starlette>=1.6" "anyio>=4.2" uvicorn'):
    import anyio.to_thread
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    import llama2
    from server.answer import Job, until_gone
    from server.fields import refuse_rest, take
    from server.guard import BURST, Connection, Refusal, guard, refuse, say
    from server.responses import ResponseJob, Store
    from server.serving import PARALLEL, Session

MAX_BODY, TOKEN_BYTES = 10**6, 100  # of a body: at least, and for each token of the context
MAX_PREPARING, PREPARING_BYTES = 64, 2**26  # requests, before the model's turn
MESSAGES = "a list of messages with role, text as content, and functions as tool_calls"
PREPARERS = anyio.CapacityLimiter(2)  # threads
PREPARING: list[int] = []  # the sizes of all bodies for which this is still to be done


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


def prepare(take_body: Any, field: str, expected: str, data: bytes) -> Any:
    """What take_body() makes of a body, of which a field is what `expected` says. Raises Refusal."""
    try:
        # What no answer could quote: half a character, which UTF-8 cannot hold, becomes "?". NaN is
        # no JSON, nor is 1e999 a number, which Python reads as infinity.
        text = json.dumps(json.loads(data), ensure_ascii=False, allow_nan=False)
        items = json.loads(text.encode("utf-8", "replace")).items()
        body = {key: value for key, value in items if value is not None}
    except (ValueError, RecursionError, AttributeError):
        raise Refusal(400, "the body must be a JSON object, and its numbers finite") from None
    try:
        reply = take_body(body, field)
        refuse_rest(body)
        return reply
    except ValueError as error:
        raise Refusal(400, f"{field}: {error}", param=field) from error
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Refusal(400, f"{field}: expected {expected}", param=field) from error


async def post(handle: Any, request: Any) -> Any:
    """Answer what handle() makes of a body, unless the client hangs up. Two bodies at a time are
    prepared, apart from the model.
    """
    if request.headers.get("content-type", "").startswith(("text/plain", "multipart/")):
        raise Refusal(415, "the content type must be application/json")  # a form of another site
    data = await request.body()
    if len(PREPARING) >= MAX_PREPARING or sum(PREPARING) + len(data) > PREPARING_BYTES:
        raise Refusal(503, "too many requests come at once; try later")
    PREPARING.append(len(data))
    try:
        async with until_gone(request.receive, request.scope["log"]):
            return await anyio.to_thread.run_sync(handle, data, limiter=PREPARERS)
    finally:
        PREPARING.remove(len(data))
    return Response(status_code=499)  # for nobody


def make_app(session: Session, args: argparse.Namespace) -> Any:
    """The ASGI application."""
    model = {
        "id": session.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "llama2.py",
        "chat": session.has_template,  # if false, the page continues texts
    }

    def tokenize(body: dict, field: str) -> Response:
        bos = take(body, "add_special", False) and session.tokenizer.add_bos
        parse_special = take(body, "parse_special", session.parse_special)
        ids = session.tokenizer.encode(body.pop(field, None), bos, parse_special=parse_special)
        return JSONResponse({"tokens": ids, "count": len(ids)})

    def detokenize(body: dict, field: str) -> Response:
        return JSONResponse({"content": session.tokenizer.decode(body.pop(field, None))})

    store = Store()
    if not args.store:
        store.limit = 0

    def kept(request: Any) -> Response:
        response_id = f"resp_{request.path_params['id']}"
        if response_id not in store:
            raise Refusal(404, f"Response with id {response_id!r:.60} not found.")
        if request.method == "DELETE":
            del store[response_id]
            return JSONResponse({"id": response_id, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false") != "false":
            raise Refusal(400, "stream: what is kept comes whole", param="stream")
        return JSONResponse(store[response_id][0])

    complete = partial(Job, session)
    respond = partial(ResponseJob, store, session)
    fixed = {
        "/": open_page(),
        "/health": JSONResponse({"status": "ok"}),
        "/v1/models": JSONResponse({"object": "list", "data": [model]}),
        "/v1/models/{name:path}": JSONResponse(model),  # any name, as chats take it
    }
    posts = {
        "/v1/chat/completions": (complete, "messages", MESSAGES),
        "/v1/completions": (complete, "prompt", "text, token ids, or a list of either"),
        "/v1/responses": (respond, "input", "a text, or messages and other items"),
        "/tokenize": (tokenize, "content", "a text"),
        "/detokenize": (detokenize, "tokens", "token ids"),
    }
    routes = [Route(path, response, methods=["GET"]) for path, response in fixed.items()]
    routes.append(Route("/v1/responses/resp_{id}", kept, methods=["GET", "DELETE"]))
    for path, about in posts.items():
        routes.append(Route(path, partial(post, partial(prepare, *about)), methods=["POST"]))
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: refuse, Exception: refuse},
        max_body_size=max(MAX_BODY, TOKEN_BYTES * session.context),
    )
    return guard(app, args)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = llama2.Parser(prog="server", description=__doc__.partition(":")[0])
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
    add(
        "--cors",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="a site whose pages may use the server, or several by several options; *: any",
    )
    add("--context", metavar="N", type=number(int, 1), help="tokens of a prompt and its answer")
    add(
        "--parallel",
        metavar="N",
        type=number(int, 1, 64),
        help=f"answers at once, and conversations that are remembered (default: {PARALLEL}, if they fit)",
    )
    add("--threads", metavar="N", type=number(int, 1, 1024), help="CPU threads")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add(
        "--no-prompt-cache",
        dest="prompt_cache",
        action="store_false",
        help="read every prompt anew: neither times nor usage tell of others' prompts",
    )
    add(
        "--parse-special",
        action="store_true",
        help="the texts of control tokens in raw prompts are these tokens, as if each request had "
        '"parse_special": true: for clients that render the chat template themselves',
    )
    add(
        "--no-store",
        dest="store",
        action="store_false",
        help="keep no responses: each request to /v1/responses holds its whole conversation",
    )
    add("--quiet", action="store_true", help="no log of requests")
    return parser.parse_args()


def main() -> int:
    """Load the model and serve it; returns the exit status."""
    args = parse_args()
    with prelude.errors(llama2.Parser(prog="server")):
        llama2.use_threads(args.threads)
        session = Session(args)
        app = make_app(session, args)
        v6 = ":" in args.host  # of "::", all of IPv4, too
        family = socket.AF_INET6 if v6 else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family, dualstack_ipv6=v6)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else events wait 40 ms
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=Connection,
            backlog=BURST,
            ws="none",
            lifespan="off",
            log_level="critical",
            timeout_graceful_shutdown=3,
        )
    )
    session.is_closed = lambda: server.should_exit
    with suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if not session.has_template:
            say("the model has no chat template: llama-2 is assumed")
        host = f"[{args.host}]" if v6 else args.host
        passes = f"passes of up to {session.rows.size}" if session.rows.size > 1 else "turns"
        memory = f"caches of {session.cache_bytes / 1e9:.3g} GB for {session.context} tokens each"
        say(f"{session.parallel} answers at once, in {passes}; {memory}")
        say(f"listening on http://{host}:{listener.getsockname()[1]}")
        server.run([listener])
    server.should_exit = True  # also where Ctrl-C came before it ran
    session.wake.set()
    session.thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
