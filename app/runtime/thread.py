"""The engine thread: it alone holds the device. Batches come in, ends go out, the event loop wakes once a batch."""

from __future__ import annotations

import queue
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from functools import partial

import torch

from app.core import Explanation, Ranked
from app.errors import WidebeamError
from app.runtime.job import Batch, Job, Served
from app.runtime.steps import StepLoop

Done = Callable[[Batch, Sequence[Served]], None]
Explained = Callable[[Explanation | WidebeamError], None]


class EngineThread:
    """Runs batches of a StepLoop one after another, off the event loop.

    threads  what torch computes with on this thread; every other thread of the process then computes with one. OpenMP
             keeps a team of threads for each thread that asks for one, and once these are more than cores, waiting
             threads sleep at every join instead of spinning: small products took four times as long. None: as it is
    """

    def __init__(self, steps: StepLoop, threads: int | None = None) -> None:
        self._steps = steps
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="widebeam-engine", daemon=True)
        self._thread.start()
        if threads is not None:
            counted = threading.Event()
            self._work.put(partial(self._count, threads, counted))
            counted.wait()
            torch.set_num_threads(1)  # for this thread, and for those that have not computed yet

    def run(self, batch: Batch, loop: AbstractEventLoop, done: Done) -> None:
        """Serve a batch; `done(batch, served)` is then called on the loop."""
        self._work.put(partial(self._serve, batch, loop, done))

    def explain(self, job: Job, answer: Ranked, loop: AbstractEventLoop, done: Explained) -> None:
        """Explain an answer after everything that was handed in before; `done(explanation)` is then called on the
        loop."""
        self._work.put(partial(self._explain, job, answer, loop, done))

    def forget(self, contract_id: str) -> None:
        """Give the state memory of a contract back, after everything that was handed in before."""
        self._work.put(partial(self._steps.forget, contract_id))

    def close(self) -> None:
        """Finish what was handed in, then end."""
        self._work.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """False once the thread has ended, for whatever reason."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # an idle thread holds no snapshot in memory

    @staticmethod
    def _count(threads: int, counted: threading.Event) -> None:
        torch.get_num_threads()  # a thread's first look takes over the process' count: it would undo the next line
        torch.set_num_threads(threads)
        counted.set()

    def _serve(self, batch: Batch, loop: AbstractEventLoop, done: Done) -> None:
        loop.call_soon_threadsafe(done, batch, self._steps.serve(batch))

    def _explain(self, job: Job, answer: Ranked, loop: AbstractEventLoop, done: Explained) -> None:
        loop.call_soon_threadsafe(done, self._steps.explain(job, answer))
