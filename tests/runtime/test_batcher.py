"""The moments between batches that the batcher tells whoever waits for one."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from app.config import Limits
from app.runtime.batcher import Batcher

LIMITS = Limits(widths=(4,), rows=64, batch=2, context=8)


class Thread:
    """An engine thread whose batches end when a test says so."""

    def __init__(self, *, ahead):
        self.batches, self._ahead = [], ahead

    def ahead(self, _):
        return self._ahead

    def run(self, batch, loop, done, last=None):
        self.batches.append((batch, done))

    def end(self):
        batch, done = self.batches.pop(0)
        done(batch, [])


def job(key="a"):
    snapshot = SimpleNamespace(batch_key=key, contract=SimpleNamespace(limits=LIMITS))
    return SimpleNamespace(rows=4, snapshot=snapshot, ticket=SimpleNamespace(gone=lambda _: None))


def batcher(thread):
    return Batcher(thread, LIMITS, time.monotonic, lambda _: None, lambda _: None)


async def turns(count=3):
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_moment_comes_with_the_next_batch_and_at_once_where_there_is_none():
    async def scene():
        thread = Thread(ahead=False)
        made = batcher(thread)
        await made.handed(60)
        await made.handed(60, all_of_them=True)
        made.submit(job())
        await turns()
        await made.handed(60, all_of_them=True)  # nobody waits behind it
        waits = asyncio.ensure_future(made.handed(60))
        await turns()
        assert not waits.done()
        made.submit(job())
        await turns()
        assert not waits.done()  # it stays in the line while the first one runs
        thread.end()
        await turns()
        assert waits.done()
        again = asyncio.ensure_future(made.handed(60))
        await turns()
        thread.end()  # and nothing comes after it
        await turns()
        assert again.done()

    asyncio.run(scene())


def test_the_moment_for_all_comes_when_nobody_is_left_in_the_line():
    async def scene():
        thread = Thread(ahead=False)
        made = batcher(thread)
        for _ in range(6):
            made.submit(job())
        await turns()
        every = asyncio.ensure_future(made.handed(60, all_of_them=True))
        left = []
        while not every.done():
            thread.end()
            await turns()
            left.append(made.depth)
        assert left == [2, 0]
        assert len(thread.batches) == 1  # and it is still computed

    asyncio.run(scene())


def test_nobody_waits_longer_for_a_moment_than_he_wants():
    async def scene():
        made = batcher(Thread(ahead=False))
        for _ in range(4):
            made.submit(job())
        await turns()
        await made.handed(0.01)
        await made.handed(0.01, all_of_them=True)
        assert made.depth == 2
        assert made._moments == []

    asyncio.run(scene())
