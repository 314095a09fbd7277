"""The ticket of a request that came from another process: who asked is told, and nobody waits here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from app.core import Outcome
from app.errors import Cancelled, Expired, WidebeamError

EARLY_S: Final = 0.002
"""Another process' timer may be that early, and its word comes at once."""


class ToldTicket:
    """An admitted request as `port` holds it (`front.Handle`): no future, no task and no timer. Event loop only, but
    for `gone`.

    tell  called once with what became of the request; never after `cancel`
    left  called once, by `cancel`, so that a queued job leaves the queue at once
    """

    def __init__(
        self,
        deadline: float | None,
        clock: Callable[[], float],
        left: Callable[[ToldTicket], None],
        tell: Callable[[Outcome | WidebeamError], None],
    ) -> None:
        self._deadline, self._clock, self._left, self._tell = deadline, clock, left, tell
        self._cancelled = self._expired = self._ended = False

    def cancel(self) -> None:
        """See `front.Handle.cancel`; at the deadline, whoever keeps the time cancels, too: then no client has left."""
        if not self._ended:
            self._ended = True
            self._expired = self._deadline is not None and self._clock() >= self._deadline - EARLY_S
            self._cancelled = not self._expired
            self._left(self)

    def gone(self, now: float) -> WidebeamError | None:
        """Why the engine should stop working for this request, or None. Any thread."""
        if self._cancelled:
            return Cancelled("the client left")
        if self._expired or (self._deadline is not None and now >= self._deadline):
            return Expired("the deadline passed")
        return None

    def resolve(self, result: Outcome | WidebeamError) -> bool:
        """Give the answer; only the first one counts (True)."""
        if self._ended:
            return False
        self._ended = True
        self._tell(result)
        return True
