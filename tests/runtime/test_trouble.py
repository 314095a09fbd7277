"""Trouble around a live server: full disks, clocks that jump, names of equal content, versions that come too early."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.runtime import artifact_updates, loader, status
from app.vocab.publish import commit, draft
from tests import support
from tests.api.support import ask, get
from tests.live_support import live_server, until
from tests.runtime.test_cutover import SIZES, Load, Truth, items, serving, state_of, weights, world


@contextmanager
def small_disk(place: Path, size: str):
    """A file system of its own. Skips where nobody may mount one."""
    place.mkdir(parents=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no tmpfs here: {made.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(place: Path) -> Path:
    """Leave no byte free."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as stream:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    stream.write(b"x" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return ballast


async def more_answers(load: Load, count: int) -> None:
    before = load.answers
    await load.sees(lambda: load.answers >= before + count)


async def test_a_full_disk_stops_no_answer_and_every_decision_says_so_until_there_is_room(tmp_path):
    with small_disk(tmp_path / "disk", "4m") as disk:
        root = world(disk)
        async with live_server(root) as server:
            load = Load(server, Truth(root), clients=2)
            weights(root, "v2", 1)
            old = (await server.settles(serving("v2")))["history"][0]["to"]
            ballast = await asyncio.to_thread(fill, disk)
            reply = await server.post(f"snapshots/{old}:rollback")
            assert (reply.status, "No space" in reply.json()["error"]["message"]) == (503, True)
            with pytest.raises(OSError, match="No space"):
                weights(root, "v3", 2)
            await more_answers(load, 20)
            status = await server.status()
            assert serving("v2")(status)
            assert status["ready"]
            assert [path.name for path in (root / "weights").iterdir() if path.name.startswith(".")] == []
            ballast.unlink()
            weights(root, "v3", 2)
            await server.settles(serving("v3"))
            assert (await server.post(f"snapshots/{old}:rollback")).status in {200, 422}  # it may have been retired
            await load.end()


