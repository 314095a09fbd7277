"""How a load leaves the batches alone (RecoGEM 3.3): while there are any, it rests as long as it works.

A load takes the interpreter some thousand times, and each time the thread that launches batches gets it back a little
later. At seven tenths of what a server can do, what a batch takes longer is felt about three times in what its requests
wait (1 / (1 - 0.7)). So a load is spread: it takes twice as long. docs/guarantees.md has what is left of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

REST: Final = 1.0
"""Seconds of rest for each second of work."""
LEAST_S: Final = 0.002
"""Work that is rested for: a shorter rest is a turn more that the batches wait for. So whoever works may ask often."""
MOST_S: Final = 0.1
"""One rest, at most: nobody knows what was done since the last one."""


class Pace:
    """Called between pieces of work, in the thread that does it.

    busy  whether there are batches; it is asked in that thread
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._busy, self._clock, self._sleep = busy, clock, sleep
        self._rested = clock()

    def __call__(self) -> None:
        """Rest for the work since the last rest, where that was some and there are batches."""
        worked = self._clock() - self._rested
        if worked < LEAST_S:
            return
        if self._busy():
            self._sleep(min(MOST_S, REST * worked))
        self._rested = self._clock()
