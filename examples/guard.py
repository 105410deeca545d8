"""What stands between the network and server.py; nothing in it knows of models.

Refused are a wrong key and, as long as there is none, pages of other sites: a browser would send
what they ask for. Of too many connections, idle ones are closed. Each request is a line of the log.
"""

import functools
import re
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS, IDLE_SECONDS = 200, 60  # macOS allows a process 256 open files, Linux 1024


class Connection(H11Protocol):
    """Of too many connections, the oldest one that waits for no answer is closed."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.since = self.loop.time()
        self.loop.call_later(IDLE_SECONDS, lambda: self.cycle or transport.abort())
        if len(self.connections) > MAX_CONNECTIONS:
            self.say_once(f"more than {MAX_CONNECTIONS} connections: idle ones are closed")
            min(
                filter(Connection.is_idle, self.connections), key=lambda c: c.since
            ).transport.abort()

    def is_idle(self) -> bool:
        """Whether it has sent no whole request, or has its answer."""
        return not self.cycle or self.cycle.more_body or self.cycle.response_complete


def guard(
    app: Any,
    respond: Callable[[Exception], Any],
    refusal: type[Exception],
    say: Callable[[str], None],
    host: str,
    key: bytes | None,
    cors: str | None,
) -> Any:
    """An ASGI application around another. `respond` makes a response of a `refusal`."""
    Connection.say_once = staticmethod(functools.cache(say))
    names = "|".join(map(re.escape, ("localhost", host, socket.gethostname())))
    own_name = re.compile(rf"({names}|[\d.]+|\[[\da-f:.]+\])(:\d+)?", re.IGNORECASE)

    def wrong(path: str, head: dict[bytes, str]) -> Exception | None:
        """Why a request is refused."""
        host, origin, kind = (head.get(name, "") for name in (b"host", b"origin", b"content-type"))
        if key is not None:
            given = head.get(b"authorization", "").encode("latin-1")
            right = path == "/health" or secrets.compare_digest(given, b"Bearer " + key)
            return None if right else refusal(401, "the API key is wrong", code="invalid_api_key")
        if not own_name.fullmatch(host):  # a page may rebind its name to this machine
            return refusal(403, f"the host {host[:60]!r} is refused without --api-key")
        if origin not in ("", f"http://{host}", cors) and cors != "*":
            return refusal(403, f"the origin {origin[:60]!r} is refused without --cors")
        if kind.startswith(("text/plain", "multipart/")):  # which forms can send
            return refusal(415, "the content type must be application/json")
        return None

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        status = 0

        async def watched(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        head = {name: value.decode("latin-1") for name, value in scope["headers"]}
        error = wrong(scope["path"], head)
        try:
            await (respond(error) if error else app)(scope, receive, watched)
        finally:
            path = ascii(scope["path"][:60])[1:-1]
            say(" ".join((time.strftime("%H:%M:%S"), path, str(status), *scope.get("log", ()))))

    options: Any = {"allow_origins": [cors], "allow_methods": ["*"], "allow_headers": ["*"]}
    return CORSMiddleware(guarded, **options) if cors else guarded
