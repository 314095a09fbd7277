"""What was refused for a reason that passes is tried again, at longer and longer intervals."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

from app.runtime.status import ArtifactStatus, Reason

PASSING: Final = frozenset({"contract_not_stored", "disk_error", "export_failed", "no_memory"})
"""Refusals that say nothing about what was refused: there was no memory, no room on a disk or a disk that did not
answer, no process to be had."""
FIRST_S: Final = 5.0
LONGEST_S: Final = 300.0


class Retries:
    """When to try again, by what was refused. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waits: dict[Hashable, float] = {}
        self._due: dict[Hashable, float] = {}

    def refused(self, what: Hashable, code: str) -> None:
        """Something was refused: after 5 s, 10 s, ... and at most 5 minutes it is due, if that may pass."""
        if code not in PASSING:
            self.forget(what)
            return
        wait = min(2 * self._waits[what], LONGEST_S) if what in self._waits else FIRST_S
        self._waits[what], self._due[what] = wait, self._clock() + wait

    def forget(self, what: Hashable) -> None:
        """It has changed, or is gone: the next time is a first time."""
        self._waits.pop(what, None)
        self._due.pop(what, None)

    def due(self) -> tuple[Hashable, ...]:
        """What to try again now; each is said once."""
        now = self._clock()
        found = tuple(what for what, due in self._due.items() if due <= now)
        for what in found:
            del self._due[what]
        return found


def passing(reasons: tuple[Reason, ...], artifacts: tuple[ArtifactStatus, ...]) -> str:
    """The code of a refusal at a start that may pass; "" where there is none."""
    codes = [one.code for one in reasons] + [one.reason.code for one in artifacts if one.reason is not None]
    return next((code for code in codes if code in PASSING), "")
