"""The front end's end of the socket to the engine: the runtime's front door and its counters, from another process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Final

import msgspec
from starlette.types import Scope

from app.api.in_memory import fetch_of
from app.core import Request
from app.errors import Cancelled, Draining, QueueFull
from app.runtime.channel import Channel
from app.runtime.messages import (
    Accepting,
    Answer,
    Cancel,
    Done,
    End,
    Failed,
    Fetched,
    Hello,
    Leaving,
    Requests,
    ToFrontEnd,
)
from app.runtime.ticket import PendingTicket
from app.runtime.translate import asked, error_of

STUCK_S: Final = 2.0
"""An engine that does not read for so long will meet no deadline of what waits to be written."""


class Tally:
    """What has been counted since the engine was told last (`front.Counts`)."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str | None], list[float]] = {}
        self._shed: dict[str, int] = {}
        self._lags: list[float] = []

    def request_done(self, outcome: str, policy: str | None, seconds: float) -> None:
        """See `front.Counts`."""
        self._requests.setdefault((outcome, policy), []).append(seconds)

    def shed(self, code: str) -> None:
        """See `front.Counts`."""
        self._shed[code] = self._shed.get(code, 0) + 1

    def lag(self, seconds: float) -> None:
        """See `front.Counts`."""
        self._lags.append(seconds)

    def take(self) -> Done | None:
        """Everything so far, once; None where that is nothing."""
        if not (self._requests or self._shed or self._lags):
            return None
        requests = tuple(Requests(*key, tuple(seconds)) for key, seconds in self._requests.items())
        done = Done(requests, self._shed, tuple(self._lags))
        self._requests, self._shed, self._lags = {}, {}, []
        return done


class Remote(Channel[ToFrontEnd]):
    """The engine as a front end sees it (`front.Door`). Deadlines are kept here: an engine that is busy, or stopped,
    delays none.

    hello, end  what the engine says first and last; end is done without a result when the socket just ended
    gone        done when the socket has ended
    leave       called when the server is on its way out
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(msgspec.msgpack.Decoder(ToFrontEnd))
        self._clock, self._numbers, self.counts = clock, count(), Tally()
        self._tickets: dict[int, PendingTicket] = {}
        self._fetches: dict[int, asyncio.Future[Fetched | None]] = {}
        self._writable = asyncio.Event()
        self._writable.set()
        self.hello: asyncio.Future[Hello] = self._loop.create_future()
        self.end: asyncio.Future[End | None] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self.leave: Callable[[], None] = lambda: None

    # ---- what is asked -----------------------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait until the engine reads what was written: nothing more is read of clients, or sent, before that. Raises
        QueueFull where it reads nothing for `STUCK_S`."""
        if self._writable.is_set():
            return
        try:
            async with asyncio.timeout(STUCK_S):
                await self._writable.wait()
        except TimeoutError:
            raise QueueFull("the engine reads no requests", retry_after_s=1) from None

    def admit(self, request: Request) -> PendingTicket:
        """See `front.Door`."""
        if self._transport is None:
            raise Draining("this server is shutting down")
        number = next(self._numbers)
        self.send(asked(number, request))
        self._tickets[number] = PendingTicket(request.deadline, self._clock, partial(self._left, number))
        return self._tickets[number]

    def _left(self, number: int, _: PendingTicket) -> None:
        if self._tickets.pop(number, None) is not None:
            self.send(Cancel(number))

    def reasons(self) -> tuple[str, ...]:
        """None of its own: `/readyz` is the engine's process' to answer."""
        return ()

    async def fetch(self, scope: Scope) -> Fetched:
        """The engine's process' answer to another route. Raises Draining where it has gone, QueueFull as `room`."""
        await self.room()
        if self._transport is None:
            raise Draining("this server is shutting down")
        number = next(self._numbers)
        self._fetches[number] = self._loop.create_future()
        self.tell()  # a scrape sees what was counted before it
        self.send(fetch_of(number, scope))
        try:
            found = await self._fetches[number]
        finally:
            del self._fetches[number]
        if found is None:
            raise Draining("the server stopped before the answer was ready")
        return found

    def say_accepting(self) -> None:
        """Connections are taken now."""
        self.send(Accepting())

    def tell(self) -> None:
        """Say what was counted."""
        done = self.counts.take()
        if done is not None:
            self.send(done)

    # ---- what comes --------------------------------------------------------------------------------------------

    def received(self, message: ToFrontEnd) -> None:
        """See `Channel.received`."""
        if isinstance(message, Answer | Failed):
            ticket = self._tickets.pop(message.number, None)  # None: given up meanwhile
            if ticket is not None:
                ticket.resolve(message.outcome if isinstance(message, Answer) else error_of(message))
        elif isinstance(message, Fetched):
            waiting = self._fetches.get(message.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        elif isinstance(message, Hello):
            self.hello.set_result(message)
        elif isinstance(message, Leaving):
            self.leave()
        elif not self.end.done():
            self.end.set_result(message)

    def broken(self, error: Exception) -> None:
        """See `Channel.broken`; the engine is of this program, so this is a bug, and the log has its traceback."""
        self._loop.call_exception_handler({"message": "the engine's message cannot be read", "exception": error})

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine has gone: nobody is answered any more."""
        super().connection_lost(exc)
        self._writable.set()
        tickets, self._tickets = self._tickets, {}
        for ticket in tickets.values():
            ticket.resolve(Cancelled("the engine has gone"))
        for waiting in self._fetches.values():
            if not waiting.done():
                waiting.set_result(None)
        if not self.hello.done():
            self.hello.cancel()
        if not self.end.done():
            self.end.set_result(None)
        self.gone.set_result(None)

    def pause_writing(self) -> None:
        """The engine is slow to read."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The engine has read."""
        self._writable.set()
