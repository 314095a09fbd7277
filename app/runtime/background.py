"""Work beside the requests: digests, loading, compiling, in a thread that gives way to everybody else."""

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
    """One thread of low priority; what is handed in runs in order."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"widebeam-{name}", initializer=_give_way)

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
