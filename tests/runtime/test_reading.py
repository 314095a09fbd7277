"""Reading versions: every byte once, and what is wrong with them is called by its cause."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from app.cli.compose import read_deployment
from app.engine.families.onerec import OneRec
from app.engine.slots import Slots
from app.errors import Rejected
from app.runtime import contracts as module
from app.runtime import reading
from app.runtime.contracts import Contracts
from app.runtime.reading import read_vocab, read_weights
from app.runtime.retries import PASSING
from app.vocab.manifest import read_manifest
from tests import support
from tests.soak.bad import too_large

CPU = torch.device("cpu")


def flip(file, place):
    data = bytearray(file.read_bytes())
    data[place] ^= 0x40
    file.write_bytes(data)


def test_what_nobody_expected_of_a_version_is_a_refusal_and_what_the_machine_lacks_is_called_so(tmp_path, monkeypatch):
    root = support.write_root(tmp_path / "root")
    deployment, contracts, slots = read_deployment(root), Contracts(root), Slots(most=1)

    def raising(error):
        def build(*_):
            raise error

        monkeypatch.setattr(OneRec, "build", build)

    for error in (TypeError("unhashable type: 'list'"), OverflowError("int too large"), RuntimeError("no such size")):
        raising(error)
        with pytest.raises(Rejected) as caught:
            read_weights(root / "weights" / "v1", deployment, CPU, contracts, slots)
        assert caught.value.code == "unexpected"
        assert str(error) in caught.value.message
        assert "(test_reading.py, line " in caught.value.message
        assert slots.lent == 0
    for error, code in ((OSError(24, "Too many open files"), "disk_error"), (MemoryError(), "no_memory")):
        raising(error)
        with pytest.raises(Rejected) as caught:
            read_weights(root / "weights" / "v1", deployment, CPU, contracts, slots)
        assert (caught.value.code, caught.value.code in PASSING) == (code, True)


def test_weights_whose_tensors_do_not_fit_their_config_are_refused_before_a_contract_is_exported(tmp_path, monkeypatch):
    root, sizes = support.write_root(tmp_path / "root"), (4, 5, 6)
    deployment, exported = read_deployment(root), []

    def export(*task):
        exported.append(task)
        return support.not_exported(*task)

    monkeypatch.setattr(module, "export_apart", export)
    two, three = (support.onerec_config(sizes, layers=layers) for layers in (2, 3))
    support.write_weights(root, three, support.onerec_weights(two), "bad")
    support.write_weights(root, three, support.onerec_weights(three), "good")
    contracts = Contracts(root)
    with pytest.raises(Rejected) as caught:
        read_weights(root / "weights" / "bad", deployment, CPU, contracts)
    assert (caught.value.code, caught.value.location) == ("missing_tensors", "model.safetensors")
    assert exported == []
    read_weights(root / "weights" / "good", deployment, CPU, contracts)
    assert len(exported) == 1


def test_bytes_that_are_not_the_manifests_are_refused_as_such_whatever_they_say(tmp_path):
    root = support.write_root(tmp_path / "root")
    deployment, contracts, slots = read_deployment(root), Contracts(root), Slots(most=1)
    directory = root / "weights" / "v1"
    good = read_weights(directory, deployment, CPU, contracts, slots)
    assert good.digest == read_manifest(directory, "weights").digest
    del good
    kept = tmp_path / "kept"
    shutil.copytree(directory, kept)
    header = 8 + int.from_bytes((directory / "model.safetensors").read_bytes()[:8], "little")
    for name, place in (
        ("model.safetensors", 0),  # the header's length
        ("model.safetensors", 12),  # a tensor's name
        ("model.safetensors", header + 3),  # an exponent: infinity, or a wild number
        ("model.safetensors", -1),
        ("config.json", 3),
    ):
        flip(directory / name, place)
        with pytest.raises(Rejected) as caught:
            read_weights(directory, deployment, CPU, contracts, slots)
        assert (caught.value.code, caught.value.location) == ("file_digest", name), place
        assert slots.lent == 0
        shutil.copy(kept / name, directory / name)
    assert read_weights(directory, deployment, CPU, contracts, slots).engine.slot.number == 0


def test_weights_larger_than_memory_are_refused_for_that_whatever_their_names_and_never_hashed(tmp_path, monkeypatch):
    root = support.write_root(tmp_path / "root")
    too_large(root, "v2")  # a terabyte in a file of holes, and none of the names
    real = reading.verify

    def verify(directory, kind, *some, **rest):
        assert some, "all of it would be hashed"
        return real(directory, kind, *some, **rest)

    monkeypatch.setattr(reading, "verify", verify)
    with pytest.raises(Rejected) as refused:
        read_weights(root / "weights" / "v2", read_deployment(root), CPU, Contracts(root), Slots())
    assert refused.value.code == "no_memory"


def test_a_vocab_is_read_once_and_what_lies_beside_its_table_is_checked(tmp_path, monkeypatch):
    root, sizes = support.write_root(tmp_path / "root"), (4, 5, 6)
    directory, opened = root / "vocab" / "v1", []
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest, **more: (opened.append(str(path)), real(path, *rest, **more))[1]
    )
    vocab = read_vocab(directory, sizes)
    assert vocab.digest == read_manifest(directory, "vocab").digest
    assert [path for path in opened if path.endswith("items.safetensors")] == [str(directory / "items.safetensors")]
    flip(directory / "items.safetensors", -1)
    with pytest.raises(Rejected) as caught:
        read_vocab(directory, sizes)
    assert (caught.value.code, caught.value.location) == ("file_digest", "items.safetensors")
