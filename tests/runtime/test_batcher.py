"""The moment when nobody waits: a change of the batch key that comes then splits no batch, whatever else happens."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import Limits
from app.runtime.batcher import Batcher

LIMITS = Limits(widths=(4,), rows=16, batch=4, context=8)
NEVER_S = 3600.0


class Thread:
    """An engine thread whose batches come to their last step, and end, when a test says so."""

    def __init__(self, *, ahead):
        self.batches, self._running, self._ahead = [], [], ahead

    def ahead(self, _):
        return self._ahead

    def run(self, batch, loop, done, last):
        self.batches.append([job.number for job in batch.jobs])
        assert len({job.snapshot.batch_key for job in batch.jobs}) == 1, "a batch of two keys"
        self._running.append((batch, done, last))

    def last(self):
        if self._running and self._ahead:
            batch, _, last = self._running[-1]
            last(batch)

    def end(self):
        if self._running:
            batch, done, _ = self._running.pop(0)
            done(batch, [SimpleNamespace(job=job) for job in batch.jobs])


class World:
    """A batcher, a key that requests are admitted under, and changes of it that wait for their moment."""

    def __init__(self, *, ahead=False):
        self.thread, self.key, self.made = Thread(ahead=ahead), 0, []
        self.left, self.swaps = [], []
        self.batcher = Batcher(self.thread, LIMITS, time.monotonic, self.note, lambda job: self.note([job]))

    def note(self, ends):
        self.left += [getattr(end, "job", end).number for end in ends]

    def submit(self, rows=1):
        snapshot = SimpleNamespace(batch_key=self.key, contract=SimpleNamespace(limits=LIMITS))
        ticket = SimpleNamespace(gone=lambda _: None)
        job = SimpleNamespace(number=len(self.made), rows=rows, snapshot=snapshot, ticket=ticket)
        self.made.append(job)
        self.batcher.submit(job)

    def swap(self, within_s=NEVER_S):
        def then():
            self.key += 1
            return self.batcher.depth

        self.swaps.append(asyncio.ensure_future(self.batcher.once_nobody_waits(then, within_s)))

    async def do(self, what, number):
        match what:
            case "submit":
                self.submit(number)
            case "forget":
                self.batcher.forget(self.made[number % len(self.made)]) if self.made else None
            case "swap":
                self.swap()
            case "swap now":
                self.swap(0.0)
            case "give up" if self.swaps:
                self.swaps[number % len(self.swaps)].cancel()
            case "last":
                self.thread.last()
            case "end":
                self.thread.end()
        await turns()

    async def finish(self):
        while self.batcher.busy or self.batcher.depth:
            self.thread.end()
            await turns()


async def turns(count=4):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_moment_is_at_once_where_nobody_waits_whoever_runs():
    world = World()
    assert await world.batcher.once_nobody_waits(lambda: "idle", NEVER_S) == "idle"
    world.submit()
    await turns()
    assert world.batcher.running == 1
    assert await world.batcher.once_nobody_waits(lambda: "busy", NEVER_S) == "busy"
    await world.finish()


async def test_the_moment_is_the_turn_in_which_the_last_who_wait_are_in_a_batch():
    world = World()
    for _ in range(10):
        world.submit()
    assert world.batcher.depth == 10  # the engine gets them after this turn
    world.swap()
    await turns()
    assert world.thread.batches == [[0, 1, 2, 3]]
    world.thread.end()
    await turns()
    assert (world.batcher.depth, world.key) == (2, 0)
    assert not world.swaps[0].done()
    world.thread.end()
    assert world.key == 1  # in the same turn: nobody can be admitted between
    world.submit()
    await turns()
    assert world.swaps[0].result() == 0
    await world.finish()
    assert world.thread.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10]]


async def test_answers_come_before_the_change_and_the_engine_before_both():
    world, order = World(), []
    world.batcher._done_with = lambda ends: order.append((len(world.thread.batches), world.key))
    for _ in range(5):
        world.submit()
    await turns()
    world.swap()
    await turns()
    world.thread.end()
    assert order == [(2, 0)]
    assert world.key == 1
    await world.finish()


async def test_who_leaves_the_queue_may_leave_nobody_behind():
    world = World()
    for _ in range(5):
        world.submit()
    await turns()
    world.swap()
    await turns()
    assert world.key == 0
    world.batcher.forget(world.made[4])
    assert world.key == 1
    await world.finish()


async def test_after_its_time_the_change_comes_whoever_waits():
    world = World()
    for _ in range(6):
        world.submit()
    await turns()
    world.swap(NEVER_S)
    world.swap(0.0)
    async with asyncio.timeout(60):
        assert await world.swaps[1] == 2
    assert not world.swaps[0].done()
    assert len(world.batcher._once) == 1
    world.thread.end()
    async with asyncio.timeout(60):
        assert await world.swaps[0] == 0
    await world.finish()
    assert world.batcher._once == []


async def test_a_change_that_was_given_up_does_not_come_and_one_that_fails_fails_its_caller_alone():
    world = World()
    for _ in range(6):
        world.submit()
    await turns()
    world.swap()

    def broken():
        raise RuntimeError("boom")

    fails = asyncio.ensure_future(world.batcher.once_nobody_waits(broken, NEVER_S))
    world.swap()
    await turns()
    world.swaps[0].cancel()
    await turns()
    world.thread.end()
    with pytest.raises(RuntimeError, match="boom"):
        await fails
    assert (world.key, world.swaps[0].cancelled(), await world.swaps[1]) == (1, True, 0)
    await world.finish()
    assert sorted(world.left) == list(range(6))


ACTIONS = ["submit"] * 6 + ["end"] * 3 + ["swap"] * 2 + ["last", "forget", "give up"]


def scripts(*more):
    return st.lists(st.tuples(st.sampled_from([*ACTIONS, *more]), st.integers(1, 9)), min_size=8, max_size=40)


def run(script, *, ahead):
    async def scene():
        world = World(ahead=ahead)
        for what, number in script:
            await world.do(what, number)
        await world.finish()
        await turns()
        assert all(one.done() for one in world.swaps), "nobody waits: every change has come"
        assert sorted(world.left) == list(range(len(world.made))), "each request ends once"
        return world

    return asyncio.run(scene())


@settings(max_examples=300)
@given(scripts(), st.booleans())
def test_batches_are_those_of_a_server_whose_key_never_changes(script, ahead):
    same = [(what, number) for what, number in script if what != "swap"]
    assert run(script, ahead=ahead).thread.batches == run(same, ahead=ahead).thread.batches


@given(scripts("swap now"), st.booleans())
def test_changes_that_cannot_wait_lose_nobody_and_keep_the_order_of_each_key(script, ahead):
    world = run(script, ahead=ahead)
    keys = {job.number: job.snapshot.batch_key for job in world.made}
    rows = {job.number: job.rows for job in world.made}
    for batch in world.thread.batches:
        assert batch == sorted(batch)
        assert len(batch) <= LIMITS.batch
        assert sum(rows[one] for one in batch) <= LIMITS.rows
    first = [batch[0] for batch in world.thread.batches]
    for key in set(keys.values()):  # who leads a batch has waited longest of its key
        leaders = [one for one in first if keys[one] == key]
        assert leaders == sorted(leaders)
