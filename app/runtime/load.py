"""How busy the server is: the level that a request is admitted at (policy-language V03).

What is measured is the backlog, in full batches that wait, as a mean over the last `window_s`. A level rises the moment
the mean reaches its threshold, and goes down only once the mean has been below *half* the threshold for `hold_s`. So
the server becomes `busy` at most once in `hold_s`, whatever arrives.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from app.config import Load
from app.core import Level


class Reading(NamedTuple):
    """The gauge at one moment. Times in monotonic seconds.

    level     since `since`
    at        when it was read · backlog: full batches that wait since then · mean: at `at`
    calm      since when the mean is below half of `busy`, None = it is not · idle: the same of `quiet`
    """

    level: Level
    since: float
    at: float
    backlog: float
    mean: float
    calm: float | None
    idle: float | None

    def document(self) -> dict[str, object]:
        """As the status shows it."""
        return {"level": self.level, "backlog": round(self.mean, 3), "for_s": round(self.at - self.since, 3)}


def first(now: float) -> Reading:
    """Of a server that has just started: nobody waits, and whether it will be quiet is not known."""
    return Reading("normal", now, now, 0.0, 0.0, now, now)


def after(reading: Reading, now: float, backlog: float, settings: Load) -> Reading:
    """The gauge `now`, when the backlog becomes `backlog`; until now it was what `reading` says.

    Reading more often, without a change of the backlog, changes nothing.
    """
    now = max(now, reading.at)
    mean = _mean(reading, now - reading.at, settings.window_s)
    calm = _below(reading, reading.calm, mean, now, settings.busy / 2, settings.window_s)
    idle = _below(reading, reading.idle, mean, now, settings.quiet / 2, settings.window_s)
    level, since = _level(reading, now, mean, calm, idle, settings)
    return Reading(level, since, now, backlog, mean, calm, idle)


def _mean(reading: Reading, seconds: float, window: float) -> float:
    """The exponentially weighted mean after the backlog has stood for some seconds."""
    return reading.backlog + (reading.mean - reading.backlog) * math.exp(-seconds / window)


def _below(
    reading: Reading, since: float | None, mean: float, now: float, threshold: float, window: float
) -> float | None:
    """Since when the mean is below a threshold: between two readings it moves one way only."""
    if mean >= threshold:
        return None
    if since is not None:
        return since
    fell = (threshold - reading.backlog) / (reading.mean - reading.backlog) if reading.mean > reading.backlog else 1.0
    return min(now, reading.at - window * math.log(min(1.0, fell)))


def _level(
    reading: Reading, now: float, mean: float, calm: float | None, idle: float | None, settings: Load
) -> tuple[Level, float]:
    hold, level, since = settings.hold_s, reading.level, reading.since
    if mean >= settings.busy:
        return ("busy", since) if level == "busy" else ("busy", now)
    if level == "quiet" and mean >= settings.quiet:
        level, since = "normal", now
    if level == "busy" and calm is not None and now - calm >= hold:
        level, since = "normal", calm + hold
    if level == "normal" and idle is not None and now - idle >= hold:
        level, since = "quiet", max(since, idle + hold)
    return level, since


class Gauge:
    """The gauge of a running server. Changed on the event loop only; may be read from any thread."""

    def __init__(self, settings: Load, now: float) -> None:
        """now: monotonic seconds"""
        self._settings, self._reading = settings, first(now)

    def observe(self, now: float, backlog: float) -> None:
        """Take note of a backlog that has changed, in full batches that wait."""
        self._reading = after(self._reading, now, backlog, self._settings)

    def read(self, now: float) -> Reading:
        """The gauge now, if nothing has changed since it was last told."""
        return after(self._reading, now, self._reading.backlog, self._settings)
