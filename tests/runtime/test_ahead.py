"""Batches launched behind one another, as on a GPU: who is launched when, and that nobody notices in the answers."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from app.core import HistoryIds, Request
from app.errors import Fault, ModelOutput
from app.runtime import runtime as front
from app.runtime import steps
from app.runtime.job import Batch
from app.runtime.laps import Laps
from app.runtime.loader import Loaded
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from app.runtime.runtime import Runtime
from app.runtime.steps import StepLoop
from app.runtime.thread import EngineThread
from tests import support

SIZES = (4, 5, 6)
POLICIES = {f"w{w}": f"widebeam: 1\nwidths: [{w}, {w}, {w}]\n" for w in (3, 7, 40)}


class Engine:
    """Notes the requests of each context stage. bad: its rows of request 0 are no numbers; broken: step 2 raises."""

    def __init__(self, engine):
        self._engine, self.launched, self.bad, self.broken = engine, [], False, False
        self._noted, self._loop = asyncio.Event(), asyncio.get_running_loop()

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def encode(self, contexts, arena):
        self.launched.append(len(next(iter(contexts.values())).start) - 1)
        self._loop.call_soon_threadsafe(self._noted.set)
        return self._engine.encode(contexts, arena)

    async def until(self, *launched):
        """Wait until so many requests were launched, batch by batch."""
        async with asyncio.timeout(60):
            while tuple(self.launched) != launched:
                self._noted.clear()
                await self._noted.wait()

    def step(self, t, rows, arena):
        if self.broken and t == 2:
            raise RuntimeError("boom")
        output = self._engine.step(t, rows, arena)
        if self.bad and t == 2:
            output.logits[rows.request == 0] = torch.nan
        return output


class Device:
    """A device that comes to a batch's last step, and to its end, when a test says so: once for each batch."""

    def __init__(self, monkeypatch):
        self.last, self.end, self.free = threading.Semaphore(0), threading.Semaphore(0), True
        right = steps.rank_items
        monkeypatch.setattr(Laps, "wait_for_last", lambda _: self.come(self.last))
        monkeypatch.setattr(steps, "rank_items", lambda *given: [self.come(self.end), right(*given)][1])

    def come(self, gate):
        assert self.free or gate.acquire(timeout=60)

    def run(self):
        self.free = True
        for gate in (self.last, self.end):
            gate.release(100)


class World:
    def __init__(self, monkeypatch, **limits):
        monkeypatch.setattr(front, "EngineThread", partial(EngineThread, ahead=lambda _: True))
        self.device = Device(monkeypatch)
        self.deployment = support.deployment_of(SIZES, **limits)
        engine = support.onerec_engine(SIZES, self.deployment.limits)
        vocab = support.catalogue(support.random_sids(SIZES, 40), SIZES)
        self.engine = Engine(engine)
        self.snapshot = replace(support.snapshot_of(engine, vocab, self.deployment, POLICIES), engine=self.engine)
        self.runtime = Runtime(self.deployment, Metrics(), make_log(io.BytesIO()), time.monotonic)

    def ask(self, *history, policy="base", k=5):
        return self.runtime.admit(Request("r", HistoryIds(history), k=k, policy=policy, received=time.monotonic()))

    @property
    def queue(self):
        queue = self.runtime.status()["queue"]
        return queue["depth"], queue["in_flight"]

    async def until(self, *launched):
        """The same, and until the last of them is launched to its end."""
        await self.engine.until(*launched)
        self.runtime._thread._engine.put((done := threading.Event()).set)
        await asyncio.to_thread(done.wait)


@asynccontextmanager
async def started(monkeypatch, **limits):
    world = World(monkeypatch, **limits)
    await world.runtime.start(lambda: Loaded(snapshot=world.snapshot))
    assert world.runtime.reasons() == ()
    world.engine.launched.clear()
    world.device.free = False
    try:
        yield world
    finally:
        world.device.run()
        assert await world.runtime.drained(60)
        assert world.runtime._open == {}
        world.runtime.close()


async def test_a_full_batch_is_launched_behind_one_that_runs_and_no_third(monkeypatch):
    async with started(monkeypatch, batch=4) as world:
        asked = [world.ask("i1") for _ in range(3)]
        await world.until(3)
        asked += [world.ask("i2") for _ in range(3)]  # not full: it collects
        await asyncio.sleep(0)
        assert world.queue == (3, 3)
        asked += [world.ask("i3") for _ in range(6)]
        await world.until(3, 4)
        assert world.queue == (5, 7)
        world.device.last.release()
        world.device.end.release()
        await asyncio.gather(*(one.outcome() for one in asked[:3]))
        await world.until(3, 4, 4)
        assert world.queue == (1, 8)
        assert not any(one._future.done() for one in asked[3:])
        world.device.run()
        outcomes = [await one.outcome() for one in asked]
        assert [len(one.items) for one in outcomes] == [5] * 12
        assert world.engine.launched == [3, 4, 4, 1]