async def test_a_version_that_was_half_written_on_a_full_disk_is_never_more_than_incomplete(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        half = root / "weights" / "v2"
        half.mkdir()
        (half / "config.json").write_text("{")
        (half / "model.safetensors").write_bytes(b"\0" * 100)
        (half / "MANIFEST.json").write_bytes(b"")  # written last, and nothing of it arrived
        status = await server.settles(lambda status: state_of(status, "weights", "v2")["state"] is not None)
        assert state_of(status, "weights", "v2")["state"] in {"incomplete", "rejected"}
        assert serving("v1")(status)
        weights(root, "v3", 1)
        await server.settles(serving("v3"))


async def test_clocks_and_file_times_that_jump_change_nothing(tmp_path, monkeypatch):
    root, shift = world(tmp_path), [0.0]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])

    class Jumping(status.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(time.time(), tz)

    monkeypatch.setattr(status, "datetime", Jumping)
    async with live_server(root) as server:
        load = Load(server, Truth(root), clients=2)
        for number, (jump, times) in enumerate([(-86400.0, 0), (0.0, 4_102_444_800), (365 * 86400.0, 1)], 2):
            shift[0] = jump
            with draft(root, "weights") as made:
                config = support.onerec_config(SIZES)
                made.write("config.json", [support.json.dumps(config).encode()])
                made.write("model.safetensors", [support.save(support.onerec_weights(config, number))])
                for path in made.directory.iterdir():
                    os.utime(path, (times, times))
                commit(made, "weights", f"v{number}", "tests", {})
            (root / "policies" / "narrow.yaml").write_text(f"widebeam: 1\nwidths: [{number}, 3, 3]\n")
            os.utime(root / "policies" / "narrow.yaml", (times, times))
            document = await server.settles(serving(f"v{number}"))
            assert document["uptime_s"] < 600
        await load.end()
        assert [one["cause"] for one in document["history"] if one["cause"] == "newest"] == ["newest"] * 3


async def test_equal_content_under_another_name_is_the_same_snapshot_and_is_called_by_the_new_name(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        first = (await server.status())["active"]["snapshot"]
        support.write_vocab(root, SIZES, items("a"), "v2")
        status = await server.settles(serving("v1", "v2"))
        assert status["active"]["snapshot"] == first
        assert [one["vocab"]["version"] for one in status["snapshots"]] == ["v2"]
        assert state_of(status, "vocab", "v2")["state"] == "active"
        assert state_of(status, "vocab", "v1")["state"] == "retired"
        assert (await server.recommend("i1"))["versions"]["vocab"] == "v2"
        weights(root, "v2", 0)
        status = await server.settles(serving("v2", "v2"))
        assert status["active"]["snapshot"] == first


async def test_nothing_is_called_by_the_name_of_a_version_of_equal_content_whose_files_are_damaged(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        for kind, file in (("weights", "model.safetensors"), ("vocab", "items.safetensors")):
            copy = shutil.copytree(root / kind / "v1", root / kind / ".v2")
            manifest = json.loads((copy / "MANIFEST.json").read_text())
            (copy / "MANIFEST.json").write_text(json.dumps({**manifest, "version": "v2"}))
            whole = (copy / file).read_bytes()
            (copy / file).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            copy.rename(root / kind / "v2")
            status = await server.settles(lambda status, kind=kind: state_of(status, kind, "v2")["state"] == "rejected")
            assert state_of(status, kind, "v2")["reason"]["code"] == "file_digest"
            assert serving("v1", "v1")(status)
        weights(root, "v3", 0)
        assert state_of(await server.settles(serving("v3", "v1")), "weights", "v1")["state"] == "retired"


async def test_weights_that_come_before_their_vocab_never_serve_on_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr(artifact_updates, "PERIOD_S", 0.2)
    root = world(tmp_path)
    async with live_server(root) as server:
        load = Load(server, Truth(root), clients=2)
        await load.begun()
        weights(root, "v2", 1, {"vocab": ["v2"]})
        status = await server.settles(lambda status: state_of(status, "weights", "v2")["state"] == "waiting")
        assert state_of(status, "weights", "v2")["reason"]["message"] == "requires vocab v2"
        await more_answers(load, 20)  # many looks at the disk later
        assert serving("v1", "v1")(await server.status())
        support.write_vocab(root, SIZES, items("b"), "v2")
        await server.settles(serving("v2", "v2"))
        await load.sees(lambda: ("v2", "v2") in load.seen)
        assert set(await load.end()) == {("v1", "v1"), ("v2", "v2")}


async def test_a_start_that_takes_its_time_is_alive_says_what_it_does_and_is_ready_once(tmp_path, monkeypatch):
    root, reading, go = world(tmp_path), threading.Event(), threading.Event()
    real = loader.read_weights

    def read(*args):
        reading.set()
        assert go.wait(100)
        return real(*args)

    monkeypatch.setattr(loader, "read_weights", read)
    async with live_server(root, ready=False) as server:
        await until(reading.is_set)
        for _ in range(20):
            assert (await get(server.public, "/livez")).status == 200
            reply = await get(server.public, "/readyz")
            assert (reply.status, reply.json()["reasons"]) == (503, ["starting: artifacts are being loaded"])
            assert (await ask(server.public, {"context": {"history": []}, "k": 1}, path="/v1/recommend")).status == 503
        go.set()
        await server.ready()
        for _ in range(20):
            assert (await get(server.public, "/readyz")).status == 200
        assert (await server.recommend("i1"))["items"]


async def test_a_pin_that_comes_and_goes_between_two_looks_at_the_disk_is_followed_back(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        weights(root, "v2", 1)
        old = (await server.settles(serving("v2")))["history"][0]["to"]
        updates, runtime = server.live._artifacts, server.live._runtime
        await until(lambda: updates._settled[0] == updates._survey.fingerprint)  # there is nothing left to do
        looks, go, real = asyncio.Event(), asyncio.Event(), updates._still_survey

        async def later():
            looks.set()
            await go.wait()
            return await real()

        monkeypatch.setattr(updates, "_still_survey", later)
        server.live._hints["artifacts"].set()
        await looks.wait()  # from here on nobody looks
        assert (await server.post(f"snapshots/{old}:rollback")).status == 200
        assert runtime.active.weights.version == "v1"
        assert (await server.post("snapshots:unpin")).json() == {"pin": None}
        assert not (root / "state" / "pin.json").exists()  # the disk is as it was when v2 was put in force
        go.set()
        await server.settles(serving("v2"))


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"weights":' * 100_000, b"\xff", b"7", b'{"weights": "../v1"}'])
async def test_a_pin_that_nobody_can_read_is_said_and_the_next_decision_replaces_it(tmp_path, data):
    root = world(tmp_path)
    async with live_server(root) as server:
        (root / "state").mkdir(exist_ok=True)
        (root / "state" / "pin.json").write_bytes(data)
        status = await server.settles(lambda status: "problem" in status["desired"])
        assert status["desired"]["problem"]["location"] == "state/pin.json"
        listed = await get(server.admin, "/admin/v1/snapshots")
        assert (listed.status, listed.json()["pin"]) == (200, None)
        reply = await server.post(f"snapshots/{status['active']['snapshot']}:pin")
        assert (reply.status, reply.json()["pin"]) == (200, {"weights": "v1", "vocab": "v1"})
        await server.settles(lambda status: "problem" not in status["desired"])
