"""What stands between the network and the server. It knows nothing of models.

It refuses a wrong key and, if there is no key, pages of other sites, whose requests a browser would
send. If there are too many connections, idle ones are closed. Each request is a line of the log,
which holds neither what was asked nor what was answered, and no key.
"""

import re
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

# macOS allows a process 256 open files, Linux 1024. Of a burst, so many are accepted at once.
MAX_CONNECTIONS, BURST = 200, 32
REQUEST_SECONDS = 30  # in which a request must come, from its first byte to its last


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


def guard(
    app: Any,
    refuse: Callable[[Any, Exception], Any],
    refusal: type[Exception],
    say: Callable[[str], None],
    args: Any,
) -> Any:
    """Wrap an ASGI application. `refuse` turns a `refusal` of a request into a response.

    `args`: the command line's host, api_key and cors.
    """
    names = "|".join(map(re.escape, ("localhost", args.host, socket.gethostname())))
    names += r"|[\w.-]+\.(internal|local|localhost)"  # names that no public site can have
    own_name = re.compile(rf"({names}|[\d.]+|\[[\da-f:.]+\])(:\d+)?", re.IGNORECASE)

    def wrong(request: Request) -> Exception | None:
        """Why a request is refused."""
        head = request.headers
        if int(head.get("content-length", 0)) > app.max_body_size:  # before it is read
            return refusal(413, f"the body has more than {app.max_body_size:,} bytes")
        if args.api_key is not None:
            given = head.get("authorization", "").encode("latin-1")
            is_right = secrets.compare_digest(given, b"Bearer " + args.api_key)
            if is_right or request.url.path in ("/", "/health"):  # the page asks for the key
                return None
            return refusal(401, "the API key is wrong", code="invalid_api_key")
        host = head.get("host", "")
        origin = head.get("origin", "")
        if not own_name.fullmatch(host):  # a site may rebind its name to this machine
            return refusal(403, f"the host {host[:60]!r} is refused without --api-key")
        if origin not in ("", f"http://{host}", args.cors) and args.cors != "*":
            return refusal(403, f"the origin {origin[:60]!r} is refused without --cors")
        if head.get("content-type", "").startswith(("text/plain", "multipart/")):  # as forms send
            return refusal(415, "the content type must be application/json")
        return None

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        status = 0

        async def watched(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        request = Request(scope)
        error = wrong(request)
        response = refuse(request, error) if error else app
        try:
            await response(scope, receive, watched)
        finally:
            words = [scope["path"][:60], str(status), *scope.get("log", ())]
            say(f"{time.strftime('%H:%M:%S')} {ascii(' '.join(words))[1:-1]}")

    options = {"allow_origins": [args.cors], "allow_methods": ["*"], "allow_headers": ["*"]}
    return CORSMiddleware(guarded, **options) if args.cors else guarded
