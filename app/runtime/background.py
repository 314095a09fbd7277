"""Work beside the requests: digests, loading, compiling, in threads of their own."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import torch

T = TypeVar("T")
NICE: Final = 5
CLOSE_S: Final = 2.0
_SAYING: Final = threading.Lock()


class Background:
    """One thread; what is handed in runs in order. It never keeps the process from ending.

    heavy  for seconds of work on tensors: the thread gives way to everybody else. Short work that holds the interpreter
           must not: whoever waits for the interpreter would wait for the slowest thread of the machine
    """

    def __init__(self, name: str, *, heavy: bool = False) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._heavy = heavy
        self._thread = threading.Thread(target=self._run, name=f"widebeam-{name}", daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call in the thread; its result or its exception."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._work.put(partial(_answer, call, loop, future))
        try:
            return await future
        finally:
            del future  # it holds the exception, whose traceback holds this frame: whatever was loaded would stay

    def close(self) -> None:
        """End the thread when it is done with what it does; a load that takes longer is not waited for."""
        self._work.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        if self._heavy and sys.platform == "linux":  # there, priorities are those of threads
            own = os.getpriority(os.PRIO_PROCESS, 0)  # a process may give way itself, and nobody may take that back
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own + NICE)
        if self._heavy:
            use_one_core()
        while (work := self._work.get()) is not None:
            work()
            del work  # an idle thread holds nothing in memory


def use_one_core() -> None:
    """Have torch compute with one thread where this thread asks: a team of its own, which spins while it waits, would
    take the cores of everybody else.

    What other threads have stays: torch gives the number that was said last to threads that have not computed yet, so
    that one is said again, in a thread that ends. One thread at a time: another one would take the 1 for everybody's.
    """
    with _SAYING:
        others = torch.get_num_threads()  # and this thread has its number now
        torch.set_num_threads(1)
        last = threading.Thread(target=torch.set_num_threads, args=(others,))
        last.start()
        last.join()


def _answer(call: Callable[[], T], loop: asyncio.AbstractEventLoop, future: asyncio.Future[T]) -> None:
    try:
        act = partial(future.set_result, call())
    except BaseException as error:  # noqa: BLE001  whoever waits gets it
        act = partial(future.set_exception, error)
    try:
        loop.call_soon_threadsafe(_tell, future, act)
    except RuntimeError:  # the loop has ended: nobody waits any more
        return
    finally:
        del act, future  # the exception's traceback holds this frame


def _tell(future: asyncio.Future[T], act: Callable[[], None]) -> None:
    if not future.done():  # whoever waited may have been cancelled
        act()
