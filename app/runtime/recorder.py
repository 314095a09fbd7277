"""What is written down about answered requests: counts and guards at once, lines by the writer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from app.config import Log as LogSettings
from app.core import Outcome, Request
from app.policies.assign import Assignment, Traffic
from app.runtime.exposure import Answered, Counts, exposure_line
from app.runtime.guards import Guards
from app.runtime.jsonlines import Rotated, Writer
from app.runtime.logs import Log
from app.runtime.metrics import Metrics
from app.runtime.records import namer, request_line, sampled
from app.runtime.status import now_iso

EXPOSURES: Final = "exposures"
REQUESTS: Final = "requests"


class Recorder(Protocol):
    """What the runtime tells about every request that it answered. Event loop only; never blocks."""

    def answered(self, request: Request, traffic: Traffic, assignment: Assignment, outcome: Outcome) -> None:
        """Count and write down one answer. traffic: what runs now, which may be newer than what the request had."""

    def document(self, traffic: Traffic, now: float) -> dict[str, dict[str, object]]:
        """The status document's `experiments`; now: unix seconds."""

    def close(self) -> None:
        """Write what is queued and end."""


class Tallies:
    """The counts and guards alone: a recorder that leaves no files."""

    def __init__(self, metrics: Metrics, log: Log, clock: Callable[[], float]) -> None:
        self._metrics, self._clock = metrics, clock
        self._counts, self._guards = Counts(), Guards(metrics, log)

    def answered(self, request: Request, traffic: Traffic, assignment: Assignment, outcome: Outcome) -> None:
        """See `Recorder`."""
        del request
        if not (assignment.decisions or assignment.unassigned):
            return
        self._counts.add(traffic, assignment)
        self._guards.follow(traffic)
        for one in assignment.decisions:
            self._metrics.exposures_total.labels(one.name, one.arm, one.reason).inc()
            if one.reason == "assigned":
                self._guards.add(one.name, one.arm, outcome.status != "ok", outcome.timings.total, self._clock())
        for name in assignment.unassigned:
            self._metrics.unassigned_total.labels(name).inc()

    def document(self, traffic: Traffic, now: float) -> dict[str, dict[str, object]]:
        """See `Recorder`."""
        self._guards.follow(traffic)
        counts, known = self._counts.document(traffic, now), traffic.experiments
        return {
            name: {**one, "alerts": self._guards.alerts(known[name], self._clock())} for name, one in counts.items()
        }

    def close(self) -> None:
        """See `Recorder`."""


class Files:
    """The recorder of a deployment: also lines under `state`/exposures and `state`/requests, as `[log]` says."""

    def __init__(
        self, settings: LogSettings, state: Path, metrics: Metrics, log: Log, clock: Callable[[], float]
    ) -> None:
        self._settings, self._tallies = settings, Tallies(metrics, log, clock)
        self._writer = Writer(log, lambda kind: metrics.records_lost_total.labels(kind).inc())
        self._exposures, self._requests = Rotated(state / EXPOSURES), Rotated(state / REQUESTS)
        self._make_name = partial(namer, settings.units, settings.unit_salt, state, log)
        self._named: Callable[[str], str] | None = None

    def answered(self, request: Request, traffic: Traffic, assignment: Assignment, outcome: Outcome) -> None:
        """See `Recorder`."""
        self._tallies.answered(request, traffic, assignment, outcome)
        if self._settings.exposures and (assignment.decisions or assignment.unassigned):
            make = partial(exposure_line, Answered.of(outcome), assignment, now_iso(), self._name)
            self._writer.put(EXPOSURES, self._exposures, make)
        if self._settings.requests > 0 and sampled(request.request_id, self._settings.requests):
            self._writer.put(REQUESTS, self._requests, partial(request_line, request, outcome, now_iso(), self._name))

    def _name(self, unit: str) -> str:
        """Writer's thread: the key is read, or made, when the first line needs it."""
        self._named = self._named or self._make_name()
        return self._named(unit)

    def document(self, traffic: Traffic, now: float) -> dict[str, dict[str, object]]:
        """See `Recorder`."""
        return self._tallies.document(traffic, now)

    def close(self) -> None:
        """See `Recorder`."""
        self._writer.close()
