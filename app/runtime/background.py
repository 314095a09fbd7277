"""Work beside the requests: digests, loading, compiling, in threads of their own."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
NICE = 10


class Background:
    """One thread; what is handed in runs in order.

    heavy  for seconds of work on tensors: the thread gives way to everybody else. Short work that holds the interpreter
           must not: whoever waits for the interpreter would wait for the slowest thread of the machine
    """

    def __init__(self, name: str, *, heavy: bool = False) -> None:
        prefix = f"widebeam-{name}"
        self._pool = ThreadPoolExecutor(1, prefix, initializer=_give_way if heavy else None)

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call in the thread; its result or its exception."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        """Finish what was begun, drop what was not, and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _give_way() -> None:
    """Linux schedules threads one by one: only this one becomes nicer."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
