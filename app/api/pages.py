"""The console: a few files of this package on the admin port, served without a token.

They hold no data. What the page shows it asks of `/admin/v1` with the token that a person types, so without one it
shows nothing; and the headers below let it load nothing and talk to nobody but this server.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Final, NamedTuple

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api import errors, media

BASE: Final = "/console/"
KINDS: Final[Mapping[str, str]] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class Page(NamedTuple):
    """One file, and its media type."""

    body: bytes
    kind: str


def read_pages() -> dict[str, Page]:
    """The files by path; the page itself is `BASE`. Raises FileNotFoundError where the package came without them."""
    found = {
        one.name: Page(one.read_bytes(), KINDS[one.name.rpartition(".")[2]])
        for one in files("app.api").joinpath("console").iterdir()
        if one.name.rpartition(".")[2] in KINDS
    }
    if "index.html" not in found:
        raise FileNotFoundError("app/api/console/index.html")
    found[""] = found.pop("index.html")
    return {BASE + name: page for name, page in found.items()}


class Console:
    """Answers what lies under /console, and leaves everything else to the application. Its files are read once."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._pages = read_pages()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path in {"/", "/console"} or path.startswith(BASE)):
            await self.app(scope, receive, send)
            return
        await self._reply(scope, path)(scope, receive, send)

    def _reply(self, scope: Scope, path: str) -> Response:
        if scope["method"] != "GET":
            return self._refuse(scope, errors.MethodNotAllowed("this path has other methods"))
        if not path.startswith(BASE):
            return Response(None, 307, {"location": "console/"})  # relative: it may lie under a proxy's prefix
        page = self._pages.get(path)
        if page is None:
            return self._refuse(scope, errors.NotFound("no such path"))
        return Response(page.body, 200, HEADERS, page.kind)

    def _refuse(self, scope: Scope, error: errors.NotFound | errors.MethodNotAllowed) -> Response:
        scope["widebeam"].error = error
        allow = "GET, HEAD" if isinstance(error, errors.MethodNotAllowed) else None
        return errors.reply(error, media.header(scope["headers"], b"accept"), allow)
