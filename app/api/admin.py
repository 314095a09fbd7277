"""The admin application: its own port, its own tokens, nothing without one."""

from __future__ import annotations

import hmac
import ipaddress
import os
from pathlib import Path
from typing import Final, Literal, Protocol
from urllib.parse import urlsplit

from fastapi import APIRouter, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api import errors, media, openapi
from app.api.health import Readiness
from app.config import read_small
from app.runtime.logs import Log
from app.runtime.metrics import Metrics

Right = Literal["read", "write"]
READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_TOKEN_FILE: Final = 64 * 1024


def parse_tokens(text: str) -> dict[bytes, Right]:
    """Lines `read TOKEN` or `write TOKEN`; empty lines and `#` comments are skipped.

    A token listed twice keeps its lesser right. Raises ValueError with the line's number, never with the token.
    """
    if len(text) > MAX_TOKEN_FILE:
        raise ValueError(f"more than {MAX_TOKEN_FILE} bytes")
    tokens: dict[bytes, Right] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not words[1].isascii():
            raise ValueError(f"line {number}: expected `read TOKEN` or `write TOKEN`")
        if words[0] not in {"read", "write"}:
            raise ValueError(f"line {number}: expected `read` or `write` first")
        right: Right = "write" if words[0] == "write" and tokens.get(words[1].encode()) != "read" else "read"
        tokens[words[1].encode()] = right
    return tokens


class Tokens:
    """The tokens of a file, read again when it changes. A file that is missing or has a bad line gives no tokens at
    all: a half-written file must not leave an old token valid, and must not let anybody in."""

    def __init__(self, file: Path | None, log: Log, root: Path | None = None) -> None:
        """root: of the deployment; a file that is named as one below it is not opened where links lead out of it."""
        self._file = file
        self._root = root if root is not None and file is not None and _is_named_below(file, root) else None
        self._log = log
        self._seen: tuple[int, ...] | None = None
        self._tokens: dict[bytes, Right] = {}

    def right_of(self, token: bytes) -> Right | None:
        """What a token allows; None = nothing. Compares with every token, in constant time each."""
        found: Right | None = None
        for known, right in self._current().items():
            if hmac.compare_digest(known, token):
                found = right
        return found

    def _current(self) -> dict[bytes, Right]:
        if self._file is None:
            return {}
        seen: tuple[int, ...] = ()
        try:
            stat = self._file.stat()
            seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        except OSError:
            pass  # reading it says why
        if seen != self._seen:
            self._seen, self._tokens = seen, self._read(self._file)
        return self._tokens

    def _read(self, file: Path) -> dict[bytes, Right]:
        try:
            return parse_tokens(read_small(file, MAX_TOKEN_FILE + 1, self._root).decode())
        except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
            self._log.warning("admin_tokens_unusable", file=str(file), reason=_reason(error))
            return {}


def _is_named_below(file: Path, folder: Path) -> bool:
    """By its name alone, whatever links do: `..` is followed, links are not."""
    return Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder))  # noqa: PTH100  `absolute` keeps `..`


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    return error.strerror or "unreadable" if isinstance(error, OSError) else str(error)


class AdminAuth:
    """Lets a request through that bears a token with the right for its method. It wraps the whole application, so a
    route cannot forget it, and paths that do not exist are no secret to be probed."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self.app = app
        self.tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "http":
            refusal = self._refusal(scope)
            if refusal is not None:
                scope["widebeam"].error = refusal
                await errors.reply(refusal, media.header(scope["headers"], b"accept"))(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> errors.Unauthorized | errors.Forbidden | None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        right = self.tokens.right_of(token.strip()) if kind.lower() == b"bearer" else None
        if right is None:
            return errors.Unauthorized("a token is needed: `Authorization: Bearer TOKEN`")
        if right == "read" and scope["method"] not in READS:
            return errors.Forbidden("this token may only read")
        return None


class SameOrigin:
    """Without tokens the admin port trusts this machine, and a browser on it runs other people's pages. So a request
    must name this machine, not a name that somebody's DNS leads here, and must not come from another site's page."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "http" and not self._own(scope["headers"]):
            refusal = errors.Forbidden("this admin port has no tokens: it answers this machine's own requests only")
            scope["widebeam"].error = refusal
            await errors.reply(refusal, media.header(scope["headers"], b"accept"))(scope, receive, send)
            return
        await self.app(scope, receive, send)

    @staticmethod
    def _own(headers: media.Headers) -> bool:
        host = media.header(headers, b"host")
        origin = media.header(headers, b"origin")
        site = media.header(headers, b"sec-fetch-site")
        if origin and _host_of(origin) != host:
            return False
        return _names_an_address(host) and site in {"", "same-origin", "none"}


def _host_of(origin: str) -> str | None:
    """Host and port of an Origin header; None where it has none (`null`, and what no browser writes)."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _names_an_address(host: str) -> bool:
    """Whether a Host header is `localhost` or an IP address: no DNS answer can be behind it."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


class HasStatus(Protocol):
    """Whoever knows the whole state of the server: the front door, or what steers it."""

    def status(self) -> dict[str, object]:
        """The document of `GET /admin/v1/status`."""


def routes(front: HasStatus, readiness: Readiness, metrics: Metrics) -> APIRouter:
    """The admin routes, without their prefix."""
    router = APIRouter()

    async def status() -> Response:
        """The whole state of this server in one document."""
        document = {"counters": metrics.counters(), **front.status()}
        reasons = readiness.reasons()
        document |= {"ready": not reasons, "reasons": list(reasons)}
        headers = {"cache-control": "no-store"}
        if "epoch" in document:
            headers["etag"] = f'"{document["epoch"]}"'
        return Response(media.ENCODE[media.JSON](document), 200, headers, media.JSON)

    described = openapi.operation("status", tag="admin", answers={200: dict}, errors=(401, 403))
    router.add_api_route("/status", status, **described)
    return router
