"""The engine thread: it alone holds the device. Batches come in, ends go out, the event loop wakes once a batch."""

from __future__ import annotations

import queue
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence

from app.runtime.job import Batch, Served
from app.runtime.steps import StepLoop

Done = Callable[[Batch, Sequence[Served]], None]


class EngineThread:
    """Runs batches of a StepLoop one after another, off the event loop."""

    def __init__(self, steps: StepLoop) -> None:
        self._steps = steps
        self._work: queue.SimpleQueue[tuple[Batch, AbstractEventLoop, Done] | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="widebeam-engine", daemon=True)
        self._thread.start()

    def run(self, batch: Batch, loop: AbstractEventLoop, done: Done) -> None:
        """Serve a batch; `done(batch, served)` is then called on the loop."""
        self._work.put((batch, loop, done))

    def forget(self, contract_id: str) -> None:
        """Give the state memory of a contract back, after everything that was handed in before."""
        self._work.put(contract_id)

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
            if isinstance(work, str):
                self._steps.forget(work)
                continue
            batch, loop, done = work
            served = self._steps.serve(batch)
            loop.call_soon_threadsafe(done, batch, served)
            del work, batch, served, done  # an idle thread holds no snapshot in memory
