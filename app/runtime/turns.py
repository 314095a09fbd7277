"""Who asks the device for something: the engine thread, a batch at a time, or whoever captures steps beside it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

BUSY_S: Final = 1.0
"""Seconds after a launch in which others are expected."""


class Turns:
    """One of them at a time. Both are thousands of short calls, and two threads that make them at once wait for each
    other at every one: the interpreter, the driver and torch's allocator each have a lock. A capture takes as long as a
    few launches, so that after each of them as much time is left to the batches, if there are any."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep, self._lock = clock, sleep, threading.Lock()
        self._launched = -math.inf

    @contextmanager
    def launch(self) -> Iterator[None]:
        """Launch a batch."""
        with self._lock:
            try:
                yield
            finally:
                self._launched = self._clock()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture one step; its thread then rests while a server is busy."""
        with self._lock:
            began = self._clock()
            yield
            now = self._clock()
        if now - self._launched < BUSY_S:
            self._sleep(now - began)
