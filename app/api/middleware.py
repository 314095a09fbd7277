"""What happens around every request: an id, one log line, a bounded body, and the last word on errors.

Pure ASGI: a middleware that wraps request and response objects hides `http.disconnect`, and a client that left would
keep its beams running.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import UNSET, UnsetType
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import errors, media, wire
from app.api.health import Readiness
from app.api.protocol import CLIENT, WHOLE, Client
from app.errors import Draining, Fault, WidebeamError, let_go
from app.runtime.logs import Line, Log

SAFE_ID: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
QUIET: Final = frozenset({
    "/livez", "/readyz", "/v2/health/live", "/v2/health/ready", "/metrics", "/status", "/events"
})  # fmt: skip
"""Probes, and what a console asks every other second: their lines are written at level debug."""


class RequestLine(Line, kw_only=True):
    """The one line of a request: no user data, no ids of items. Handlers fill it in; what stays UNSET is not in it."""

    event: str = "request"
    request_id: str
    method: str
    route: str = "unmatched"
    status: int | None = None
    outcome: str = "ok"
    code: str | UnsetType = UNSET
    ms: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    k: int | UnsetType = UNSET
    items: int | UnsetType = UNSET
    versions: wire.Versions | UnsetType = UNSET
    timings_ms: wire.Timings | UnsetType = UNSET
    batch: wire.BatchInfo | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    load: str | UnsetType = UNSET
    arms: Mapping[str, str] | UnsetType = UNSET
    unknown: wire.Unknown | UnsetType = UNSET


FACTS: Final = tuple(name for name in RequestLine.__struct_fields__ if name not in Line.__struct_fields__)


class Record:
    """What is known about one request by the end of it; `scope["widebeam"]`. Handlers add to it.

    client: of the connection; of one that never leaves where the server does not tell
    facts: called before the line is written, to fill in what the answer need not wait for
    """

    def __init__(self, request_id: str, method: str, client: Client | None = None) -> None:
        self.line = RequestLine(request_id=request_id, method=method)
        self.method = method
        self.header_id = request_id.encode()
        self.error: WidebeamError | None = None
        self.facts: Callable[[], None] = _nothing_more
        self.client = client or Client()

    def rename(self, request_id: str) -> None:
        """Take the body's request id. It may hold anything, so the response's header takes it only where it is safe."""
        self.line.request_id = request_id
        if SAFE_ID.fullmatch(request_id.encode()):
            self.header_id = request_id.encode()


def request_id(headers: media.Headers) -> str:
    """The client's `x-request-id` where it is short and plain, else one of our own. Never used as a key."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    return given.decode("ascii") if SAFE_ID.fullmatch(given) else uuid.uuid4().hex


def _nothing_more() -> None:
    """See `Record`."""


class Edge:
    """The outermost layer: request id, canonical log line, `Connection: close` while leaving; nothing escapes it."""

    def __init__(self, app: ASGIApp, readiness: Readiness, log: Log, clock: Callable[[], float]) -> None:
        self.app = app
        self.readiness = readiness
        self.log = log
        self.clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await Exchange(self, scope, receive, send).run()


