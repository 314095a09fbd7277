"""The changes of the active snapshot: which, why, and how long each of them held requests up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from app.runtime.job import Batch
from app.runtime.status import now_iso

REMEMBERED: Final = 200


@dataclass(frozen=True, slots=True)
class Cutover:
    """One change of the active snapshot. before, after: snapshot ids · hold_ms: None until a batch has been formed."""

    at: str
    before: str | None
    after: str
    cause: str
    hold_ms: float | None = None

    def document(self) -> dict[str, object]:
        """As `history[]` shows it."""
        return {"at": self.at, "from": self.before, "to": self.after, "cause": self.cause, "hold_ms": self.hold_ms}


@dataclass(slots=True)
class _Wait:
    """The newest cutover between its first admission and its first batch. rest: what the batch that ran at that
    admission still took, in seconds; None while it runs."""

    snapshot: str
    admitted: float | None = None
    rest: float | None = None


class Cutovers:
    """The newest cutovers, and the measurement of their hold: from the first admission on a new snapshot to the first
    batch with it, less the rest of the batch that was running. Event loop only.

    measured  called with each cutover when its hold is known
    """

    def __init__(self, clock: Callable[[], float], measured: Callable[[Cutover, float], None]) -> None:
        self._clock, self._measured = clock, measured
        self._history: deque[Cutover] = deque(maxlen=REMEMBERED)
        self._wait: _Wait | None = None

    def swapped(self, before: str | None, after: str, cause: str) -> None:
        """A snapshot has become the active one."""
        self._history.append(Cutover(now_iso(), before, after, cause))
        self._wait = _Wait(after)

    def admitted(self, snapshot: str, *, running: bool) -> None:
        """A request has been queued. running: while the engine had a batch."""
        wait = self._wait
        if wait is not None and wait.admitted is None and wait.snapshot == snapshot:
            wait.admitted, wait.rest = self._clock(), None if running else 0.0

    def formed(self, batch: Batch) -> None:
        """A batch has been handed to the engine."""
        wait = self._wait
        if wait is None or wait.admitted is None:
            return
        waited = self._clock() - wait.admitted
        wait.rest = waited if wait.rest is None else wait.rest
        if any(job.snapshot.id == wait.snapshot for job in batch.jobs):
            hold = max(0.0, waited - wait.rest)
            self._history[-1] = replace(self._history[-1], hold_ms=round(1e3 * hold, 3))
            self._wait = None
            self._measured(self._history[-1], hold)

    def documents(self) -> list[dict[str, object]]:
        """The history, oldest first."""
        return [cutover.document() for cutover in self._history]
