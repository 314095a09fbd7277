"""The engine's end of a front end's socket: admits what is asked there, and says what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import msgspec

from app.core import Outcome
from app.errors import Fault, WidebeamError
from app.runtime.channel import MOST, Channel, Malformed
from app.runtime.front import Front, Handle
from app.runtime.logs import Log
from app.runtime.messages import Admit, Answer, Cancel, Done, Fetch, Fetched, Hello, ToEngine
from app.runtime.metrics import Metrics
from app.runtime.translate import failed, request_of

BESIDE: Final = 2**20
"""Bytes of a frame beside what it has of a body."""


class Port(Channel[ToEngine]):
    """One front end as the engine's event loop sees it. A request costs no task and no timer here. An answer
    leaves at once: the front end is at work on it while those of the batch's other requests are made.

    A front end that does not read its answers is not read from either, so it cannot ask for more; one that writes
    anything but messages is cut off. When the socket ends, so do its requests.
    """

    def __init__(
        self, front: Front, metrics: Metrics, log: Log, fetch: Callable[[Fetch], Awaitable[Fetched]], hello: Hello
    ) -> None:
        """fetch: answers for the routes that the front end does not know · hello: its first message"""
        super().__init__(msgspec.msgpack.Decoder(ToEngine), most_bytes(hello.deployment.server.max_body))
        self._front, self._metrics, self._log, self._fetch, self._hello = front, metrics, log, fetch, hello
        self._open: dict[int, Handle] = {}
        self._fetches: set[asyncio.Task[None]] = set()
        self.accepting: asyncio.Future[None] = self._loop.create_future()
        self.gone: asyncio.Future[int] = self._loop.create_future()

    # ---- life --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what is served."""
        super().connection_made(transport)
        self.send(self._hello)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody waits for its requests any more: `gone` has how many there were."""
        super().connection_lost(exc)
        open_, self._open = self._open, {}
        for handle in open_.values():
            handle.cancel()
        for task in self._fetches:
            task.cancel()
        self.gone.set_result(len(open_))

    def broken(self, error: Exception) -> None:
        """See `Channel.broken`."""
        self._log.error("front_end_malformed", reason=f"{type(error).__name__}: {error}")

    def pause_writing(self) -> None:
        """It reads slowly, or not at all."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It has read."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # ---- messages ----------------------------------------------------------------------------------------------

    def received(self, message: ToEngine) -> None:
        """See `Channel.received`."""
        if isinstance(message, Admit):
            self._admit(message)
        elif isinstance(message, Cancel):
            handle = self._open.pop(message.number, None)  # None: its answer is on the way
            if handle is not None:
                handle.cancel()
        elif isinstance(message, Done):
            self._count(message)
        elif isinstance(message, Fetch):
            task = self._loop.create_task(self._answer(message))
            self._fetches.add(task)
            task.add_done_callback(self._fetches.discard)
        elif not self.accepting.done():
            self.accepting.set_result(None)

    def _admit(self, message: Admit) -> None:
        number, request = message.number, request_of(message)
        if number in self._open:
            raise Malformed("two requests of one number")
        try:
            self._open[number] = self._front.hand_in(request, partial(self._told, number))
        except WidebeamError as error:
            self.send(failed(number, error))
        except Exception as error:  # noqa: BLE001  a bug of ours: one request fails, and its client hears of it
            self._log.error("admission_failed", request_id=request.request_id, exc_info=error)
            self.send(failed(number, Fault.of(error)))

    def _told(self, number: int, result: Outcome | WidebeamError) -> None:
        if self._open.pop(number, None) is None:
            return  # given up, or the connection has ended
        if isinstance(result, WidebeamError):
            self.send(failed(number, result))
            return
        try:
            self.send(Answer(number, result), at_once=True)
        except Exception as error:  # noqa: BLE001  a bug of ours: one request fails, and its client hears of it
            self._log.error("answer_failed", request_id=result.request_id, exc_info=error)
            self.send(failed(number, Fault.of(error)))

    def _count(self, done: Done) -> None:
        for one in done.requests:
            self._metrics.requests_done(one.outcome, one.policy, one.seconds)
        for code, times in done.shed.items():
            self._metrics.shed_total.labels(code).inc(times)
        for seconds in done.lags:
            self._metrics.lag(seconds)

    async def _answer(self, asked: Fetch) -> None:
        self.send(await self._fetch(asked))


def most_bytes(max_body: int) -> int:
    """The largest frame that a front end may write: no body of `max_body` bytes makes a larger one, since nothing of it
    becomes more than twice as long (numbers of 16 bits, which travel as 32)."""
    return min(2 * max_body + BESIDE, MOST)
