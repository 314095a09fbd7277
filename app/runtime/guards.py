"""`stop_if` of experiments: alerts on what an arm did lately.

An alert is a metric, a log line and an entry in the status, and no more: a replica that stopped an arm by itself would
assign otherwise than its neighbours. A guard looks at the requests of the last `for` seconds, in ten parts of which
nine to ten count.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from app.policies.assign import Experiment, Guard, Traffic
from app.runtime.logs import Log
from app.runtime.metrics import Metrics

PARTS: Final = 10
LEAST: Final = 50
"""Requests in the time looked at below which nothing is said."""
RATIO: Final = 1.02
"""Latencies are counted in classes that differ by this factor: a percentile is at most so much too high."""


@dataclass
class Part:
    """A tenth of the time looked at. classes: requests by class of latency."""

    index: int
    underfilled: int = 0
    classes: Counter[int] = field(default_factory=Counter)


class Window:
    """The last `seconds` of one arm."""

    def __init__(self, seconds: float) -> None:
        self._width = seconds / PARTS
        self._parts: deque[Part] = deque()

    def add(self, now: float, underfilled: bool, ms: float) -> bool:
        """Count an answer; whether it is the first of its part."""
        index = int(now / self._width)
        fresh = not self._parts or self._parts[-1].index != index
        if fresh:
            self._forget(index)
            self._parts.append(Part(index))
        self._parts[-1].underfilled += underfilled
        self._parts[-1].classes[math.ceil(math.log(max(ms, 1e-3), RATIO))] += 1
        return fresh

    def value(self, metric: str, now: float) -> float | None:
        """underfill_rate 0..1, or p99_ms; None for too few requests."""
        self._forget(int(now / self._width))
        classes: Counter[int] = Counter()
        for part in self._parts:
            classes.update(part.classes)
        total = classes.total()
        if total < LEAST:
            return None
        if metric == "underfill_rate":
            return sum(part.underfilled for part in self._parts) / total
        left = math.ceil(0.99 * total)
        for one in sorted(classes):
            left -= classes[one]
            if left <= 0:
                return float(RATIO**one)
        return None

    def _forget(self, index: int) -> None:
        while self._parts and self._parts[0].index <= index - PARTS:
            self._parts.popleft()


@dataclass
class Watched:
    """One guard of one arm. value: what was seen last, where it is above the limit."""

    experiment: str
    arm: str
    guard: Guard
    window: Window
    value: float | None = None


class Guards:
    """All guards of the experiments that run. Event loop only; now = monotonic seconds."""

    def __init__(self, metrics: Metrics, log: Log) -> None:
        self._metrics, self._log = metrics, log
        self._watched: dict[tuple[str, str], list[Watched]] = {}
        self._traffic: Traffic | None = None

    def follow(self, traffic: Traffic) -> None:
        """Watch what runs now; guards that stay as they are keep what they have seen."""
        if traffic is self._traffic:
            return
        self._traffic = traffic
        old = {(one.experiment, one.arm, one.guard): one for one in self._all()}
        self._watched = {}
        for name, experiment in traffic.experiments.items():
            for arm in experiment.arms:
                keys = [(name, arm.name, guard) for guard in experiment.guards]
                new = [Watched(*key, Window(key[2].seconds)) for key in keys if key not in old]
                self._watched[name, arm.name] = new + [old.pop(key) for key in keys if key in old]
        for gone in old.values():
            self._say(gone, None)

    def add(self, name: str, arm: str, underfilled: bool, ms: float, now: float) -> None:
        """An answer that an arm gave."""
        for one in self._watched.get((name, arm), ()):
            if one.window.add(now, underfilled, ms):
                self._look(one, now)

    def alerts(self, experiment: Experiment, now: float) -> list[dict[str, object]]:
        """What is above its limit now, for the status."""
        mine = [one for one in self._all() if one.experiment == experiment.name]
        for one in mine:
            self._look(one, now)
        return [
            {"arm": one.arm, "metric": one.guard.metric, "value": round(one.value, 6), "above": one.guard.above}
            for one in mine
            if one.value is not None
        ]

    def _all(self) -> Iterator[Watched]:
        return (one for several in self._watched.values() for one in several)

    def _look(self, one: Watched, now: float) -> None:
        value = one.window.value(one.guard.metric, now)
        self._say(one, value if value is not None and value > one.guard.above else None)

    def _say(self, one: Watched, value: float | None) -> None:
        """Set the value; changes of state are logged."""
        before, one.value = one.value, value
        if (before is None) == (value is None):
            return
        self._metrics.experiment_alert.labels(one.experiment, one.arm, one.guard.metric).set(value is not None)
        facts = {"experiment": one.experiment, "arm": one.arm, "metric": one.guard.metric, "above": one.guard.above}
        if value is None:
            self._log.info("experiment_alert_over", **facts)
        else:
            self._log.warning("experiment_alert", value=value, **facts)
