"""Files that change in the middle of being read: what is used is what was checked, and the server serves on."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from app.cli.compose import read_deployment
from app.core import History
from app.engine.slots import Slots
from app.errors import Rejected
from app.runtime import artifact_updates, reading
from app.runtime import contracts as contracts_module
from app.runtime.contexts import batch_inputs
from app.runtime.contracts import Contracts
from tests import support
from tests.live_support import live_server
from tests.runtime.test_cutover import SIZES, Truth, items, state_of, weights, world


def overwritten(file):
    with file.open("r+b") as stream:
        stream.seek(-64, os.SEEK_END)
        stream.write(b"\x3d" * 64)


def truncated(file):
    os.truncate(file, file.stat().st_size // 2)


def emptied(file):
    file.write_bytes(b"")


def replaced(file):
    beside = file.with_name(".beside")
    beside.write_bytes(os.urandom(file.stat().st_size))
    beside.replace(file)


def removed(file):
    shutil.rmtree(file.parent)


def renamed_over(file):
    """The whole directory is another one now, with another manifest."""
    root, kind, version = file.parents[2], file.parents[1].name, file.parent.name
    (root / kind / version).rename(root / f".{kind}-{version}")
    publish(root, kind, version, 99)


def pointed_elsewhere(file):
    """The folder of its kind is a link to another one now, in which the same version is another one."""
    root, kind, version = file.parents[2], file.parents[1].name, file.parent.name
    other = root.parent / "other"
    shutil.copytree(root / kind, other / kind)
    shutil.rmtree(other / kind / version)
    publish(other, kind, version, 98)
    (root / ".link").symlink_to(other / kind)
    (root / kind).rename(root.parent / "before")
    (root / ".link").rename(root / kind)


def publish(root, kind, version, number):
    if kind == "weights":
        weights(root, version, number)
    else:
        support.write_vocab(root, SIZES, items(f"n{number}-"), version)


CHANGES = (overwritten, truncated, emptied, replaced, removed, renamed_over, pointed_elsewhere)
LARGE = {"weights": "model.safetensors", "vocab": "items.safetensors"}


class Interrupted:
    """The first look at the content of a file is interrupted by a change of it. Any thread."""

    def __init__(self, monkeypatch, file, change):
        self._file, self._change, self._real, self.done = file, change, os.readv, threading.Event()
        monkeypatch.setattr(os, "readv", self.readv)

    def readv(self, descriptor, buffers):
        count = self._real(descriptor, buffers)
        beyond = os.lseek(descriptor, 0, os.SEEK_CUR) > 8  # the header's length of a safetensors file
        if beyond and not self.done.is_set() and Path(f"/proc/self/fd/{descriptor}").readlink() == self._file:
            self.done.set()
            self._change(self._file)
        return count


@pytest.mark.parametrize("kind", ["weights", "vocab"])
async def test_a_version_that_changes_while_it_is_read_never_serves_as_what_it_was_not(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(artifact_updates, "PERIOD_S", 0.2)
    root = world(tmp_path)
    async with live_server(root) as server:
        truth, number = Truth(root), 1
        for change in CHANGES:
            number += 1
            version, old = f"v{number}", f"v{number - 1}"
            aside = tmp_path / version
            with monkeypatch.context() as patch:
                interrupted = Interrupted(patch, root / kind / version / LARGE[kind], change)
                publish(root, kind, version, number)
                shutil.copytree(root / kind / version, aside)
                await server.settles(lambda _, i=interrupted: i.done.is_set())
            if change not in {renamed_over, pointed_elsewhere}:  # versions like any other, under their own manifests
                status = await server.settles(
                    lambda status, v=version, c=change: c is removed or state_of(status, kind, v)["state"] == "rejected"
                )
                assert status["active"][kind]["version"] in {old, version}
                shutil.rmtree(root / kind / version, ignore_errors=True)
                shutil.copytree(aside, tmp_path / ".whole")
                (tmp_path / ".whole").rename(root / kind / version)  # published again, as it was meant
            await server.settles(lambda status, v=version: status["active"][kind]["version"] == v)
            truth.check(await server.recommend("i7", k=10, policy="base"), ("i7",))


def test_what_lies_beside_the_tensors_is_what_was_checked(tmp_path, monkeypatch):
    root = support.write_root(tmp_path / "root")
    directory, slots = root / "weights" / "v1", Slots(most=1)
    deployment, contracts = read_deployment(root), Contracts(root)
    config = directory / "config.json"
    text = config.read_text()

    def later(real):
        def read(*given, **how):
            config.write_text(text.replace("{", "{ ", 1))  # as good as before, and not what was hashed
            return real(*given, **how)

        return read

    loaded = reading.read_weights(directory, deployment, torch.device("cpu"), contracts, slots)
    for name, read in (
        ("open_version", lambda: reading.read_weights(directory, deployment, torch.device("cpu"), contracts)),
        ("model_files", lambda: reading.again(loaded, directory, deployment, contracts)),
    ):
        config.write_text(text)
        with monkeypatch.context() as patch:
            patch.setattr(reading, name, later(getattr(reading, name)))
            with pytest.raises(Rejected) as refused:
                read()
        assert (refused.value.code, refused.value.location) == ("file_size", "config.json")
    config.write_text(text)
    assert reading.again(loaded, directory, deployment, contracts).digest == loaded.digest


def test_what_was_made_of_files_that_were_not_checked_is_not_used_again(tmp_path, monkeypatch):
    monkeypatch.setattr(contracts_module, "export_apart", support.not_exported)
    root = support.write_root(tmp_path / "root")
    directory, slots, cpu = root / "weights" / "v1", Slots(most=1), torch.device("cpu")
    deployment, contracts, config = read_deployment(root), Contracts(root), directory / "config.json"
    text, opened = config.read_text(), reading.open_version
    other = json.loads(text) | {"eps": 0.5}
    support.write_weights(root, other, support.onerec_weights(other), "v2")
    contracts.keep(reading.read_weights(root / "weights" / "v2", deployment, cpu, contracts).contract.id)

    def changed(*given, **how):
        config.write_text(json.dumps(other))
        return opened(*given, **how)

    with monkeypatch.context() as patch:
        patch.setattr(reading, "open_version", changed)
        with pytest.raises(Rejected):
            reading.read_weights(directory, deployment, cpu, contracts, slots)
    config.write_text(text)
    found = reading.read_weights(directory, deployment, cpu, contracts, slots)
    alone = reading.read_weights(directory, deployment, cpu, Contracts(root))
    assert found.contract == alone.contract
    history = alone.engine.prepare(History(np.ones((3, 3), np.int32)))
    arenas = []
    for engine in (found.engine, alone.engine):
        arenas.append(engine.new_arena(deployment.limits))
        engine.encode(batch_inputs(engine.input_specs(), [history], cpu), arenas[-1])
    for name, values in arenas[0].items():
        assert torch.equal(values, arenas[1][name])
