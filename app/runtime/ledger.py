"""What became of every version: states, reasons, and the events that led there."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

from app.errors import Rejected
from app.runtime.logs import Log
from app.runtime.metrics import Metrics
from app.runtime.states import State, check_move
from app.runtime.status import ArtifactStatus, Reason, now_iso

EVENTS: Final = 500
Key = tuple[str, str]
"""(kind, version)."""


class Ledger:
    """States of versions by kind and version. Event loop only. Every change is an event and a line of the log."""

    def __init__(self, log: Log, metrics: Metrics) -> None:
        self._log, self._metrics = log, metrics
        self._known: dict[Key, ArtifactStatus] = {}
        self._began: dict[Key, float] = {}
        self._news = asyncio.Event()
        self._events: deque[dict[str, object]] = deque(maxlen=EVENTS)
        self._number = 0

    def adopt(self, found: ArtifactStatus) -> None:
        """Take over what a start has found."""
        self._known[found.kind, found.version] = found
        self._event(found, None)

    def state(self, kind: str, version: str) -> State | None:
        """The state of a version, None where it is unknown."""
        found = self._known.get((kind, version))
        return State(found.state) if found else None

    def reason(self, kind: str, version: str) -> Reason | None:
        """Why a version is where it is."""
        found = self._known.get((kind, version))
        return found.reason if found else None

    def move(
        self, kind: str, version: str, state: State, *, digest: str | None = None, reason: Reason | None = None
    ) -> None:
        """Write down a change. The same state with the same reason again is none. Raises Fault for a move that is not
        in the table."""
        before = self._known.get((kind, version))
        if before is not None and before.state == state and before.reason == reason:
            return
        if before is not None and before.state != state:
            check_move(State(before.state), state)
        digest = digest or (before.digest if before else None)
        now = ArtifactStatus(kind, version, state, now_iso(), digest, reason)
        self._known[kind, version] = now
        self._event(now, before.state if before else None)

    def reject(self, kind: str, version: str, error: Rejected) -> None:
        """A version was refused, with the place as it is called from the root."""
        before = self.state(kind, version)
        if before is not State.REJECTED:
            self._metrics.rejections_total.labels(kind).inc()
        if before in {State.RETIRED, State.INCOMPLETE}:  # it has left memory while it was looked at again
            self.move(kind, version, State.DISCOVERED)
        self.move(kind, version, State.REJECTED, reason=Reason.of(error, f"{kind}/{version}"))

    def forget(self, kind: str, version: str) -> None:
        """A version is neither on the disk nor in memory any more."""
        self._known.pop((kind, version), None)
        self._began.pop((kind, version), None)

    def versions(self, kind: str) -> tuple[str, ...]:
        """The known versions of a kind."""
        return tuple(version for known, version in self._known if known == kind)

    def documents(self) -> list[dict[str, object]]:
        """The status document's `artifacts`."""
        return [found.document() for _, found in sorted(self._known.items())]

    def events(self, after: int = 0) -> list[dict[str, object]]:
        """The newest events with a number above `after`, oldest first."""
        return [event for event in self._events if isinstance(event["number"], int) and event["number"] > after]

    async def told(self, after: int) -> None:
        """Wait until there is an event with a number above `after`."""
        while self._number <= after:
            await self._news.wait()

    def note(self, event: str, **facts: object) -> None:
        """Something happened that is no change of a version's state."""
        self._number += 1
        self._events.append({"number": self._number, "at": now_iso(), "event": event, **facts})
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _event(self, now: ArtifactStatus, before: str | None) -> None:
        self.note("artifact", before=before, **now.document())
        say = self._log.error if now.state == State.REJECTED else self._log.info
        facts = now.reason.document() if now.reason else {}
        key, clock = (now.kind, now.version), time.monotonic()
        if before is None or now.state == State.DISCOVERED:
            self._began[key] = clock
        if now.state == State.REJECTED:
            facts["ms"] = round(1e3 * (clock - self._began.get(key, clock)), 1)
        name = "artifact_rejected" if now.state == State.REJECTED else "artifact"
        say(name, kind=now.kind, version=now.version, state=str(now.state), before=before, digest=now.digest, **facts)
