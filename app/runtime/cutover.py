"""The changes of the active snapshot: which, why, how long each of them held requests up, and what answers took before
and after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from app.runtime.job import Batch
from app.runtime.latencies import Latencies, Summary
from app.runtime.status import now_iso

REMEMBERED: Final = 200
BESIDE_S: Final = 10.0
"""Seconds before and after a cutover whose answers are compared."""


@dataclass(frozen=True, slots=True)
class Cutover:
    """One change of the active snapshot. number: counts them · before, after: snapshot ids · versions: by kind, of
    `after` · hold_ms: None until a batch has been formed · p99_*: of the answers of `BESIDE_S` seconds before and after
    it, None where there were none, and until that time has passed."""

    number: int
    at: str
    before: str | None
    after: str
    cause: str
    versions: Mapping[str, str] = field(default_factory=dict)
    hold_ms: float | None = None
    p99_before_ms: float | None = None
    p99_after_ms: float | None = None

    def document(self) -> dict[str, object]:
        """As `history[]` shows it."""
        return {
            "at": self.at,
            "from": self.before,
            "to": self.after,
            "cause": self.cause,
            **self.versions,
            "hold_ms": self.hold_ms,
            "p99_before_ms": self.p99_before_ms,
            "p99_after_ms": self.p99_after_ms,
        }


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
        self._latencies = Latencies(clock)
        self._comparing: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        self.count = 0

    def swapped(self, before: str | None, after: str, cause: str, versions: Mapping[str, str] | None = None) -> None:
        """A snapshot has become the active one."""
        self._compare()
        self.count += 1
        p99 = self._latencies.newest(BESIDE_S).p99_ms
        self._latencies.cut()
        made = Cutover(self.count, now_iso(), before, after, cause, versions or {}, p99_before_ms=p99)
        self._history.append(made)
        self._comparing.append((self.count, self._clock()))
        self._wait = _Wait(after)

    def answered(self, seconds: float) -> None:
        """A request has been answered, so many seconds after it was received."""
        self._compare()
        self._latencies.add(seconds)

    def latency(self) -> Summary:
        """The answers of the last `BESIDE_S` seconds."""
        return self._latencies.newest(BESIDE_S)

    def _compare(self) -> None:
        """Fill in what answers took after the cutovers for which that is known by now."""
        now = self._clock()
        while self._comparing and now >= self._comparing[0][1] + BESIDE_S:
            number, at = self._comparing.popleft()
            place = number - self.count - 1
            if -place <= len(self._history):
                p99 = self._latencies.between(at, at + BESIDE_S).p99_ms
                self._history[place] = replace(self._history[place], p99_after_ms=p99)

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
        self._compare()
        return [cutover.document() for cutover in self._history]
