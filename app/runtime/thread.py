"""The engine thread: it alone launches on the device. Batches come in, ends go out.

Where the device works on its own (a GPU), a second thread waits for it and makes the lists, and the next batch is
launched meanwhile: the event loop is told once when the last step of a batch begins, and once when the batch has ended.
On a CPU the engine thread does both, a batch after the other.
"""

from __future__ import annotations

import queue
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from functools import partial

import torch

from app.core import Explanation, Ranked
from app.errors import WidebeamError
from app.runtime.flight import Flight
from app.runtime.job import Batch, Job, Served
from app.runtime.steps import StepLoop

Done = Callable[[Batch, Sequence[Served]], None]
Explained = Callable[[Explanation | WidebeamError], None]


def on_its_own(batch: Batch) -> bool:
    """Whether the device works by itself on what it was given."""
    return batch.snapshot.engine.device.type == "cuda"


class Worker:
    """A thread that does what it is given, in that order."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Do this after everything before it."""
        self._work.put(work)

    def close(self) -> None:
        """Finish what was given, then end."""
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


class EngineThread:
    """Runs batches of a StepLoop in their order, off the event loop.

    threads  what torch computes with on this thread; every other thread of the process then computes with one. OpenMP
             keeps a team of threads for each thread that asks for one, and once these are more than cores, waiting
             threads sleep at every join instead of spinning: small products took four times as long. None: as it is
    ahead    whether the next batch may be launched while one is computed
    """

    def __init__(
        self, steps: StepLoop, threads: int | None = None, ahead: Callable[[Batch], bool] = on_its_own
    ) -> None:
        self._steps, self.ahead = steps, ahead
        self._engine, self._answers = Worker("widebeam-engine"), Worker("widebeam-answers")
        if threads is not None:
            counted = threading.Event()
            self._engine.put(partial(self._count, threads, counted))
            counted.wait()
            torch.set_num_threads(1)  # for this thread, and for those that have not computed yet

    def run(
        self, batch: Batch, loop: AbstractEventLoop, done: Done, last: Callable[[Batch], None] | None = None
    ) -> None:
        """Serve a batch; `done(batch, served)` is then called on the loop. last: called there before, when the device
        is at the last step, where it works ahead."""
        self._engine.put(partial(self._launch, batch, loop, done, last))

    def explain(self, job: Job, answer: Ranked, loop: AbstractEventLoop, done: Explained) -> None:
        """Explain an answer after everything that was handed in before; `done(explanation)` is then called on the
        loop."""
        self._engine.put(partial(self._explain, job, answer, loop, done))

    def forget(self, contract_id: str) -> None:
        """Give the state memory of a contract back, after everything that was handed in before."""
        self._engine.put(partial(self._steps.forget, contract_id))

    def close(self) -> None:
        """Finish what was handed in, then end."""
        self._engine.close()
        self._answers.close()

    @property
    def alive(self) -> bool:
        """False once one of the threads has ended, for whatever reason."""
        return self._engine.alive and self._answers.alive

    @staticmethod
    def _count(threads: int, counted: threading.Event) -> None:
        torch.get_num_threads()  # a thread's first look takes over the process' count: it would undo the next line
        torch.set_num_threads(threads)
        counted.set()

    def _launch(self, batch: Batch, loop: AbstractEventLoop, done: Done, last: Callable[[Batch], None] | None) -> None:
        flight = self._steps.launch(batch)
        if self.ahead(batch):
            self._answers.put(partial(self._finish, flight, loop, done, last))
        else:
            loop.call_soon_threadsafe(done, batch, self._steps.finish(flight))

    def _finish(
        self, flight: Flight, loop: AbstractEventLoop, done: Done, last: Callable[[Batch], None] | None
    ) -> None:
        if last is not None:
            self._steps.await_last(flight)
            loop.call_soon_threadsafe(last, flight.batch)
        loop.call_soon_threadsafe(done, flight.batch, self._steps.finish(flight))

    def _explain(self, job: Job, answer: Ranked, loop: AbstractEventLoop, done: Explained) -> None:
        loop.call_soon_threadsafe(done, self._steps.explain(job, answer))
