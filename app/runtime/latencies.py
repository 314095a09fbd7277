"""How long the newest answers took: quantiles of a moving window, at a fixed cost for each answer.

Answers are counted in buckets 4 % wide, in one row of buckets a second; a quantile is within 2.5 % of its answer's
time. A row ends early where a cutover needs to tell what came before it from what came after it.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

LOWEST_S: Final = 5e-5
GROWTH: Final = math.log(1.04)
BUCKETS: Final = 370
"""50 microseconds to 100 seconds; what is outside counts as the first or the last."""
ROW_S: Final = 1.0
KEPT_S: Final = 40.0
MAX_ROWS: Final = 512


class Summary(NamedTuple):
    """Answers of a stretch of time. requests: how many; the others: milliseconds, None where there were none."""

    requests: int
    p50_ms: float | None
    p99_ms: float | None


class _Row(NamedTuple):
    start: float
    counts: array[int]


class Latencies:
    """Counts of answers by second and time taken. Event loop only. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rows: deque[_Row] = deque(maxlen=MAX_ROWS)

    def add(self, seconds: float) -> None:
        """An answer was given after so many seconds."""
        now = self._clock()
        if not self._rows or now >= self._rows[-1].start + ROW_S:
            self.cut()
        place = int(math.log(max(seconds, LOWEST_S) / LOWEST_S) / GROWTH)
        self._rows[-1].counts[min(place, BUCKETS - 1)] += 1

    def cut(self) -> None:
        """Begin a row: nothing that comes is counted with what came."""
        now = self._clock()
        while self._rows and self._rows[0].start < now - KEPT_S:
            self._rows.popleft()
        self._rows.append(_Row(now, array("Q", bytes(8 * BUCKETS))))

    def between(self, since: float, until: float) -> Summary:
        """The rows that began at `since` or later and before `until`."""
        total = [0] * BUCKETS
        for row in self._rows:
            if since <= row.start < until:
                total = [have + more for have, more in zip(total, row.counts, strict=True)]
        requests = sum(total)
        return Summary(requests, _quantile(total, requests, 0.5), _quantile(total, requests, 0.99))

    def newest(self, seconds: float) -> Summary:
        """The last so many seconds."""
        now = self._clock()
        return self.between(now - seconds, math.inf)


def _quantile(counts: list[int], requests: int, share: float) -> float | None:
    """The middle of the bucket that holds the answer of that rank, in milliseconds."""
    rank, seen = math.ceil(share * requests), 0
    for place, count in enumerate(counts):
        seen += count
        if count and seen >= rank:
            return float(f"{1e3 * LOWEST_S * math.exp(GROWTH * (place + 0.5)):.3g}")
    return None
