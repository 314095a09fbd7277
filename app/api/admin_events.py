"""GET /admin/v1/events: what happened to versions, pins and snapshots, as a list or as server-sent events.

A stream holds no queue: it remembers the number of the last event it has sent and takes the next ones from the list
that all share. A client that reads too slowly for that list is told how many it missed. So a stream costs its
connection's buffer and nothing else, and there are at most `MAX_STREAMS` of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api import admin_live, errors, media, openapi
from app.api.health import Readiness
from app.runtime.control import Control, Document

STREAM: Final = "text/event-stream"
MAX_EVENTS: Final = 500
MAX_STREAMS: Final = 16
CHUNK: Final = 50
"""Events written at once."""
ALIVE_S: Final = 15.0
"""A comment after so long without an event: proxies keep the connection, and a client that went is noticed."""


def routes(control: Control, readiness: Readiness) -> APIRouter:
    """The route, without its prefix."""
    router = APIRouter()
    streams = Streams(control, readiness)

    async def events(request: Request) -> Response:
        """What happened after event number `after`, oldest first, `limit` at most; with `Accept: text/event-stream` a
        stream that goes on, after `Last-Event-ID`."""
        after = int(admin_live.number(request, "after", 2**53))
        if STREAM in media.header(request.scope["headers"], b"accept").lower():
            if request.scope["widebeam"].method == "HEAD":
                return Response(media_type=STREAM)
            return streams.open(media.header(request.scope["headers"], b"last-event-id"), after)
        limit = int(admin_live.number(request, "limit", MAX_EVENTS, MAX_EVENTS))
        found = control.events(after)[:limit]
        return admin_live.answer({"boot": control.boot, "events": found})

    described = openapi.operation("events", tag="admin", answers={200: dict}, errors=admin_live.REFUSED)
    described["responses"][200]["content"][STREAM] = {"schema": {"type": "string"}}
    router.add_api_route("/events", events, **described)
    return router


class Streams:
    """The streams that are open."""

    def __init__(self, control: Control, readiness: Readiness) -> None:
        self._control, self._readiness = control, readiness
        self._open = 0

    def open(self, last_id: str, after: int) -> Response:
        """A stream from after the event that a client has seen last. Raises TooManyStreams.

        last_id  BOOT-NUMBER; of another process, or of no process at all: everything that is known
        """
        if self._open >= MAX_STREAMS:
            raise errors.TooManyStreams(f"{MAX_STREAMS} clients follow the events already", retry_after_s=5)
        boot, _, number = last_id.partition("-")
        restarted = last_id != "" and not (boot == self._control.boot and number.isascii() and number.isdigit())
        if last_id and not restarted:
            after = int(number[:16])
            restarted = not self._control.events(after - 1)  # there is no such event: nobody can have seen it
        if restarted:
            after = 0
        return _Stream(self, self._chunks(after, restarted))

    def opened(self) -> None:
        """A stream begins."""
        self._open += 1

    def closed(self) -> None:
        """A stream has ended."""
        self._open -= 1

    async def _chunks(self, after: int, restarted: bool) -> AsyncIterator[bytes]:
        yield b"retry: 2000\n" + (b"event: restarted\ndata: {}\n\n" if restarted else b": hello\n\n")
        loop = asyncio.get_running_loop()
        quiet_since = loop.time()
        while not self._readiness.leaving:
            found = self._control.events(after)[:CHUNK]
            if found:
                missed = _number(found[0]) - after - 1
                note = b'event: missed\ndata: {"events": %d}\n\n' % missed if missed else b""
                after, quiet_since = _number(found[-1]), loop.time()
                yield note + b"".join(map(self._line, found))
            elif loop.time() - quiet_since >= ALIVE_S:
                quiet_since = loop.time()
                yield b": alive\n\n"
            else:
                await self._news(after)

    async def _news(self, after: int) -> None:
        """Wait for an event, for the end of this server, or for a while."""
        waits = (asyncio.ensure_future(self._control.told(after)), asyncio.ensure_future(self._readiness.left.wait()))
        try:
            await asyncio.wait(waits, timeout=ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _line(self, event: Document) -> bytes:
        data = msgspec.json.encode(event)  # one line: JSON has no raw line breaks
        return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (
            self._control.boot.encode(), _number(event), str(event["event"]).encode(), data,
        )  # fmt: skip


class _Stream(StreamingResponse):
    """A response that counts while it is being sent, however it ends."""

    def __init__(self, streams: Streams, chunks: AsyncIterator[bytes]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(chunks, headers=headers, media_type=STREAM)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        self._streams.opened()
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.closed()


def _number(event: Document) -> int:
    number = event["number"]
    assert isinstance(number, int)
    return number
