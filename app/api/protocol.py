"""uvicorn's HTTP protocol with what it leaves open: bounds on a request's head, errors in our own shape, and a word to
the application when a client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, ClassVar, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.api import media, wire

MAX_HEAD: Final = 64 * 1024
"""Most bytes of a request line and headers."""
MAX_WAITING: Final = 100
"""Most requests that wait on a connection for the answer to one before them. A few bytes of a client each, and a few
thousand of ours."""
FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
LINE: Final = 4
"""What a header line has beside its name and value."""
CLIENT: Final = "widebeam.client"
"""Key of an ASGI scope: the request's `Client`."""
WHOLE: Final = "widebeam.whole"
"""Key of an ASGI scope: there once the whole body has been read from the socket, and nobody needs to wait for it; when
its last byte came, in monotonic seconds."""


class _TooMuch(Exception):
    """The parser's callbacks saw more than `MAX_HEAD`, or than `MAX_WAITING`."""


class Client:
    """Whether the client of a connection is still there. A connection serves one request at a time."""

    def __init__(self) -> None:
        self.gone = False
        self._left: Callable[[], None] | None = None

    def watch(self, left: Callable[[], None] | None) -> None:
        """Call `left` when the client goes, at once where it has gone; None: nobody wants to know any more."""
        self._left = left
        if self.gone:
            self.leave()

    def leave(self) -> None:
        """The connection has ended."""
        self.gone = True
        if self._left is not None:
            self._left()


class BoundedHead(HttpToolsProtocol):
    """Ends connections whose request heads are too large (431), too slow (408) or not HTTP (400), and speaks nothing
    but HTTP/1.1, whatever else a client offers (some send `Upgrade: h2c` with every first request).

    A head is counted twice: as raw bytes while it is incomplete, since the parser keeps a long line for itself, and as
    what the parser hands out, since a whole head of many short lines can come in one read. Of a read that begins with
    something else than this head, no raw bytes are counted: nobody says where the head begins in it.

    `head_timeout_s` bounds the time from a connection's start, or from a request's first byte, to the end of its
    headers; from an answer's end to the next request's first byte the keep-alive timeout rules, whatever else comes
    meanwhile: empty lines, or the rest of a body that nobody wanted.

    Requests find the connection's `Client` in their scope: `receive` says that a client has left to whoever waits for
    it, which takes a task for each request.
    """

    head_timeout_s: ClassVar[float] = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._read_at = 0.0
        self._parsed_bytes = 0
        self._in_head = self._mixed = False
        self._telling = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._client = Client()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn's own
        """A connection counts as in its first head from the start."""
        super().connection_made(transport)
        self._begin_head()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the timers with the connection, and tell whoever works for its client."""
        self._end_head()
        self._unset_keepalive_if_required()
        if self._running is not None and not self._running.response_complete:  # uvicorn's own looks at the last one
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._client.leave()

    def data_received(self, data: bytes) -> None:
        """Parse; then count what belongs to a head that is not complete yet."""
        self._read_at, self._mixed = time.monotonic(), False
        self._parse(data)
        if not self._in_head or self.transport.is_closing():
            return
        if not self._mixed:
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD:
            self._refuse_large()
        elif self._head_timer is None:  # most heads come in one piece and need none
            self._await_head()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                self._stay()
            except httptools.HttpParserError:
                self.send_400_response("this is no HTTP/1.1 request")
                return
            else:
                return

    def _stay(self) -> None:
        """Pass over an offer to speak another protocol (RFC 9110, 7.8). The parser takes what follows for that
        protocol, or for the next request; a body is a body, so a new parser is told of it again."""
        framing = self._framing()
        if framing:
            self.parser, self._telling = httptools.HttpRequestParser(self), True
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")
            self._telling = False

    def _framing(self) -> bytes:
        """The header line that says how long the body is; empty where there is none."""
        return next((name + b": " + value for name, value in self.headers if name in FRAMING and value != b"0"), b"")

    def on_message_begin(self) -> None:
        """A request's first byte."""
        if self._telling:
            return
        if len(self.pipeline) >= MAX_WAITING:
            raise _TooMuch
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self.scope[CLIENT] = self._client  # type: ignore[typeddict-unknown-key]
        self._begin_head()

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        if self._telling:
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line; trailers after a body are counted and dropped, for nobody checked them as headers."""
        if self._telling:
            return
        self._count(len(name) + len(value) + LINE)
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete; from here the body's own limits hold."""
        if self._telling:
            return
        self._end_head()
        self._mixed = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._mixed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request's last byte, but where the parser only thinks so: see `_stay`."""
        if self.parser.should_upgrade() and self._framing():
            return
        super().on_message_complete()
        self.scope[WHOLE] = self._read_at  # type: ignore[typeddict-unknown-key]
        if not self.pipeline:  # a large body has paused it, and nobody may read on to see that the client leaves
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """An answer's end; the next head may have begun before it."""
        super().on_response_complete()
        if self._in_head:
            self._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP, or too much of it."""
        if self._parsed_bytes > MAX_HEAD:
            self._refuse_large()
        elif len(self.pipeline) >= MAX_WAITING:
            self._refuse(400, "too_many_waiting", f"more than {MAX_WAITING} requests wait on this connection")
        else:
            self._refuse(400, "malformed_http", msg)

    def _count(self, size: int) -> None:
        self._parsed_bytes += size
        if self._parsed_bytes > MAX_HEAD:
            raise _TooMuch

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _begin_head(self) -> None:
        self._end_head()
        self._in_head, self._head_bytes, self._parsed_bytes = True, 0, 0

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_late)

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        if not self.transport.is_closing():
            self._refuse(408, "head_timeout", f"the request's head did not arrive within {self.head_timeout_s:g} s")

    def _refuse_large(self) -> None:
        self._refuse(431, "head_too_large", f"the request's head is larger than {MAX_HEAD} bytes")

    def _refuse(self, status: int, code: str, message: str) -> None:
        body = media.ENCODE[media.JSON](wire.error_body(code, message, False, None))
        phrase = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}[status]
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: {media.JSON}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def protocol(head_timeout_s: float) -> type[BoundedHead]:
    """The protocol with a deployment's own timeout."""
    return type("Protocol", (BoundedHead,), {"head_timeout_s": head_timeout_s})