async def test_what_waits_is_launched_when_the_device_comes_to_the_last_step(monkeypatch):
    async with started(monkeypatch, batch=16) as world:
        first = world.ask("i1")
        await world.until(1)
        second = [world.ask("i2") for _ in range(3)]
        await asyncio.sleep(0)
        assert world.engine.launched == [1]
        world.device.last.release()
        await world.until(1, 3)
        third = world.ask("i3")
        await asyncio.sleep(0.01)
        assert world.queue == (1, 4)
        assert not first._future.done()
        world.device.run()
        for one in (first, *second, third):
            assert len((await one.outcome()).items) == 5
        assert world.engine.launched == [1, 3, 1]


async def test_answers_are_those_of_requests_served_alone(monkeypatch):
    async with started(monkeypatch, batch=5) as world:
        world.device.run()
        asked = [
            (history, policy)
            for history in ((), ("i1",), tuple(f"i{n}" for n in range(25)), ("i3", "i7"))
            for policy in (*POLICIES, "base")
        ]
        tickets = [world.ask(*history, policy=policy, k=50) for history, policy in asked]
        outcomes = [await one.outcome() for one in tickets]
        assert max(world.engine.launched) == 5
        for (history, policy), outcome in zip(asked, outcomes, strict=True):
            job = support.job_of(world.snapshot, world.deployment, history, policy=policy, k=50)
            [alone] = StepLoop(lambda: 0.0, Metrics()).serve(Batch((job,)))
            assert [item.id for item in outcome.items] == world.snapshot.vocab.ids(alone.result.items)
            np.testing.assert_allclose([item.score for item in outcome.items], alone.result.scores, atol=1e-5)


@pytest.mark.parametrize(("how", "error"), [("bad", ModelOutput), ("broken", Fault)])
async def test_who_fails_leaves_the_batches_around_it_alone(monkeypatch, how, error):
    async with started(monkeypatch, batch=2) as world:
        before = [world.ask("i1") for _ in range(2)]
        await world.until(2)
        setattr(world.engine, how, True)
        wrong = [world.ask("i2") for _ in range(2)]
        await world.until(2, 2)
        setattr(world.engine, how, False)
        behind = [world.ask("i1") for _ in range(2)]
        world.device.run()
        good = [await one.outcome() for one in (*before, *behind)]
        assert len({tuple(item.id for item in one.items) for one in good}) == 1
        with pytest.raises(error):
            await wrong[0].outcome()
        if how == "bad":
            assert len((await wrong[1].outcome()).items) == 5
        else:
            with pytest.raises(Fault, match="boom"):
                await wrong[1].outcome()


async def test_a_cutover_between_two_batches_in_flight_leaves_each_its_snapshot(monkeypatch):
    async with started(monkeypatch, batch=2) as world:
        before = [world.ask("i1", k=40) for _ in range(2)]
        await world.until(2)
        other = Engine(support.onerec_engine(SIZES, world.deployment.limits, seed=5))
        fresh = replace(world.snapshot, id="s2", engine=other)
        world.runtime.swap(fresh, "test")
        after = [world.ask("i1", k=40) for _ in range(2)]
        await other.until(2)
        assert world.queue == (0, 4)
        world.device.run()
        for tickets, snapshot in ((before, world.snapshot), (after, fresh)):
            job = support.job_of(snapshot, world.deployment, ("i1",), k=40)
            [alone] = StepLoop(lambda: 0.0, Metrics()).serve(Batch((job,)))
            for one in [await ticket.outcome() for ticket in tickets]:
                assert one.versions.snapshot == snapshot.id
                assert [item.id for item in one.items] == snapshot.vocab.ids(alone.result.items)
        held = world.runtime._pins.held
        assert held(world.snapshot.id) == held("s2") == 0


async def test_a_client_that_leaves_a_launched_batch_is_answered_at_once_and_nobody_notices(monkeypatch):
    async with started(monkeypatch, batch=2) as world:
        stays, goes = world.ask("i1"), world.ask("i2")
        await world.until(2)
        goes.cancel()
        with pytest.raises(Exception, match="left"):
            await goes.outcome()
        world.device.run()
        assert len((await stays.outcome()).items) == 5
