"""What passes is tried again, and nothing else is."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import time
import weakref
from itertools import pairwise
from pathlib import Path

import pytest

from app.errors import Rejected
from app.runtime import artifact_updates, contracts, live, memory, preparing, retries, takedown_updates
from app.runtime.retries import FIRST_S, LONGEST_S, Retries
from app.vocab import artifact
from tests import support
from tests.live_support import live_server, until
from tests.runtime.test_cutover import edit, items, serving, state_of, takedown, weights, world


def test_the_next_try_comes_later_each_time_and_once():
    now = [0.0]
    tries = Retries(lambda: now[0])
    for wait in (FIRST_S, 2 * FIRST_S, 4 * FIRST_S):
        tries.refused("v2", "export_failed")
        now[0] += wait - 0.1
        assert tries.due() == ()
        now[0] += 0.2
        assert (tries.due(), tries.due()) == (("v2",), ())
    for _ in range(20):
        tries.refused("v2", "export_failed")
    now[0] += LONGEST_S
    assert tries.due() == ("v2",)
    tries.refused("v2", "export_failed")
    tries.refused("v2", "not_finite")  # what it is now does not pass
    tries.refused("v3", "bad_family")
    now[0] += 10 * LONGEST_S
    assert tries.due() == ()


def failing(monkeypatch, times):
    """An export that fails as often as `times` says; nobody waits long for the next."""
    left = [times]

    def export(*args):
        if left[0]:
            left[0] -= 1
            raise Rejected("export_failed", "Cannot allocate memory", location="contracts")
        return support.not_exported(*args)

    monkeypatch.setattr(contracts, "export_apart", export)
    monkeypatch.setattr(retries, "FIRST_S", 0.01)
    monkeypatch.setattr(artifact_updates, "PERIOD_S", 0.1)
    monkeypatch.setattr(live, "RETRY_PERIOD_S", 0.1)
    return left


async def test_a_start_that_could_not_export_tries_again_without_a_touch(tmp_path, monkeypatch):
    root = world(tmp_path)
    shutil.rmtree(root / "contracts")
    left = failing(monkeypatch, 2)
    async with live_server(root, ready=False) as server:
        await server.settles(lambda status: any(one.startswith("export_failed") for one in status["reasons"]))
        await server.ready()
        assert left == [0]
        assert serving("v1", "v1")(await server.status())


async def test_versions_and_edits_that_could_not_be_exported_are_tried_again(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        before = await server.status()
        shutil.rmtree(root / "contracts")
        left = failing(monkeypatch, 1)
        weights(root, "v2", 1)
        await server.settles(serving("v2"))
        (line,) = server.events("artifact_rejected")
        assert (line["code"], line["version"], left) == ("export_failed", "v2", [0])
        await until(lambda: server.events("contract_stored"))
        shutil.rmtree(root / "contracts")
        left[0] = 1
        edit(root, "context = ", "context = 1")
        status = await server.settles(lambda status: status["active"]["contract"] != before["active"]["contract"])
        assert [line["code"] for line in server.events("deployment_rejected")] == ["export_failed"]
        assert state_of(status, "weights", "v2")["state"] == "active"


async def test_what_is_wrong_with_a_version_is_not_tried_again(tmp_path, monkeypatch):
    root = world(tmp_path)
    monkeypatch.setattr(retries, "FIRST_S", 0.0)
    async with live_server(root) as server:
        weights(root, "v2", 1, ghost=support.onerec_weights(support.onerec_config((4, 5, 6)), 0).popitem()[1])
        await server.settles(lambda status: state_of(status, "weights", "v2")["state"] == "rejected")
        await server.live._artifacts.check()
        assert len(server.events("artifact_rejected")) == 1


def short_of_memory(monkeypatch):
    """Nothing is free until `left[0]` says so; nobody waits long for the next try. tries: when somebody looked."""
    left, tries = [memory.SPARE], []
    monkeypatch.setattr(memory, "free", lambda device: tries.append(time.monotonic()) or left[0])
    monkeypatch.setattr(retries, "FIRST_S", 0.05)
    monkeypatch.setattr(artifact_updates, "PERIOD_S", 0.02)
    monkeypatch.setattr(live, "RETRY_PERIOD_S", 0.02)
    return left, tries


PLENTY = 1 << 40


async def test_a_version_that_did_not_fit_serves_when_memory_comes_back_and_nobody_is_in_a_hurry(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        left, tries = short_of_memory(monkeypatch)
        monkeypatch.setattr(memory, "needed", lambda *_: 1 << 30)
        weights(root, "v2", 1)
        await until(lambda: len(server.events("artifact_rejected")) >= 4)
        status = await server.settles(lambda status: state_of(status, "weights", "v2")["state"] == "rejected")
        assert state_of(status, "weights", "v2")["reason"]["code"] == "no_memory"
        assert serving("v1")(status)
        waits = [after - before for before, after in pairwise(tries)]  # each look comes before its refusal
        assert [wait > 0.05 * 2**n for n, wait in enumerate(waits)] == [True] * len(waits)
        left[0] = PLENTY
        status = await server.settles(serving("v2"))
        assert state_of(status, "weights", "v2").get("reason") is None


async def test_an_edit_that_did_not_fit_is_in_force_when_memory_comes_back(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        left, _ = short_of_memory(monkeypatch)
        monkeypatch.setattr(memory, "needed", lambda *_: 1 << 30)
        edit(root, "batch = 16", "batch = 8")
        status = await server.settles(lambda status: status["deployment"]["state"] == "rejected")
        assert status["deployment"]["reason"]["code"] == "no_memory"
        left[0] = PLENTY
        await server.settles(lambda status: status["deployment"]["state"] == "in force")


async def test_a_start_that_did_not_fit_becomes_ready_when_memory_comes_back(tmp_path, monkeypatch):
    left, _ = short_of_memory(monkeypatch)
    async with live_server(world(tmp_path), ready=False) as server:
        status = await server.settles(lambda status: any(one.startswith("no_memory") for one in status["reasons"]))
        assert not status["ready"]
        left[0] = PLENTY
        await server.ready()


async def test_memory_that_runs_out_in_the_middle_of_anything_is_said_and_tried_again(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        left, _ = short_of_memory(monkeypatch)
        left[0], broken = PLENTY, [True]

        def runs_out(real):
            def call(*args):
                if broken[0]:
                    raise MemoryError("Unable to allocate 9 GiB")
                return real(*args)

            return call

        with monkeypatch.context() as patch:  # of two versions together
            patch.setattr(preparing, "bind", runs_out(preparing.bind))
            weights(root, "v2", 1)
            status = await server.settles(lambda status: state_of(status, "weights", "v2")["state"] == "rejected")
            reason = state_of(status, "weights", "v2")["reason"]
            assert (reason["code"], "9 GiB" in reason["message"], serving("v1")(status)) == ("no_memory", True, True)
            broken[0] = False
            await server.settles(serving("v2"))
        broken[0] = True
        with monkeypatch.context() as patch:  # of one
            patch.setattr(artifact, "load_vocab", runs_out(artifact.load_vocab))
            support.write_vocab(root, (4, 5, 6), items("b"), "v2")
            status = await server.settles(lambda status: state_of(status, "vocab", "v2")["state"] == "rejected")
            assert state_of(status, "vocab", "v2")["reason"]["code"] == "no_memory"
            broken[0] = False
            await server.settles(serving("v2", "v2"))


@pytest.mark.parametrize("call", ["readv", "read"])  # content; manifests, and what is hashed beside it
async def test_a_disk_that_does_not_answer_for_a_while_costs_a_version_time_and_nothing_else(
    tmp_path, monkeypatch, call
):
    root = world(tmp_path)
    async with live_server(root) as server:
        short_of_memory(monkeypatch)[0][0] = PLENTY
        real = getattr(os, call)

        def broken(descriptor, *rest):
            if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(root.resolve()):
                raise OSError(errno.EIO, "Input/output error")
            return real(descriptor, *rest)

        for kind, publish in (
            ("weights", lambda: weights(root, "v2", 1)),
            ("vocab", lambda: support.write_vocab(root, (4, 5, 6), items("b"), "v2")),
        ):
            with monkeypatch.context() as patch:
                publish()
                patch.setattr(os, call, broken)
                (root / kind / "v2" / "MANIFEST.json").touch()  # it may have been read already
                status = await server.settles(
                    lambda status, k=kind: state_of(status, k, "v2").get("reason", {}).get("code") == "disk_error"
                )
                place = state_of(status, kind, "v2")["reason"]["location"]
                assert (place.startswith(f"{kind}/v2/"), status["active"][kind]["version"]) == (True, "v1")
            await server.settles(serving("v2", "v2" if kind == "vocab" else "v1"))


class Disk:
    """One that does not give files of these names. Any thread."""

    def __init__(self, monkeypatch, *names):
        self.broken, self._names, self._real = True, names, os.read
        monkeypatch.setattr(os, "read", self._read)

    def _read(self, descriptor, *rest):
        if self.broken and Path(f"/proc/self/fd/{descriptor}").readlink().name in self._names:
            raise OSError(errno.EIO, "Input/output error")
        return self._real(descriptor, *rest)


async def test_a_manifest_that_cannot_be_read_for_longer_than_until_the_next_try_is_read_when_it_can_be(
    tmp_path, monkeypatch
):
    root = world(tmp_path)
    async with live_server(root) as server:
        short_of_memory(monkeypatch)[0][0] = PLENTY
        disk = Disk(monkeypatch, "MANIFEST.json")
        weights(root, "v2", 1)
        await server.settles(
            lambda status: state_of(status, "weights", "v2").get("reason", {}).get("code") == "disk_error"
        )
        updates = server.live._artifacts
        await until(
            lambda: ("weights", "v2") not in updates._refused and updates._settled[0]
        )  # tried again, and given up
        disk.broken = False
        await server.settles(serving("v2"))


async def test_a_take_down_list_that_cannot_be_read_for_a_while_is_in_force_when_it_can_be(tmp_path, monkeypatch):
    root = world(tmp_path)
    monkeypatch.setattr(takedown_updates, "PERIOD_S", 0.05)
    async with live_server(root) as server:
        for version, name in (("v1", "MANIFEST.json"), ("v2", "items.txt")):
            with monkeypatch.context() as patch:
                disk = Disk(patch, name)
                takedown(root, version, ["a1"])
                status = await server.settles(
                    lambda status, v=version: state_of(status, "takedowns", v)["state"] == "rejected"
                )
                assert state_of(status, "takedowns", version)["reason"]["code"] == "disk_error"
                disk.broken = False
                await server.settles(lambda status, v=version: status["active"]["takedowns"]["version"] == v)


async def test_a_start_on_a_disk_that_does_not_answer_becomes_ready_when_it_does(tmp_path, monkeypatch):
    root = world(tmp_path)
    short_of_memory(monkeypatch)[0][0] = PLENTY

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", broken)
        async with live_server(root, ready=False) as server:
            await server.settles(lambda status: any(one.startswith("disk_error") for one in status["reasons"]))
            patch.undo()
            await server.ready()


async def test_many_catalogues_under_requests_that_take_long_are_bounded_by_memory_and_retired_when_free(
    tmp_path, monkeypatch
):
    root, alive, pins = world(tmp_path), [], []

    def living():
        gc.collect()
        return sum(codes() is not None for codes in alive)

    left, _ = short_of_memory(monkeypatch)
    left[0] = PLENTY
    monkeypatch.setattr(memory, "free", lambda _: PLENTY if living() < 5 else memory.SPARE)
    real = preparing.read_fitting_vocab

    def read(*args):
        vocab = real(*args)
        alive.append(weakref.ref(vocab.codes))
        return vocab

    monkeypatch.setattr(preparing, "read_fitting_vocab", read)
    async with live_server(root) as server:
        runtime = server.live._runtime
        for number in range(2, 10):
            pins.append(runtime._pins.pin())  # as a request that is queued or running
            support.write_vocab(root, (4, 5, 6), items(f"n{number}-"), f"v{number}")
            status = await server.settles(
                lambda status, v=f"v{number}": state_of(status, "vocab", v)["state"] in {"active", "rejected"}
            )
        assert state_of(status, "vocab", "v9")["reason"]["code"] == "no_memory"
        assert (living(), status["active"]["vocab"]["version"]) == (5, "v6")
        assert (await server.recommend("i1"))["versions"]["vocab"] == "v6"
        while pins:
            runtime._pins.release(pins.pop())
        status = await server.settles(serving(None, "v9"))
        await until(lambda: living() <= 2)  # what serves, and one for a rollback
        assert len(status["snapshots"]) <= 2
