"""Files of versions in memory are looked at beside everything else: a new version does not wait for that."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from app.errors import Rejected
from app.runtime import artifact_updates, audit, retries
from app.runtime.audit import Audit
from app.runtime.survey import Candidate
from app.vocab import manifest
from app.vocab.manifest import Found
from tests import support
from tests.live_support import live_server, until
from tests.runtime.test_cutover import SIZES, items, serving, state_of, weights, world


class Held:
    """Looks at the content of a version that wait until they are let go. Any thread."""

    def __init__(self, monkeypatch, version):
        self.version, self.begun, self.go = version, threading.Event(), threading.Event()
        monkeypatch.setattr(audit, "verify", self.verify)

    def verify(self, directory, *rest, **named):
        if directory.name == self.version:
            self.begun.set()
            self.go.wait(100)
        return manifest.verify(directory, *rest, **named)


async def followed(server):
    """The disk has been looked at: what changes from now on is a change."""
    await server.settles(lambda status: status["desired"])


def touched(root, kind, version, place):
    """A file of a version has another name somewhere else now, as `cp -al` gives it: nothing else has changed."""
    file = root / kind / version / manifest.FILE
    place.mkdir(exist_ok=True)
    os.link(file, place / f"{kind}-{version}-{len(list(place.iterdir()))}")


def reason(status, version, kind="weights"):
    return state_of(status, kind, version).get("reason", {}).get("code")


async def test_a_new_version_does_not_wait_for_a_look_at_the_files_of_those_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(artifact_updates, "PERIOD_S", 0.2)
    root = world(tmp_path)
    async with live_server(root) as server:
        await followed(server)
        held = Held(monkeypatch, "v1")
        try:
            touched(root, "weights", "v1", tmp_path / "store")
            await server.settles(lambda _: held.begun.is_set())
            weights(root, "v2", 1)
            await server.settles(serving("v2"))
            touched(root, "vocab", "v1", tmp_path / "store")
            support.write_vocab(root, SIZES, items("b"), version="v2")
            await server.settles(serving("v2", "v2"))
            assert not held.go.is_set()
        finally:
            held.go.set()
        with (root / "weights" / "v2" / "model.safetensors").open("r+b") as file:  # never of another size meanwhile
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        status = await server.settles(lambda status: reason(status, "v2") == "changed_on_disk")
        assert "SHA-256 is" in state_of(status, "weights", "v2")["reason"]["message"]


@pytest.mark.parametrize("change", ["overwritten", "removed"])
async def test_what_serves_is_not_exchanged_for_something_older_when_its_files_go_bad(tmp_path, monkeypatch, change):
    monkeypatch.setattr(artifact_updates, "PERIOD_S", 0.2)
    root = world(tmp_path)
    async with live_server(root) as server:
        weights(root, "v2", 1)
        await server.settles(serving("v2"))
        if change == "removed":
            shutil.rmtree(root / "weights" / "v2")
        else:
            (root / "weights" / "v2" / "model.safetensors").write_bytes(b"")
            await server.settles(lambda status: reason(status, "v2") == "changed_on_disk")
        for version in ("v8", "v9"):  # when the second one is refused, all that comes before it is done with
            (root / "vocab" / version).mkdir()
            (root / "vocab" / version / manifest.FILE).write_bytes(b"{")
            status = await server.settles(lambda status, v=version: state_of(status, "vocab", v)["state"] == "rejected")
        assert serving("v2")(status)
        assert [cutover["cause"] for cutover in status["history"]] == ["start", "newest"]
        weights(root, "v3", 2)
        await server.settles(serving("v3"))


async def test_what_comes_under_the_name_of_a_version_in_memory_serves_once_it_was_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(artifact_updates, "PERIOD_S", 0.2)
    root = world(tmp_path)
    async with live_server(root) as server:
        await followed(server)
        before = (await server.status())["active"]["weights"]["digest"]
        held = Held(monkeypatch, "v1")
        (root / "weights" / "v1").rename(tmp_path / "gone")
        weights(root, "v1", 1)
        await server.settles(lambda _: held.begun.is_set())
        support.write_vocab(root, SIZES, items("b"), version="v2")  # what is not doubted goes on meanwhile
        status = await server.settles(serving("v1", "v2"))
        assert (status["active"]["weights"]["digest"], held.go.is_set()) == (before, False)
        held.go.set()
        status = await server.settles(lambda status: status["active"]["weights"]["digest"] != before)
        assert reason(status, "v1") is None


async def test_what_has_left_memory_is_looked_at_by_whoever_loads_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr(artifact_updates, "PERIOD_S", 0.2)
    root = world(tmp_path)
    async with live_server(root) as server:
        await followed(server)
        held = Held(monkeypatch, "v1")
        try:
            touched(root, "weights", "v1", tmp_path / "store")
            await server.settles(lambda _: held.begun.is_set())
            for number in (2, 3):
                weights(root, f"v{number}", number)
                await server.settles(serving(f"v{number}"))
            await server.settles(lambda status: state_of(status, "weights", "v1")["state"] == "retired")
            reply = await server.post("snapshots:promote?wait=60", {"weights": "v1"})
            assert (reply.status, reply.json()["state"]) == (200, "active"), reply.body
            assert not held.go.is_set()
        finally:
            held.go.set()


async def test_files_that_could_not_be_read_for_a_while_are_looked_at_again(tmp_path, monkeypatch):
    monkeypatch.setattr(artifact_updates, "PERIOD_S", 0.2)
    monkeypatch.setattr(retries, "FIRST_S", 0.05)
    root, back = world(tmp_path), threading.Event()

    def verify(*args, **named):
        if not back.is_set():
            raise Rejected("disk_error", "cannot be read: Input/output error")
        return manifest.verify(*args, **named)

    monkeypatch.setattr(audit, "verify", verify)
    async with live_server(root) as server:
        await followed(server)
        touched(root, "weights", "v1", tmp_path / "store")
        await server.settles(lambda status: reason(status, "v1") == "changed_on_disk")
        back.set()
        await server.settles(lambda status: reason(status, "v1") is None)


@pytest.mark.parametrize(("change", "state", "code"), [(-1, "discovered", "file_digest"), (0, "rejected", "file_size")])
async def test_whoever_asks_for_what_has_left_memory_with_bad_files_hears_that(
    tmp_path, monkeypatch, change, state, code
):
    monkeypatch.setattr(artifact_updates, "PERIOD_S", 0.2)
    root = world(tmp_path)
    async with live_server(root) as server:
        await followed(server)
        file = root / "weights" / "v1" / "model.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[:-1] + b"\xff" if change else b"")
        await server.settles(lambda status: reason(status, "v1") == "changed_on_disk")
        for number in (2, 3):
            weights(root, f"v{number}", number)
            await server.settles(serving(f"v{number}"))
        await server.settles(lambda status: state_of(status, "weights", "v1")["state"] == state)
        reply = await server.post("snapshots:promote?wait=60", {"weights": "v1"})
        assert (reply.status, reply.json()["error"]["code"]) == (422, code), reply.body


# ---- the auditor alone ---------------------------------------------------------------------------------------------


def candidate(version):
    return Candidate(Found(version, Path(version), complete=True), version, None, None)


class Auditor:
    """An auditor whose looks take until `go`, and what it has told."""

    def __init__(self, monkeypatch):
        self.told, self.begun, self.go = [], [], threading.Event()
        monkeypatch.setattr(audit, "verify", self.verify)
        self.audit = Audit(lambda kind, one, problem: self.told.append((one.version, problem and problem.code)))
        self.hint = asyncio.Event()
        self.task = asyncio.create_task(self.audit.run(self.hint))

    def verify(self, directory, _, *, between):
        self.begun.append(directory.name)
        while not self.go.wait(0.01):
            between()
        if directory.name == "bad":
            raise Rejected("file_digest", "is another one")

    async def end(self):
        self.task.cancel()
        await asyncio.wait([self.task])
        self.audit.close()
        assert not self.audit._background._thread.is_alive()


async def test_each_doubt_has_its_turn_and_newer_ones_of_a_version_come_behind_the_others(monkeypatch):
    made = Auditor(monkeypatch)
    made.audit.doubt("weights", candidate("a"))
    await until(lambda: made.begun == ["a"])
    for version in ("bad", "a", "a"):
        made.audit.doubt("weights", candidate(version))
    assert made.audit.pending == {("weights", "a"), ("weights", "bad")}
    made.go.set()
    await until(lambda: len(made.told) == 3)
    assert made.told == [("a", None), ("bad", "file_digest"), ("a", None)]
    assert made.hint.is_set()
    assert made.audit.pending == set()
    made.audit.doubt("weights", candidate("later"))
    await until(lambda: made.told[3:] == [("later", None)])
    await made.end()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), "no_memory"),
        (OSError(errno.EIO, "broken"), "disk_error"),
        (RuntimeError("a ring"), "unexpected"),
    ],
)
async def test_whatever_a_look_ends_with_the_next_one_is_begun(monkeypatch, error, code):
    made = Auditor(monkeypatch)

    def verify(directory, _, *, between):
        if directory.name == "bad":
            raise error

    monkeypatch.setattr(audit, "verify", verify)
    for version in ("bad", "a"):
        made.audit.doubt("weights", candidate(version))
    await until(lambda: len(made.told) == 2)
    assert made.told == [("bad", code), ("a", None)]
    await made.end()


async def test_what_nobody_wants_to_know_any_more_is_given_up_and_not_told(monkeypatch):
    made = Auditor(monkeypatch)
    for version in ("a", "b", "c"):
        made.audit.doubt("vocab", candidate(version))
    await until(lambda: made.begun == ["a"])
    made.audit.drop("vocab", "b")
    made.audit.drop("vocab", "a")
    await until(lambda: made.begun == ["a", "c"])  # before anybody has let go
    made.go.set()
    await until(lambda: made.told == [("c", None)])
    await made.end()


async def test_an_auditor_ends_in_the_middle_of_a_file(monkeypatch):
    made = Auditor(monkeypatch)
    made.audit.doubt("weights", candidate("a"))
    await until(lambda: made.begun == ["a"])
    await made.end()
    assert made.told == []
