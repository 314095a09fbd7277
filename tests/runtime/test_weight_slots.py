"""Weights in fixed slots: written only while nobody holds them, and no more memory however many versions come."""

from __future__ import annotations

from app.cli.compose import read_deployment
from tests import support
from tests.live_support import live_server
from tests.runtime.test_cutover import Load, Truth, edit, serving, state_of, weights, world


async def test_a_load_waits_for_a_request_that_still_runs_on_the_oldest_version(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        truth, runtime = Truth(root), server.live._runtime
        expected = truth.of("v1", "v1", "base", ("i1", "i2"))
        # a snapshot that a request holds, as a batch in the engine thread does
        pinned = runtime._pins.pin()
        old = pinned.engine.slot
        slots = old.slots
        weights(root, "v2", 1)
        await server.settles(serving("v2"))
        weights(root, "v3", 2)
        await server.settles(serving("v3"))
        assert (slots.most, slots.lent, slots.full) == (3, 3, True)  # active, kept, drained for ever
        weights(root, "v4", 3)
        status = await server.settles(lambda status: state_of(status, "weights", "v4")["state"] == "waiting")
        assert state_of(status, "weights", "v4")["reason"]["code"] == "no_slot"
        assert serving("v3")(status)
        assert (await server.recommend("i1", "i2", k=10))["versions"]["weights"] == "v3"
        # what the old request computes with has not been touched
        job = support.job_of(pinned, read_deployment(root), ("i1", "i2"), k=10, policy="base")
        ranked = support.run_batch([job])[0]
        assert (pinned.vocab.ids(ranked.items), ranked.scores.tolist()) == expected
        numbers = {one.snapshot.engine.slot.number for one in server.live._artifacts.stage.residents}
        assert old.number not in numbers
        freed = old.number
        runtime._pins.release(pinned)
        del pinned, job, old
        await server.settles(serving("v4"))
        assert runtime.active.engine.slot.number == freed
        truth.check(await server.recommend("i1", "i2", k=10, policy="base"), ("i1", "i2"))


async def test_a_newer_version_takes_the_slot_of_one_that_was_ready_and_never_served(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        weights(root, "v2", 1)
        await server.settles(serving("v2"))
        snapshots = (await server.status())["snapshots"]
        await server.post(f"snapshots/{snapshots[0]['id']}:promote")
        for number in range(3, 7):  # while pinned, newer ones become ready, one after the other
            weights(root, f"v{number}", number)
            status = await server.settles(
                lambda status, v=f"v{number}": (state_of(status, "weights", v) or {}).get("state") == "ready"
            )
        slots = server.live._runtime.active.engine.slot.slots
        assert slots.lent == 3
        assert {one["weights"]["version"] for one in status["snapshots"]} == {"v1", "v2", "v6"}
        assert state_of(status, "weights", "v5")["state"] == "retired"


async def test_versions_take_turns_in_three_slots(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        load, seen = Load(server, Truth(root), clients=2), set()
        for number in range(2, 14):
            weights(root, f"v{number}", number)
            await server.settles(serving(f"v{number}"))
            slot = server.live._runtime.active.engine.slot
            seen.add((slot.number, *(tensor.data_ptr() for tensor in slot.tensors.values())))
        await load.end()
        assert len(seen) == 3, "three slots, always at the same addresses"
        assert {number for number, *_ in seen} == {0, 1, 2}
        assert slot.slots.lent + bool(slot.slots.free_bytes) <= 3
        counters = (await server.status())["counters"]
        assert counters["failed"] == counters["refused"] == 0


async def test_a_refused_edit_of_limits_gives_its_weight_slot_back(tmp_path, monkeypatch, no_collections):
    root = world(tmp_path)
    async with live_server(root) as server:
        runtime = server.live._runtime
        slots, contract = runtime.active.engine.slot.slots, runtime.active.contract.id
        real = runtime.warm

        async def warm(snapshot, plans, **rest):
            return await real(snapshot, plans, **rest) if snapshot.contract.id == contract else {"base": "it broke"}

        with monkeypatch.context() as patch:
            patch.setattr(runtime, "warm", warm)
            edit(root, "batch = 16", "batch = 8")
            status = await server.settles(lambda status: status["deployment"]["state"] == "rejected")
            assert status["deployment"]["reason"]["code"] == "canary_failed"
            for number in range(2, 6):  # and versions go on
                weights(root, f"v{number}", number)
                status = await server.settles(serving(f"v{number}"))
            assert status["deployment"]["state"] == "rejected"
            await server.settles(lambda status: slots.lent == 2)  # the version before last goes a little after the swap
