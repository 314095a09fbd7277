"""An HTTP request to an ASGI application of this process, without a socket."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Scope, Send

from app.runtime.messages import Fetch, Fetched


def fetch_of(number: int, scope: Scope) -> Fetch:
    """An ASGI scope as a message; a body is left where it is."""
    path, raw = scope["path"], scope.get("raw_path") or scope["path"].encode()
    return Fetch(number, scope["method"], path, raw, scope["query_string"], tuple(scope["headers"]))


async def fetch(app: ASGIApp, asked: Fetch) -> Fetched:
    """The application's response, as a whole. Such an application ends with a response, whatever happens in it."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "method": asked.method,
        "path": asked.path,
        "raw_path": asked.raw_path,
        "query_string": asked.query,
        "headers": list(asked.headers),
        "client": None,
        "server": None,
    }
    collected = _Collected()
    await app(scope, _no_body, collected.send)
    return Fetched(asked.number, collected.status, tuple(collected.headers), b"".join(collected.body))


async def respond(found: Fetched, send: Send) -> None:
    """Give a fetched response on."""
    await send({"type": "http.response.start", "status": found.status, "headers": list(found.headers)})
    await send({"type": "http.response.body", "body": found.body})


class _Collected:
    def __init__(self) -> None:
        self.status, self.headers, self.body = 500, list[tuple[bytes, bytes]](), list[bytes]()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
        elif message["type"] == "http.response.body":
            self.body.append(message.get("body", b""))


async def _no_body() -> Message:
    return {"type": "http.disconnect"}
