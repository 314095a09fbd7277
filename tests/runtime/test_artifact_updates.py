"""What serves beside a load: what is in memory does not wait for it; what was overtaken is not loaded by surprise."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading

import pytest

from app.policies import cache
from app.runtime import preparing, state_dir
from app.runtime.takedowns import Takedowns
from tests import support
from tests.live_support import live_server, until
from tests.runtime.test_cutover import SIZES, Slow, items, serving, state_of, takedown, weights, world
from tests.runtime.test_stage import held

SOON_S = 60


def other_items(prefix):
    """Other prefixes than those of `items`: policies are compiled anew for them."""
    return [{"id": f"{prefix}{n}", "sid": sid} for n, sid in enumerate(support.random_sids(SIZES, 30).tolist())]


class Held:
    """What a thread does waits for permission once `when` says so; another thread that does it does not."""

    def __init__(self, monkeypatch, place, name, when):
        self.entered, self.go, real = threading.Event(), threading.Event(), getattr(place, name)

        def act(*args, **kwargs):
            if when(*args, **kwargs):
                self.entered.set()
                assert self.go.wait(100)
            return real(*args, **kwargs)

        monkeypatch.setattr(place, name, act)

    async def begun(self):
        await until(self.entered.is_set)


def loads_weights(monkeypatch, root):
    """weights/v3, which does not end."""
    slow = Slow(monkeypatch, "v3")
    weights(root, "v3", 2)
    return slow


def loads_vocab(monkeypatch, root):
    """vocab/v2, which does not end."""
    slow = Held(monkeypatch, preparing, "read_fitting_vocab", lambda directory, *_: directory.name == "v2")
    support.write_vocab(root, SIZES, items("b"), version="v2")
    return slow


async def serve_v2_over_v1(server):
    weights(server.root, "v2", 1)
    return (await server.settles(serving("v2")))["history"][0]["to"]


def release(root, versions):
    support.replace_text(root / "release.json", json.dumps(versions))


@pytest.mark.parametrize("loads", [loads_weights, loads_vocab])
@pytest.mark.parametrize("asked", [{"weights": "v1"}, {"weights": "v1", "vocab": "v1"}])
async def test_a_promotion_by_versions_does_not_wait_for_a_load(loads, asked, tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        await serve_v2_over_v1(server)
        slow = loads(monkeypatch, root)
        await slow.begun()
        async with asyncio.timeout(SOON_S):
            reply = await server.post("snapshots:promote", asked)
        assert (reply.status, reply.json()["state"]) == (200, "active")
        assert serving("v1", "v1")(await server.status())
        assert not slow.go.is_set()
        slow.go.set()  # and what was being loaded does not serve against the pin
        kind, version = ("weights", "v3") if loads is loads_weights else ("vocab", "v2")
        if kind in asked:
            status = await server.settles(lambda status: state_of(status, kind, version)["state"] == "ready")
            assert serving("v1", "v1")(status)
            assert [one["weights"] for one in status["history"]] == ["v1", "v2", "v1"]


@pytest.mark.parametrize("file", ["release.json", "state/pin.json"])
async def test_what_a_file_asks_for_does_not_wait_for_a_load_where_it_is_in_memory(file, tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        await serve_v2_over_v1(server)
        slow = loads_weights(monkeypatch, root)
        await slow.begun()
        (root / file).parent.mkdir(exist_ok=True)
        support.replace_text(root / file, json.dumps({"weights": "v1"}))
        status = await server.settles(serving("v1"))
        assert not slow.go.is_set()
        assert status["history"][-1]["cause"] == ("pin" if "pin" in file else "release")
        slow.go.set()
        support.replace_text(root / file, json.dumps({"weights": "v3"}))
        await server.settles(serving("v3"))


async def test_following_the_newest_again_does_not_wait_for_a_load_of_something_newer(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        old = await serve_v2_over_v1(server)
        assert (await server.post(f"snapshots/{old}:rollback")).status == 200
        slow = loads_weights(monkeypatch, root)
        await slow.begun()
        release(root, {"weights": "v2", "vocab": "v1"})
        assert (await server.post("snapshots:unpin")).status == 200
        await server.settles(serving("v2"))
        assert not slow.go.is_set()
        slow.go.set()


async def test_what_is_in_memory_under_the_overlay_that_serves_does_not_wait_for_an_edited_one(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        await serve_v2_over_v1(server)
        slow = Slow(monkeypatch, "v2")
        overlay = root / "deployment.toml"
        support.replace_text(overlay, overlay.read_text().replace("batch = 16", "batch = 8"))
        again = Held(monkeypatch, preparing, "again", lambda *_: True)
        await until(lambda: again.entered.is_set() or slow.entered.is_set())
        async with asyncio.timeout(SOON_S):
            assert (await server.post("snapshots:promote", {"weights": "v1"})).status == 200
        assert serving("v1")(await server.status())
        again.go.set()
        slow.go.set()
        status = await server.settles(lambda status: status["deployment"]["state"] == "in force")
        assert serving("v1")(status)


def compiles(monkeypatch):
    """Policies for vocab/v2."""
    live = []

    def anew(name, library, contract, catalogue, **_):
        live.append(catalogue.prefixes)
        return catalogue.prefixes != live[0]

    return Held(monkeypatch, cache, "compile_policy", anew)


def looks_up(monkeypatch):
    """Take-downs in vocab/v2."""
    live = []

    def anew(takedowns, vocab):
        live.append(len(vocab))
        return len(vocab) == 30

    return Held(monkeypatch, Takedowns, "items", anew)


@pytest.mark.parametrize("what", [compiles, looks_up])
async def test_a_rollback_does_not_wait_for_what_is_composed_for_another_set(what, tmp_path, monkeypatch):
    root = world(tmp_path)
    takedown(root, "t1", ["i5"])
    slow = what(monkeypatch)
    async with live_server(root) as server:
        old = await serve_v2_over_v1(server)
        support.write_vocab(root, SIZES, other_items("i"), version="v2")
        await slow.begun()
        async with asyncio.timeout(SOON_S):
            assert (await server.post(f"snapshots/{old}:rollback")).status == 200
            support.replace_text(root / "policies" / "narrow.yaml", "widebeam: 1\nwidths: [2, 2, 2]\n")
            assert (await server.post("policies:reload")).status == 200
            assert len((await server.recommend("i1", policy="narrow"))["items"]) == 2
        assert serving("v1", "v1")(await server.status())
        assert not slow.go.is_set()
        slow.go.set()
        status = await server.settles(lambda status: state_of(status, "vocab", "v2")["state"] == "ready")
        assert serving("v1", "v1")(status)


async def test_a_decision_overtakes_what_is_about_to_serve_because_it_is_newer(tmp_path, monkeypatch):
    async with held(tmp_path, monkeypatch) as scene:
        server = scene.server
        await scene.queue(2)
        assert (await server.post("snapshots:unpin")).status == 200
        await until(lambda: scene.runtime._batcher._once)  # v2 waits for its moment
        decision = asyncio.create_task(server.post(f"snapshots/{scene.ids['v1']}:pin"))
        await until((server.root / "state" / "pin.json").exists)
        await until(lambda: server.live._artifacts._decisions == 3)
        scene.gate.open()
        assert (await decision).status == 200
        await server.live._artifacts.check()
        assert await scene.history() == [("start", "v1")]
        assert await scene.answers() == ["v1"] * 3


async def test_whoever_asks_for_the_same_again_and_again_delays_nothing(tmp_path, monkeypatch):
    async with held(tmp_path, monkeypatch) as scene:
        server, asked = scene.server, {"weights": "v2"}
        await scene.queue(2)
        first = asyncio.create_task(server.post("snapshots:promote", asked))
        await until(lambda: scene.runtime._batcher._once)
        again = [asyncio.create_task(server.post("snapshots:promote", asked)) for _ in range(3)]
        await until(lambda: len(server.live._artifacts.stage._promoting._waiters or ()) >= 3)
        scene.gate.let(1)
        assert {(await one).status for one in (first, *again)} == {200}
        assert (await scene.history())[1:] == [("pin", "v2")]


async def test_the_pin_and_what_serves_are_of_the_same_decision_however_slow_a_disk_is(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        v1 = await serve_v2_over_v1(server)
        v2 = (await server.status())["active"]["snapshot"]
        written = threading.Event()

        def is_first(path, data):
            if path.name == "pin.json" and b"v2" in data:
                written.set()
            return path.name == "pin.json" and b"v1" in data

        slow = Held(monkeypatch, state_dir, "write", is_first)
        first = asyncio.create_task(server.post(f"snapshots/{v1}:rollback"))
        await slow.begun()
        second = asyncio.create_task(server.post(f"snapshots/{v2}:promote"))
        beside = await asyncio.to_thread(written.wait, 1)  # as long as it takes where it does not wait for the first
        slow.go.set()
        assert [(await one).status for one in (first, second)] == [200, 200]
        assert not beside
        assert serving("v2")(await server.status())
        assert json.loads((root / "state" / "pin.json").read_text())["weights"] == "v2"


async def test_a_decision_that_is_refused_leaves_the_pin_of_a_later_one(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        old = await serve_v2_over_v1(server)
        stage, pin, later = server.live._artifacts.stage, root / "state" / "pin.json", '{"weights": "v2"}'

        async def refuse(*_):
            support.replace_text(pin, later)
            raise preparing.Rejected("no_default_policy", "the default policy cannot serve with it")

        with monkeypatch.context() as patch:
            patch.setattr(stage, "promote", refuse)
            assert (await server.post(f"snapshots/{old}:rollback")).status == 422
        assert pin.read_text() == later


# ---- what was overtaken -----------------------------------------------------------------------------------------


def superseded(kind, version):
    def look(status):
        found = state_of(status, kind, version)
        return (found["state"], found.get("reason", {}).get("code")) == ("discovered", "superseded")

    return look


async def test_what_was_overtaken_says_so_and_is_loaded_when_it_is_asked_for_and_not_before(tmp_path, monkeypatch):
    root, slow = world(tmp_path), Slow(monkeypatch, "v3")
    async with live_server(root) as server:
        weights(root, "v3", 1)
        await slow.begun()
        weights(root, "v4", 2)
        weights(root, "v5", 3)
        slow.go.set()
        await server.settles(serving("v5"))
        await server.settles(superseded("weights", "v4"))
        said = [one for one in server.events("artifact") if one["version"] == "v4"]
        (root / "weights" / "v4" / "config.json").touch()
        shutil.rmtree(root / "weights" / "v5")
        await server.live._artifacts.check()
        status = await server.status()
        assert serving("v5")(status)
        assert superseded("weights", "v4")(status)
        assert [one for one in server.events("artifact") if one["version"] == "v4"] == said, "a touch is no news"
        assert (await server.post("snapshots:promote?wait=60", {"weights": "v4"})).status == 200
        status = await server.status()
        assert (state_of(status, "weights", "v4")["state"], state_of(status, "weights", "v4").get("reason")) == (
            "active",
            None,
        )


async def test_what_waited_for_something_is_overtaken_too(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        weights(root, "v2", 1, {"vocab": ["v9"]})
        await server.settles(lambda status: state_of(status, "weights", "v2")["state"] == "waiting")
        weights(root, "v3", 2)
        await server.settles(serving("v3"))
        await server.settles(superseded("weights", "v2"))
        status = await server.status()
        assert "problem" not in status["desired"]
        assert (await server.post("snapshots:promote", {"weights": "v2"})).status == 202
        status = await server.settles(lambda status: "problem" in status["desired"])
        assert status["desired"]["problem"]["code"] == "requires", "what keeps it, not that it is old"


async def test_what_is_newer_and_bad_brings_back_what_it_had_overtaken(tmp_path, monkeypatch):
    root, slow = world(tmp_path), Slow(monkeypatch, "v4")
    async with live_server(root) as server:
        release(root, {"weights": "v1"})
        await server.settles(lambda status: status["desired"].get("asked") == {"weights": "v1"})
        weights(root, "v3", 1)
        weights(root, "v4", 2)
        with (root / "weights" / "v4" / "model.safetensors").open("r+b") as stream:
            stream.seek(-8, 2)
            stream.write(b"\x7f" * 8)
        await server.settles(lambda status: state_of(status, "weights", "v4")["state"] == "discovered")
        (root / "release.json").unlink()
        await slow.begun()
        await server.settles(superseded("weights", "v3"))
        slow.go.set()
        await server.settles(serving("v3"))
        status = await server.status()
        assert state_of(status, "weights", "v4")["state"] == "rejected"
        assert "reason" not in state_of(status, "weights", "v3")


async def test_older_versions_of_a_start_say_so(tmp_path):
    root = world(tmp_path)
    weights(root, "v2", 1)
    support.write_vocab(root, SIZES, items("b"), version="v2")
    async with live_server(root) as server:
        status = await server.status()
        assert superseded("weights", "v1")(status)
        assert superseded("vocab", "v1")(status)
        before = len(server.events("artifact"))
        await server.live._artifacts.check()
        assert len(server.events("artifact")) == before
