"""Forms batches: by batch key and row budget, first come first served, never waiting while the engine is idle.

A device that works on its own gets the next batch before it has ended one: a full batch at once, what there is when it
comes to the last step. It has two at most, and they end in their order.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from app.config import Limits
from app.errors import DeadlineTooShort, QueueFull
from app.runtime.job import Batch, Job, Served
from app.runtime.predict import BatchTime
from app.runtime.thread import EngineThread

R = TypeVar("R")
REST_S: Final = 1.0
"""What was learnt of batches is old when none has run for so long."""


class _Running(NamedTuple):
    """A batch that the engine thread has. rows: of all its jobs · handed: monotonic seconds when it got it."""

    batch: Batch
    rows: int
    handed: float


class Batcher:
    """The bounded queue in front of one engine thread. Event loop only.

    While a batch runs, requests collect for free; the moment it ends, the oldest request and everything behind it that
    shares its key and fits the budgets form the next one.
    """

    def __init__(
        self,
        thread: EngineThread,
        limits: Limits,
        clock: Callable[[], float],
        done: Callable[[Sequence[Served]], None],
        dropped: Callable[[Job], None],
        formed: Callable[[Batch], None] = lambda _: None,
    ) -> None:
        """limits: those of the contract that new requests are admitted under; assigned anew when it changes
        done: the ends of a batch · dropped: a queued job whose client had gone or whose time had passed
        formed: a batch was handed to the engine."""
        self._thread, self._clock, self.limits = thread, clock, limits
        self._done_with, self._dropped, self._formed = done, dropped, formed
        self._waiting: deque[Job] = deque()
        self._waiting_rows = 0
        self._pump_scheduled = False
        self._running: deque[_Running] = deque()
        self._ended = -math.inf
        self._idle = asyncio.Event()
        self._idle.set()
        self._once: list[Callable[[], None]] = []
        self.time = BatchTime()

    @property
    def depth(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def backlog(self) -> float:
        """Full batches that wait, by requests or by rows, whichever is more."""
        return max(len(self._waiting) / self.limits.batch, self._waiting_rows / self.limits.rows)

    @property
    def busy(self) -> bool:
        """Whether there are batches. In any thread."""
        return bool(self._running)

    @property
    def running(self) -> int:
        """Requests that the engine thread has."""
        return sum(len(one.batch.jobs) for one in self._running)

    def check(self, rows: int, deadline: float | None) -> None:
        """Raise QueueFull, or DeadlineTooShort where the predicted finish lies behind the deadline. After a rest one is
        tried nevertheless: where everybody were refused, nobody would learn that a slow time is over."""
        if len(self._waiting) >= self.limits.queue:
            raise QueueFull(f"{self.limits.queue} requests are waiting", retry_after_s=1)
        now = self._clock()
        finish = self._predicted_finish(rows, now)
        if deadline is not None and finish is not None and finish > deadline and not self._rested(now):
            left = max(0.0, deadline - now)
            raise DeadlineTooShort(
                f"{1e3 * (finish - now):.1f} ms are needed and {1e3 * left:.1f} ms are left", retry_after_s=1
            )

    def submit(self, job: Job) -> None:
        """Queue an admitted job; an idle engine gets it in this turn of the event loop."""
        self._waiting.append(job)
        self._waiting_rows += job.rows
        self._idle.clear()
        if self._wanted() and not self._pump_scheduled:
            self._pump_scheduled = True  # after this turn, so that requests decoded together start together
            asyncio.get_running_loop().call_soon(self._pump)

    async def idle(self) -> None:
        """Wait until nothing waits and nothing runs."""
        await self._idle.wait()

    async def once_nobody_waits(self, then: Callable[[], R], within_s: float) -> R:
        """Call `then` once when nobody waits, whoever runs, and return what it returns: at once, or in the turn of the
        loop in which the last who wait have left the queue, before anybody is queued behind them; after `within_s`
        seconds in any case. A caller that is cancelled before has changed nothing. Raises what `then` raises.

        What changes the batch key here splits no batch: requests of the old key never wait beside those of the new one.
        """
        if not self._waiting:
            return then()
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()

        def act() -> None:
            if not done.done():
                try:
                    done.set_result(then())
                except Exception as error:  # noqa: BLE001  it is the caller's, and no batch's
                    done.set_exception(error)

        self._once.append(act)
        timer = asyncio.get_running_loop().call_later(within_s, act)
        try:
            return await done
        finally:
            timer.cancel()
            if act in self._once:
                self._once.remove(act)

    def forget(self, job: Job) -> None:
        """A queued job's client has gone or its time has passed: it leaves now. Running jobs are left alone."""
        if job in self._waiting:
            self._waiting.remove(job)
            self._waiting_rows -= job.rows
            self._dropped(job)
            self._settle()

    def _wanted(self) -> bool:
        """Whether the engine should have what waits now: when it has nothing, and behind one batch a full one."""
        return not self._running or (self._room() and self.backlog >= 1)

    def _room(self) -> bool:
        """Whether a batch may be launched behind the one that is computed."""
        return len(self._running) == 1 and self._thread.ahead(self._running[0].batch)

    def _pump(self) -> None:
        self._pump_scheduled = False
        self._feed()
        self._settle()

    def _feed(self) -> None:
        while self._wanted() and self._hand_in():
            pass

    def _hand_in(self) -> bool:
        """Give the engine the next batch; whether there was one."""
        batch = self._form()
        if batch is not None:
            self._running.append(_Running(batch, sum(job.rows for job in batch.jobs), self._clock()))
            self._thread.run(batch, asyncio.get_running_loop(), self._finished, self._at_last)
            self._formed(batch)
        return batch is not None

    def _at_last(self, batch: Batch) -> None:
        """The device is at the last step of the only batch that it has: what waits goes in behind it."""
        if self._room() and self._running[0].batch is batch:
            self._hand_in()
            self._settle()

    def _finished(self, batch: Batch, served: Sequence[Served]) -> None:
        one, now = self._running.popleft(), self._clock()
        assert one.batch is batch, "they end in their order"
        self.time.observe(one.rows, now - max(one.handed, self._ended), rested=one.handed - self._ended > REST_S)
        self._ended = now
        self._feed()  # the engine first, the answers after it
        self._done_with(served)
        self._settle()

    def _form(self) -> Batch | None:
        """Take the oldest live job and all later ones of its key that fit; the rest keep their places."""
        now, chosen, later, rows = self._clock(), list[Job](), deque[Job](), 0
        while self._waiting:
            job = self._waiting[0]
            limits = (chosen[0] if chosen else job).snapshot.contract.limits  # a contract change may be in the queue
            if len(chosen) == limits.batch:
                break
            self._waiting.popleft()
            if job.ticket.gone(now) is not None:
                self._waiting_rows -= job.rows
                self._dropped(job)
            elif (chosen and job.snapshot.batch_key != chosen[0].snapshot.batch_key) or (rows + job.rows > limits.rows):
                later.append(job)
            else:
                chosen.append(job)
                rows += job.rows
        self._waiting.extendleft(reversed(later))
        self._waiting_rows -= rows
        return Batch(tuple(chosen)) if chosen else None

    def _settle(self) -> None:
        if self._waiting:
            return
        if not self._running:
            self._idle.set()
        acts, self._once = self._once, []
        for act in acts:
            act()

    def _rested(self, now: float) -> bool:
        return not self._running and not self._waiting and now - self._ended > REST_S

    def _predicted_finish(self, rows: int, now: float) -> float | None:
        """When a request of `rows` would be done if it came now: the running batch's rest, the batches ahead of it, its
        own."""
        own = self.time.seconds(rows)
        if own is None:
            return None
        rest = 0.0
        for one in self._running:
            whole = self.time.seconds(one.rows) or 0.0
            rest += max(0.0, max(one.handed, self._ended) + whole - now) if one is self._running[0] else whole
        ahead = 0.0
        if self._waiting:
            batches = max(len(self._waiting) // self.limits.batch, self._waiting_rows // self.limits.rows)
            full_rows = self._waiting_rows // max(1, batches + 1)
            ahead = batches * (self.time.seconds(full_rows) or 0.0)
            own = self.time.seconds(rows + self._waiting_rows - batches * full_rows) or own
        return now + rest + ahead + own
