"""The one mutable object of a request: its future, and whether its client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.core import Outcome
from app.errors import Cancelled, Expired, WidebeamError


class PendingTicket:
    """An admitted request as its handler holds it (`front.Ticket`). Event loop only, but for `gone`.

    left  called once when the client goes or the deadline passes, so that a queued job leaves the queue at once
    """

    def __init__(
        self, deadline: float | None, clock: Callable[[], float], left: Callable[[PendingTicket], None]
    ) -> None:
        self._future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._deadline, self._clock, self._left = deadline, clock, left
        self._cancelled = self._expired = False
        self._timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, deadline - clock()), self._expire)

    async def outcome(self) -> Outcome:
        """See `front.Ticket.outcome`."""
        try:
            return await self._future
        except asyncio.CancelledError:  # whoever waited is cancelled, and the future with it
            if self._timer is not None:
                self._timer.cancel()
            self._cancelled = True
            self._left(self)
            raise

    def cancel(self) -> None:
        """See `front.Ticket.cancel`."""
        if not self._future.done():
            self._cancelled = True
            self._end(Cancelled("the client left"))

    def gone(self, now: float) -> WidebeamError | None:
        """Why the engine should stop working for this request, or None. Any thread."""
        if self._cancelled:
            return Cancelled("the client left")
        if self._expired or (self._deadline is not None and now >= self._deadline):
            return Expired("the deadline passed")
        return None

    def resolve(self, result: Outcome | WidebeamError) -> bool:
        """Give the answer; only the first one counts (True)."""
        if self._future.done():
            return False
        if self._timer is not None:
            self._timer.cancel()
        if isinstance(result, Outcome):
            self._future.set_result(result)
        else:
            self._future.set_exception(result)
            self._future.exception()  # a handler that has gone never fetches it: that is no fault to report
        return True

    def _expire(self) -> None:
        self._expired = True  # whatever a clock says: a timer may be a moment early
        self._end(Expired("the deadline passed"))

    def _end(self, error: WidebeamError) -> None:
        if self.resolve(error):
            self._left(self)
