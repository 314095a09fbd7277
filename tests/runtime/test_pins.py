"""Pins that cannot be carried out, and what a decision leaves behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import shutil
import weakref

from app.errors import Rejected
from app.runtime import state_dir
from app.runtime.state_dir import PIN
from tests import support
from tests.api.support import PATIENCE_S
from tests.live_support import live_server
from tests.runtime.test_cutover import Slow, edit, items, problem, serving, spoiled, state_of, weights, world


def pins(server):
    """(cause, versions) of what the log says of pins."""
    return [(one["cause"], one["versions"]) for one in server.events("pin")]


async def pending(server, root, version):
    """Promote a version that will be refused; nobody waits for it."""
    spoiled(root, version, "nan")
    assert (await server.post("snapshots:promote?wait=0", {"weights": version})).status == 202


async def test_a_promotion_that_is_refused_leaves_no_pin_and_newer_versions_serve(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        spoiled(root, "v9", "nan")
        reply = await server.post("snapshots:promote?wait=30", {"weights": "v9"})
        assert (reply.status, reply.json()["error"]["code"]) == (422, "not_finite")
        assert not (root / "state" / PIN).exists()
        assert pins(server)[-1] == ("withdrawn", {})
        weights(root, "v10", 2)
        await server.settles(serving("v10"))
    async with live_server(root) as server:  # ready: no pin keeps it from what is good
        assert serving("v10")(await server.status())


async def test_a_promotion_that_is_refused_after_its_answer_puts_the_pin_from_before_back(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        weights(root, "v2", 1)
        await server.settles(serving("v2"))
        assert (await server.post("snapshots:promote?wait=30", {"weights": "v1"})).status == 200
        spoiled(root, "v9", "nan")
        reply = await server.post("snapshots:promote?wait=0", {"weights": "v9"})
        assert reply.status in {202, 422}
        await server.settles(lambda _: pins(server)[-1] == ("withdrawn", {"weights": "v1"}))
        assert json.loads((root / "state" / PIN).read_text()) == {"weights": "v1"}
        await server.settles(serving("v1"))


async def test_of_two_decisions_in_a_row_that_are_refused_none_stands(tmp_path, monkeypatch):
    root = world(tmp_path)
    slow = Slow(monkeypatch, "v8")
    async with live_server(root) as server:
        await pending(server, root, "v8")
        await slow.begun()
        await pending(server, root, "v9")  # v8 is what stood before it, and is refused meanwhile
        slow.go.set()
        await server.settles(lambda _: pins(server)[-1] == ("withdrawn", {}))
        assert not (root / "state" / PIN).exists()
        assert serving("v1")(await server.status())


async def test_a_decision_that_was_pending_goes_on_when_the_one_after_it_is_refused(tmp_path, monkeypatch):
    root = world(tmp_path)
    slow = Slow(monkeypatch, "v8", "v9")
    async with live_server(root) as server:
        weights(root, "v8", 1)
        assert (await server.post("snapshots:promote?wait=0", {"weights": "v8"})).status == 202
        await slow.begun()
        await pending(server, root, "v9")
        slow.go.set()
        await server.settles(serving("v8"))
        await server.settles(lambda _: [one["weights"] for one in server.events("decision")] == ["v8"])
        assert pins(server)[-1] == ("withdrawn", {"weights": "v8"})
        assert json.loads((root / "state" / PIN).read_text()) == {"weights": "v8"}


async def test_a_pin_that_cannot_be_put_back_for_want_of_room_is_put_back_later(tmp_path, monkeypatch):
    root = world(tmp_path)
    slow = Slow(monkeypatch, "v9")
    async with live_server(root) as server:
        weights(root, "v2", 1)
        await server.settles(serving("v2"))
        assert (await server.post("snapshots:promote?wait=30", {"weights": "v1"})).status == 200
        await pending(server, root, "v9")
        await slow.begun()
        tried, loop = asyncio.Event(), asyncio.get_running_loop()

        def full(*_):
            loop.call_soon_threadsafe(tried.set)
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(state_dir, "write", full)
            slow.go.set()
            await asyncio.wait_for(tried.wait(), PATIENCE_S)
        await server.settles(lambda _: pins(server)[-1] == ("withdrawn", {"weights": "v1"}))
        assert json.loads((root / "state" / PIN).read_text()) == {"weights": "v1"}


async def test_what_was_unpinned_does_not_come_back_with_a_refusal(tmp_path, monkeypatch):
    root = world(tmp_path)
    slow = Slow(monkeypatch, "v9")
    async with live_server(root) as server:
        weights(root, "v2", 1)
        await server.settles(serving("v2"))
        assert (await server.post("snapshots:promote?wait=30", {"weights": "v1"})).status == 200
        await pending(server, root, "v9")
        await slow.begun()
        assert (await server.post("snapshots:unpin")).status == 200
        assert (await server.post("snapshots:promote?wait=0", {"weights": "v9"})).status == 202
        slow.go.set()
        await server.settles(lambda _: pins(server)[-1] == ("withdrawn", {}))
        assert not (root / "state" / PIN).exists()
        await server.settles(serving("v2"))


async def test_a_promotion_of_what_is_in_memory_and_cannot_serve_by_the_policies_is_refused(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        support.write_vocab(root, (4, 5, 6), items("b"), version="v2")
        await server.settles(serving("v1", "v2"))
        real = server.live._policies.compiled_for

        async def refuse(snapshot, *rest):
            if snapshot.vocab_ref.version == "v1":
                raise Rejected("no_default_policy", "not with it", location="policies/")
            return await real(snapshot, *rest)

        monkeypatch.setattr(server.live._policies, "compiled_for", refuse)
        reply = await server.post("snapshots:promote?wait=30", {"vocab": "v1"})
        assert (reply.status, reply.json()["error"]["code"]) == (422, "requires")
        assert not (root / "state" / PIN).exists()


async def test_what_is_refused_before_anything_serves_leaves_no_pin_either(tmp_path):
    root = world(tmp_path)
    shutil.rmtree(root / "weights" / "v1")
    async with live_server(root, ready=False) as server:
        await server.settles(lambda status: any("no_weights" in one for one in status["reasons"]))
        spoiled(root, "v3", "nan")
        reply = await server.post("snapshots:promote?wait=30", {"weights": "v3"})
        assert (reply.status, reply.json()["error"]["code"]) == (422, "not_finite")
        weights(root, "v4", 1)
        await server.ready()
        assert serving("v4")(await server.status())


async def test_a_promotion_that_is_pending_does_not_wait_for_what_was_asked_for_before(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        for number in (2, 3):
            weights(root, f"v{number}", number)
            await server.settles(serving(f"v{number}"))
        (root / "release.json").write_text('{"weights": "v99"}')
        await server.settles(lambda status: "problem" in status["desired"])
        reply = await server.post("snapshots:promote?wait=0", {"weights": "v1"})  # it has left memory
        assert "problem" not in reply.json()
        await server.settles(serving("v1"))


async def test_a_decision_that_is_asked_for_again_and_again_is_one(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        weights(root, "v2", 1, {"vocab": ["v2"]})
        await server.settles(lambda status: state_of(status, "weights", "v2")["state"] == "waiting")
        for _ in range(20):
            assert (await server.post("snapshots:promote?wait=0", {"weights": "v2"})).status == 202
        assert len(server.live._operations._pending) == 1
        support.write_vocab(root, (4, 5, 6), items("b"), version="v2")
        await server.settles(lambda _: not server.live._operations._pending)
        assert [one["weights"] for one in server.events("decision")] == ["v2"]


async def test_a_promotion_that_was_answered_as_pending_is_a_decision_when_it_serves(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        weights(root, "v2", 1)
        await server.settles(serving("v2"))
        (root / "release.json").write_text('{"weights": "v2"}')
        weights(root, "v3", 2)
        reply = await server.post("snapshots:promote?wait=0", {"weights": "v3"})
        assert reply.status in {200, 202}
        await server.settles(serving("v3"))
        await server.settles(lambda _: server.events("decision"))
        said = server.events("decision")[-1]
        assert (said["cause"], said["weights"]) == ("promote", "v3")
        assert said["ms"] > 0


async def test_versions_that_do_not_agree_are_refused_and_change_nothing(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        weights(root, "v2", 1, {"vocab": ["v2"]})
        await server.settles(lambda status: state_of(status, "weights", "v2")["state"] == "waiting")
        reply = await server.post("snapshots:promote?wait=30", {"weights": "v2", "vocab": "v1"})
        assert (reply.status, reply.json()["error"]["code"]) == (422, "requires")
        assert "requires vocab v2" in reply.json()["error"]["message"]
        assert not (root / "state" / PIN).exists()

        async def waits(server):
            reply = await server.post("snapshots:promote?wait=0", {"weights": "v2"})  # its vocab may still come
            assert reply.status == 202
            return "requires vocab v2" in reply.json().get("problem", {}).get("message", "")

        await server.sees(waits)
        support.write_vocab(root, (4, 5, 6), items("b"), version="v2")
        await server.settles(serving("v2", "v2"))


async def test_what_was_prepared_for_an_earlier_deployment_is_no_rollback(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        before = (await server.status())["active"]["snapshot"]
        edit(root, "batch = 16", "batch = 8")
        status = await server.settles(lambda status: status["active"]["snapshot"] != before)
        assert status["history"][-1]["cause"] == "deployment"
        assert {one["id"]: one["deployment"] for one in status["snapshots"]}[before] == "earlier"
        reply = await server.post(f"snapshots/{before}:rollback")
        assert (reply.status, reply.json()["error"]["code"]) == (422, "other_deployment")
        assert not (root / "state" / PIN).exists()
        edit(root, "batch = 8", "batch = 16")  # at once: it is in memory
        status = await server.settles(lambda status: status["active"]["snapshot"] == before)
        assert status["history"][-1]["cause"] == "deployment"


async def test_an_overlay_that_is_being_prepared_keeps_nobody_from_going_back(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        weights(root, "v2", 1)
        old = (await server.settles(serving("v2")))["history"][0]["to"]
        stage = server.live._artifacts.stage
        begun, go, real = asyncio.Event(), asyncio.Event(), stage.prepare

        async def held(want):
            begun.set()
            await go.wait()
            return await real(want)

        monkeypatch.setattr(stage, "prepare", held)
        edit(root, "batch = 16", "batch = 8")
        await begun.wait()
        assert (await server.post(f"snapshots/{old}:rollback")).status == 200
        assert serving("v1")(await server.status())
        go.set()
        status = await server.settles(lambda status: status["history"][-1]["cause"] == "deployment")
        assert serving("v1")(status)


async def test_a_version_that_serves_and_is_removed_is_reported_until_it_is_there_again(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        await server.settles(lambda status: status["desired"])
        (root / "weights" / "v1").rename(tmp_path / "aside")
        status = await server.settles(lambda status: "reason" in state_of(status, "weights", "v1"))
        found = state_of(status, "weights", "v1")
        assert (found["state"], found["reason"]["code"]) == ("active", "changed_on_disk")
        assert "gone" in found["reason"]["message"]
        (tmp_path / "aside").rename(root / "weights" / "v1")
        await server.settles(lambda status: "reason" not in state_of(status, "weights", "v1"))
        shutil.rmtree(root / "vocab" / "v1")
        await server.settles(lambda status: "reason" in state_of(status, "vocab", "v1"))
        assert not problem("no_such_version")(await server.status())


async def test_a_promotion_that_is_refused_keeps_nothing_in_memory(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        gc.collect()
        gc.disable()  # a server has it run rarely: what only it finds keeps a weight slot from the next version
        try:
            served = weakref.ref(server.live._runtime.active.engine)
            spoiled(root, "v9", "nan")
            assert (await server.post("snapshots:promote?wait=30", {"weights": "v9"})).status == 422
            for number in (10, 11, 12):
                weights(root, f"v{number}", number)
                await server.settles(serving(f"v{number}"))
            await server.settles(lambda _: served() is None)
        finally:
            gc.enable()
