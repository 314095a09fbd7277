"""The moment of a swap: it splits no batch, holds nothing else up, and what has changed meanwhile is in it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from app.engine.engine import Engine
from app.runtime import stage
from app.runtime.takedowns import Takedowns
from tests import support
from tests.api.support import ask
from tests.live_support import live_server, until
from tests.runtime.test_cutover import serving, state_of, takedown, weights, world

NEVER_S = 3600.0


class Gate:
    """An engine that begins a batch when a test says so. batches: how many requests each had."""

    def __init__(self, monkeypatch):
        self.batches, self._open, self._turns = [], True, threading.Semaphore(0)
        encode = Engine.encode

        def gated(engine, contexts, arena):
            self.batches.append(len(next(iter(contexts.values())).start) - 1)
            assert self._open or self._turns.acquire(timeout=100)
            return encode(engine, contexts, arena)

        monkeypatch.setattr(Engine, "encode", gated)

    def close(self):
        self._open = False
        self.batches.clear()

    def let(self, batches):
        self._turns.release(batches)

    def open(self):
        self._open = True
        self.let(1000)


class Scene:
    """A server with v1 pinned and v2 ready, whose engine is held in a batch of one."""

    def __init__(self, server, gate, ids):
        self.server, self.gate, self.ids, self.asked = server, gate, ids, []
        self.runtime, self.stage = server.live._runtime, server.live._artifacts.stage

    async def queue(self, count, policy="base"):
        """So many more requests are admitted and wait."""
        before = self.runtime._batcher.depth
        self.asked += [asyncio.create_task(self.server.recommend("i1", k=5, policy=policy)) for _ in range(count)]
        await until(lambda: self.runtime._batcher.depth == before + count)

    async def waits(self, promotion):
        """A promotion has come to where it waits for its moment."""
        await until(lambda: promotion.done() or self.runtime._batcher._once)
        assert not promotion.done()
        assert serving("v1")(await self.server.status())

    def promote(self, version):
        return asyncio.create_task(self.server.post(f"snapshots/{self.ids[version]}:promote"))

    async def answers(self):
        """The versions of every answer, in the order in which they were asked for."""
        return [answer["versions"]["weights"] for answer in await asyncio.gather(*self.asked)]

    async def history(self):
        return [(one["cause"], one["weights"]) for one in (await self.server.status())["history"]]


@asynccontextmanager
async def held(tmp_path, monkeypatch, wait_s=NEVER_S, **kwargs):
    """The scene. wait_s: how long a swap waits for its moment"""
    root, gate = world(tmp_path, **kwargs), Gate(monkeypatch)
    monkeypatch.setattr(stage, "WAIT_S", wait_s)
    async with live_server(root) as server:
        ids = {"v1": (await server.status())["active"]["snapshot"]}
        assert (await server.post(f"snapshots/{ids['v1']}:pin")).status == 200
        weights(root, "v2", 1)
        status = await server.settles(lambda status: state_of(status, "weights", "v2")["state"] == "ready")
        ids |= {one["weights"]["version"]: one["id"] for one in status["snapshots"]}
        gate.close()
        scene = Scene(server, gate, ids)
        scene.asked.append(asyncio.create_task(server.recommend("i1", k=5, policy="base")))
        await until(lambda: gate.batches == [1])
        try:
            yield scene
        finally:
            gate.open()
            await asyncio.gather(*scene.asked, return_exceptions=True)
        await scene.answers()  # everybody has one


async def test_a_swap_splits_no_batch(tmp_path, monkeypatch):
    async with held(tmp_path, monkeypatch) as scene:
        await scene.queue(2)
        promotion = scene.promote("v2")
        await scene.waits(promotion)
        await scene.queue(2)  # they join those who wait already
        scene.gate.let(1)
        assert (await promotion).status == 200
        await until(lambda: len(scene.gate.batches) == 2)
        await scene.queue(3)
        scene.gate.open()
        assert await scene.answers() == ["v1"] * 5 + ["v2"] * 3
        assert scene.gate.batches == [1, 4, 3]
        assert (await scene.server.status())["history"][-1]["hold_ms"] == 0


async def test_kills_edits_and_take_downs_are_live_while_a_swap_waits_and_in_what_is_swapped_to(tmp_path, monkeypatch):
    async with held(tmp_path, monkeypatch) as scene:
        server = scene.server
        await scene.queue(2)
        promotion = scene.promote("v2")
        await scene.waits(promotion)
        assert (await server.post("kill", {"kill": ["narrow"]})).status == 200
        assert scene.runtime.active.killed == {"narrow"}
        support.replace_text(server.root / "policies" / "base.yaml", "widebeam: 1\nwidths: [9, 9, 9]\n")
        assert (await server.post("policies:reload")).status == 200
        takedown(server.root, "t1", ["i7"])
        await server.settles(lambda status: status["active"]["takedowns"]["version"] == "t1")
        await scene.waits(promotion)
        await scene.queue(1, "narrow")  # on v1 with all of it: of one key with those before
        scene.gate.let(1)
        assert (await promotion).status == 200
        active = scene.runtime.active
        assert (active.weights.version, active.takedowns.version, active.killed) == ("v2", "t1", {"narrow"})
        assert active.plan("narrow").widths == active.plan("base").widths == (9, 9, 9)
        assert len(active.gone.items) == 1
        await scene.queue(1, "narrow")
        scene.gate.open()
        assert await scene.answers() == ["v1"] * 4 + ["v2"]
        assert (await scene.asked[3])["versions"]["policy"] == (await scene.asked[4])["versions"]["policy"] == "base"
        assert scene.gate.batches == [1, 3, 1]
        causes = [cause for cause, _ in await scene.history()]
        assert sorted(causes[1:-1]) == ["kill", "policies", "takedowns"]
        assert causes[-1] == "promote"


async def test_a_list_that_comes_while_a_swap_waits_is_looked_up_beside_the_requests(tmp_path, monkeypatch):
    async with held(tmp_path, monkeypatch) as scene:
        threads, items = [], Takedowns.items
        monkeypatch.setattr(
            Takedowns, "items", lambda *given: [threads.append(threading.current_thread()), items(*given)][1]
        )
        await scene.queue(1)
        promotion = scene.promote("v2")
        await scene.waits(promotion)
        takedown(scene.server.root, "t1", ["i7"])
        await scene.server.settles(lambda status: status["active"]["takedowns"]["version"] == "t1")
        scene.gate.let(1)
        assert (await promotion).status == 200
        assert scene.runtime.active.takedowns.version == "t1"
        assert threads
        assert threading.current_thread() not in threads


async def test_a_kill_that_comes_while_a_swap_is_prepared_is_in_it(tmp_path, monkeypatch):
    async with held(tmp_path, monkeypatch) as scene:
        real = scene.runtime.warm

        async def warm(*given, **rest):
            await scene.server.live.kill(["narrow"], [])
            return await real(*given, **rest)

        monkeypatch.setattr(scene.runtime, "warm", warm)
        assert (await scene.promote("v2")).status == 200
        assert (scene.runtime.active.weights.version, scene.runtime.active.killed) == ("v2", {"narrow"})


async def test_what_was_refused_while_a_swap_waits_is_still_said_after_it(tmp_path, monkeypatch):
    async with held(tmp_path, monkeypatch) as scene:
        await scene.queue(1)
        promotion = scene.promote("v2")
        await scene.waits(promotion)
        support.replace_text(scene.server.root / "policies" / "narrow.yaml", "widebeam: 1\nwidth: 9\n")
        assert (await scene.server.post("policies:reload")).status == 422
        scene.gate.let(1)
        assert (await promotion).status == 200
        narrow = (await scene.server.policies())["policies"]["narrow"]
        assert (narrow["state"], len(narrow["errors"])) == ("stale", 1)


class Slow:
    """Something that holds the lock of whoever makes the next snapshot, and waits there for permission."""

    def __init__(self, monkeypatch, holder, name, composing):
        self.entered, self.go = asyncio.Event(), asyncio.Event()
        real = getattr(holder, name)

        async def waits(*given):
            if composing.locked():
                self.entered.set()
                await self.go.wait()
            return await real(*given)

        monkeypatch.setattr(holder, name, waits)


@pytest.mark.parametrize("what", ["policies", "takedowns"])
async def test_what_is_being_put_in_force_at_the_moment_comes_first(what, tmp_path, monkeypatch):
    async with held(tmp_path, monkeypatch) as scene:
        live, root = scene.server.live, scene.server.root
        await scene.queue(1)
        promotion = scene.promote("v2")
        await scene.waits(promotion)
        if what == "policies":
            slow = Slow(monkeypatch, live._policies, "_renewed", scene.stage._composing)
            support.replace_text(root / "policies" / "base.yaml", "widebeam: 1\nwidths: [9, 9, 9]\n")
        else:
            slow = Slow(monkeypatch, live._takedowns._background, "run", scene.stage._composing)
            takedown(root, "t1", ["i7"])
        async with asyncio.timeout(60):
            await slow.entered.wait()
        scene.gate.let(1)
        await until(lambda: len(scene.gate.batches) == 2)
        await until(lambda: not scene.runtime._batcher._once)  # the moment has come, and was no good
        assert serving("v1")(await scene.server.status())
        slow.go.set()
        assert (await promotion).status == 200  # nobody is queued any more: right behind it
        active = scene.runtime.active
        assert active.weights.version == "v2"
        assert (active.takedowns.version == "t1") == (what == "takedowns")
        assert (active.plan("base").widths == (9, 9, 9)) == (what == "policies")
        assert [cause for cause, _ in await scene.history()][1:] == [what, "promote"]


async def test_where_somebody_always_waits_a_swap_comes_after_its_time(tmp_path, monkeypatch):
    limits = "rows = 4096\nbatch = 2\ncontext = 64"
    async with held(tmp_path, monkeypatch, wait_s=0.05, limits=limits) as scene:
        await scene.queue(5)
        assert (await scene.promote("v2")).status == 200  # the engine is held: nobody has left the queue
        await scene.queue(1)
        scene.gate.open()
        assert await scene.answers() == ["v1"] * 6 + ["v2"]
        assert scene.gate.batches == [1, 2, 2, 1, 1]


async def test_a_swap_whose_time_ends_in_an_edit_comes_right_behind_it(tmp_path, monkeypatch):
    async with held(tmp_path, monkeypatch, wait_s=0.05) as scene:
        await scene.queue(1)
        real, lock, ends = scene.runtime.once_nobody_waits, scene.stage._composing, []

        async def waits(then, within_s):
            await lock.acquire()  # somebody else has the lock from here on, until the test gives it back
            ends.append(await real(then, within_s))
            return ends[-1]

        monkeypatch.setattr(scene.runtime, "once_nobody_waits", waits)
        promotion = scene.promote("v2")
        await until(lambda: ends == [None])
        assert serving("v1")(await scene.server.status())
        lock.release()
        assert (await promotion).status == 200
        assert serving("v2")(await scene.server.status())
        assert (len(ends), scene.runtime._batcher.depth) == (1, 1)


async def test_what_is_called_otherwise_splits_nothing_and_does_not_wait(tmp_path, monkeypatch):
    async with held(tmp_path, monkeypatch) as scene:
        await scene.queue(2)
        serves = scene.stage.serving
        other = replace(serves, weights=serves.weights._replace(version="v1b"))
        async with asyncio.timeout(60):
            await scene.stage.promote(other, "newest")
        assert scene.runtime._batcher.depth == 2
        assert ("newest", "v1") in await scene.history()


async def test_of_two_decisions_the_later_one_stands(tmp_path, monkeypatch):
    async with held(tmp_path, monkeypatch) as scene:
        await scene.queue(2)
        real, asked = scene.stage.promote, []

        async def promote(resident, cause, *rest):
            asked.append(cause)
            return await real(resident, cause, *rest)

        monkeypatch.setattr(scene.stage, "promote", promote)
        first = scene.promote("v2")
        await scene.waits(first)
        await until(lambda: asked == ["promote", "pin"])  # who follows the pin is in the line, too
        second = asyncio.create_task(scene.server.post(f"snapshots/{scene.ids['v1']}:rollback"))
        await until(lambda: asked == ["promote", "pin", "rollback"])
        scene.gate.let(1)
        assert [(await one).status for one in (first, second)] == [200, 200]
        assert (await scene.history())[-2:] == [("promote", "v2"), ("rollback", "v1")]
        scene.gate.open()
        assert await scene.answers() == ["v1"] * 3
        assert scene.gate.batches == [1, 2]
        assert serving("v1")(await scene.server.status())


async def test_a_promotion_that_is_cancelled_while_it_waits_changes_nothing(tmp_path, monkeypatch):
    async with held(tmp_path, monkeypatch) as scene:
        await scene.queue(2)
        resident = scene.stage.residents.named(scene.ids["v2"])
        promotion = asyncio.create_task(scene.stage.promote(resident, "promote"))
        await scene.waits(promotion)
        promotion.cancel()
        with pytest.raises(asyncio.CancelledError):
            await promotion
        scene.gate.open()
        assert await scene.answers() == ["v1"] * 3
        assert await scene.history() == [("start", "v1")]
        async with asyncio.timeout(60):
            assert (await scene.stage.promote(resident, "promote")).weights.version == "v2"


async def test_what_waits_to_serve_is_not_given_up_for_what_is_loaded(tmp_path, monkeypatch):
    async with held(tmp_path, monkeypatch) as scene:
        await scene.queue(2)
        promotion = scene.promote("v2")
        await scene.waits(promotion)
        assert not scene.stage.make_room()
        scene.stage._supersede(scene.runtime.active.batch_key)
        assert scene.stage.residents.named(scene.ids["v2"])
        scene.gate.let(1)
        assert (await promotion).status == 200
        assert serving("v2")(await scene.server.status())
        scene.gate.open()
        assert await scene.answers() == ["v1"] * 3
        await until(scene.stage.make_room)  # and who served before is given up as ever


async def test_a_server_that_drains_while_a_swap_waits_answers_whom_it_has_admitted(tmp_path, monkeypatch):
    async with held(tmp_path, monkeypatch) as scene:
        await scene.queue(2)
        promotion = scene.promote("v2")
        await scene.waits(promotion)
        assert (await scene.server.post("drain")).status == 200
        refused = await ask(scene.server.public, {"context": {"history": ["i1"]}, "k": 5}, path="/v1/recommend")
        assert refused.status == 503
        scene.gate.open()
        assert await scene.answers() == ["v1"] * 3
        assert (await promotion).status == 200
        assert serving("v2")(await scene.server.status())
