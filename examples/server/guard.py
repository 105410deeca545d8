"""What stands between the network and the server. It knows nothing of models.

It refuses a wrong key and, if there is no key, pages of other sites, whose requests a browser would
send. Errors have OpenAI's form. If there are too many connections, idle ones are closed. Each request
is a line of the log, which holds neither what was asked nor what was answered, and no key.
"""

import re
import secrets
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

# macOS allows a process 256 open files, Linux 1024. Of a burst, so many are accepted at once.
MAX_CONNECTIONS, BURST = 200, 32
REQUEST_SECONDS = 30  # in which a request must come, from its first byte to its last


class Refusal(HTTPException):
    """An error for the client; `about` may hold OpenAI's `param` (the wrong field) and `code`."""

    def __init__(self, status: int, message: str, **about: str) -> None:
        super().__init__(status, message, {"Retry-After": "2"} if status == 503 else None)
        self.about = about


def refuse(request: Request, error: Any) -> JSONResponse:
    """An error in OpenAI's form. The log has no message that may quote the request."""
    if not isinstance(error, HTTPException):  # its text may quote a prompt or a path
        error = Refusal(500, f"the server failed: {type(error).__name__}")
    if error.status_code == 404 and not isinstance(error, Refusal):
        paths = ", ".join(route.path for route in request.app.routes)
        error = Refusal(404, f"{request.url.path[:60]} does not exist; there are {paths}")
    if error.status_code == 405:
        error.detail = f"{request.method} is not for {request.url.path[:60]}; expected "
        error.detail += error.headers["Allow"]
    about = getattr(error, "about", {})
    said = about.get("param", "") if error.status_code == 400 else error.detail
    request.scope["log"].append(said)
    error_type = "invalid_request_error" if error.status_code < 500 else "server_error"
    body = {"message": error.detail, "type": error_type, "param": None, "code": None, **about}
    return JSONResponse({"error": body}, error.status_code, error.headers)


class Connection(H11Protocol):
    """One that waits too long for a request, or for the rest of one, is closed. If there are too many
    connections, so is the one that waits longest.
    """

    timer: Any = None  # while it waits, and is therefore idle

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.wait()
        if len(self.connections) > MAX_CONNECTIONS - BURST:
            idle = [connection for connection in self.connections if connection.timer]
            longest = min(idle, key=lambda connection: connection.timer.when())
            longest.transport.abort()
            self.connections.remove(longest)  # so that it is not chosen again

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.wait()

    def wait(self) -> None:
        """Begin to wait, unless a whole request is here and has no answer yet."""
        cycle = self.cycle
        if not cycle or cycle.more_body or cycle.response_complete:
            self.timer = self.timer or self.loop.call_later(REQUEST_SECONDS, self.transport.close)
        elif self.timer:
            self.timer.cancel()
            self.timer = None


def say(text: str) -> None:
    """A line on stderr, if it can be written to."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def guard(app: Any, args: Any) -> Any:
    """Wrap an ASGI application. `args`: the command line's host, api_key, cors and quiet."""
    names = "|".join(map(re.escape, ("localhost", args.host, socket.gethostname())))
    names += r"|[\w.-]+\.(internal|local|localhost)"  # names that no public site can have
    sites = [site.rstrip("/") for site in args.cors]
    own_name = re.compile(rf"({names}|[\d.]+|\[[\da-f:.]+\])(:\d+)?", re.IGNORECASE)

    def wrong(request: Request) -> Exception | None:
        """Why a request is refused."""
        head = request.headers
        if int(head.get("content-length", 0)) > app.max_body_size:  # before it is read
            return Refusal(413, f"the body has more than {app.max_body_size:,} bytes")
        if args.api_key is not None:
            given = head.get("authorization", "").encode("latin-1")
            is_right = secrets.compare_digest(given, b"Bearer " + args.api_key)
            if is_right or request.url.path in ("/", "/health"):  # the page asks for the key
                return None
            return Refusal(401, "the API key is wrong", code="invalid_api_key")
        host = head.get("host", "")
        origin = head.get("origin", "")
        if not own_name.fullmatch(host):  # a site may rebind its name to this machine
            return Refusal(403, f"the host {host[:60]!r} is refused without --api-key")
        own = "", f"http://{host}", f"https://{host}"  # by a proxy
        if origin not in (*own, *sites) and "*" not in sites:
            return Refusal(403, f"the origin {origin[:60]!r} is refused without --cors")
        return None

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        status = 0
        scope["log"] = log = []
        long = f"/v1{scope['path']}"
        if any(route.path_regex.match(long) for route in app.routes):
            scope["path"] = long

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = b"x-request-id", secrets.token_hex(12).encode()
                message = message | {"headers": [*message["headers"], name]}
            await send(message)

        request = Request(scope)
        error = wrong(request)
        response = refuse(request, error) if error else app
        try:
            await response(scope, receive, watched)
        finally:
            if not args.quiet:
                words = [scope["path"][:60], str(status), *log]
                say(f"{time.strftime('%H:%M:%S')} {ascii(' '.join(words))[1:-1]}")

    if sites:
        return CORSMiddleware(guarded, sites, allow_methods=["*"], allow_headers=["*"])
    return guarded