class Exchange:
    """One request on its way through the Edge."""

    def __init__(self, edge: Edge, scope: Scope, receive: Receive, send: Send) -> None:
        self._edge = edge
        self.record = Record(request_id(scope["headers"]), scope["method"], scope.get(CLIENT))
        # HEAD is GET without a body: the server drops it by its own scope, so the application needs a copy
        self._scope = scope = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        self._receive = receive
        self._send = send
        self._start = edge.clock()
        scope["widebeam"] = self.record

    async def run(self) -> None:
        """Run the app; whatever it raises has been, or is now, answered."""
        try:
            await self._edge.app(self._scope, self._receive, self.send)
        except asyncio.CancelledError:  # the server's grace period ended; this task has nothing else to do
            await self._fail(Draining("the server stopped before the answer was ready", retry_after_s=1))
        except Exception as error:  # noqa: BLE001  the last place that can answer and log it
            await self._fail(errors.known(error))
        finally:
            self._write()
            self._let_go()

    async def _fail(self, error: WidebeamError) -> None:
        self.record.error = self.record.error or error
        if self.record.line.status is None:
            accept = media.header(self._scope["headers"], b"accept")
            await errors.reply(error, accept)(self._scope, self._receive, self.send)

    async def send(self, message: Message) -> None:
        """Pass a message on, with our headers on the first."""
        record = self.record
        if message["type"] == "http.response.start":
            record.line.status = message["status"]
            headers = [*message["headers"], (b"x-request-id", record.header_id)]
            if self._edge.readiness.leaving:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            record.line.bytes_out += len(message.get("body", b""))
        await self._send(message)

    def _let_go(self) -> None:
        """An error's frames hold the body and what was made of it, and the record, which holds the error: a ring that
        would stay until garbage is collected, megabytes for each request that is refused."""
        if self.record.error is not None:
            let_go(self.record.error)
            self.record.error = None

    def _write(self) -> None:
        line, error, log = self.record.line, self.record.error, self._edge.log
        line.route = getattr(self._scope.get("route"), "path", line.route)
        line.level = "error" if isinstance(error, Fault) else "debug" if line.route in QUIET else "info"
        if not log.writes(line.level):
            return
        line.ms = round((self._edge.clock() - self._start) * 1e3, 3)
        self.record.facts()
        if error is not None:
            line.outcome, line.code = errors.outcome_of(error), error.code
        if line.level == "error":  # with a traceback
            facts = {name: getattr(line, name) for name in FACTS}
            log.error(line.event, exc_info=error, **{name: fact for name, fact in facts.items() if fact is not UNSET})
        else:
            log.line(line)


class BodyGuard:
    """Bounds what a body may cost: `max_body` bytes, `read_timeout_s` seconds, no compression (a small body could
    unfold to any size)."""

    def __init__(self, app: ASGIApp, max_body: int, read_timeout_s: float) -> None:
        self.app = app
        self.max_body = max_body
        self.read_timeout_s = read_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "http":
            receive = BodyReader(self, scope, receive).receive
        await self.app(scope, receive, send)


class BodyReader:
    """The receive channel of one request. Raises BodyTooLarge, SlowBody or UnsupportedMedia on the first read that
    shows it; the handler that never reads a body never waits for one."""

    def __init__(self, guard: BodyGuard, scope: Scope, receive: Receive) -> None:
        self._guard = guard
        self._scope = scope
        self._record: Record | None = scope.get("widebeam")
        self._receive = receive
        self._seen = 0
        self._whole = False
        self._until: float | None = None

    async def receive(self) -> Message:
        """The next message; after the body's end, messages pass unbounded (a disconnect may take its time)."""
        if self._whole:
            return await self._receive()
        if self._until is None:
            self._check_headers()
            self._until = asyncio.get_running_loop().time() + self._guard.read_timeout_s
        message = await (self._receive() if WHOLE in self._scope else self._in_time(self._until))
        if message["type"] == "http.request":
            self._count(len(message.get("body", b"")))
            self._whole = not message.get("more_body", False)
        return message

    async def _in_time(self, until: float) -> Message:
        try:
            async with asyncio.timeout_at(until):
                return await self._receive()
        except TimeoutError:
            raise errors.SlowBody(f"the body did not arrive within {self._guard.read_timeout_s:g} s") from None

    def _check_headers(self) -> None:
        headers = self._scope["headers"]
        encoding = media.header(headers, b"content-encoding").strip().lower()
        coding = media.header(headers, b"transfer-encoding").strip().lower()
        if encoding not in {"", "identity"} or coding not in {"", "chunked"}:
            raise errors.UnsupportedMedia("compressed bodies are not accepted")
        length = media.header(headers, b"content-length")
        if length.isdigit() and int(length[:20]) > self._guard.max_body:
            raise self._too_large()

    def _count(self, size: int) -> None:
        self._seen += size
        if self._record is not None:
            self._record.line.bytes_in = self._seen
        if self._seen > self._guard.max_body:
            raise self._too_large()

    def _too_large(self) -> errors.BodyTooLarge:
        return errors.BodyTooLarge(f"the body is larger than {self._guard.max_body} bytes")
