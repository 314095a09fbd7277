"""From roots on disk to snapshots: what is picked, and what every bad artifact gets."""

from __future__ import annotations

import gc
import io
import json
import shutil
import weakref

import pytest
import torch

from app.cli.compose import read_deployment
from app.runtime import loader
from app.runtime.contract import make_contract
from app.runtime.in_force import document
from app.runtime.loader import load_contract, load_root
from app.runtime.logs import make_log
from tests import support


@pytest.fixture
def root(tmp_path):
    return support.write_root(tmp_path / "root")


def load(root):
    return load_root(root, read_deployment(root), make_log(io.BytesIO()))


def the_reason(root, code, *places):
    loaded = load(root)
    assert loaded.snapshot is None
    (reason,) = loaded.reasons
    assert reason.code == code, reason
    assert all(place in str(reason) for place in places), reason
    return loaded


def states(loaded, kind):
    return {artifact.version: artifact.state for artifact in loaded.artifacts if artifact.kind == kind}


def test_a_good_root_serves_and_its_ids_are_made_of_content(root, tmp_path):
    one, again = load(root), load(root)
    assert one.reasons == ()
    assert one.snapshot.id == again.snapshot.id
    assert one.snapshot.contract.id == load_contract(root, read_deployment(root)).id
    shutil.copytree(root, tmp_path / "copy")
    assert load(tmp_path / "copy").snapshot.id == one.snapshot.id
    (root / "policies" / "extra.yaml").write_text("widebeam: 1\nwidths: [1, 1, 1]\n")
    assert load(root).snapshot.id != one.snapshot.id
    assert load(root).snapshot.contract.id == one.snapshot.contract.id


def test_the_contract_id_changes_with_limits_and_configuration(root):
    deployment = read_deployment(root)
    engine = support.onerec_engine((4, 5, 6), deployment.limits)
    base = make_contract(engine, {"a": 1}, deployment, "float32")
    assert base.id == make_contract(engine, {"a": 1}, deployment, "float32").id
    others = [
        make_contract(engine, {"a": 2}, deployment, "float32"),
        make_contract(engine, {"a": 1}, deployment, "bfloat16"),
        make_contract(engine, {"a": 1}, support.deployment_of((4, 5, 6), rows=77), "float32"),
    ]
    assert len({base.id, *(other.id for other in others)}) == 4


def test_the_newest_complete_version_is_picked_and_strays_are_not(root):
    support.write_vocab(root, (4, 5, 6), [{"id": "new", "sid": [0, 0, 0]}], version="v10")
    support.write_vocab(root, (4, 5, 6), [{"id": "old", "sid": [0, 0, 0]}], version="v9")
    (root / "vocab" / "v11").mkdir()  # still being copied
    (root / "vocab" / ".tmp-12").mkdir()
    (root / "vocab" / "13.partial").mkdir()
    loaded = load(root)
    assert loaded.snapshot.vocab.ids([0]) == ["new"]
    assert states(loaded, "vocab") == {
        "v11": "incomplete",
        "v10": "active",
        "v9": "discovered",
        "v1": "discovered",
    }


def test_release_and_pin_name_the_versions(root):
    support.write_vocab(root, (4, 5, 6), [{"id": "new", "sid": [0, 0, 0]}], version="v2")
    (root / "release.json").write_text('{"vocab": "v1"}')
    assert load(root).snapshot.vocab_ref.version == "v1"
    (root / "state").mkdir()
    (root / "state" / "pin.json").write_text('{"vocab": "v2"}')
    assert load(root).snapshot.vocab_ref.version == "v2"
    (root / "state" / "pin.json").write_text('{"vocab": "v7"}')
    the_reason(root, "no_such_version", "v7", "pin.json")
    (root / "state" / "pin.json").write_text("{")
    the_reason(root, "bad_json", "pin.json")
    (root / "state" / "pin.json").write_text('{"engine": "v1"}')
    the_reason(root, "bad_json", "pin.json")


def test_a_bad_newest_version_gives_way_to_an_older_good_one(root):
    weights = support.onerec_weights(support.onerec_config((4, 5, 6)))
    name = sorted(weights)[-1]
    weights[name] = weights[name].clone()
    weights[name].view(-1)[0] = torch.nan
    support.write_weights(root, support.onerec_config((4, 5, 6)), weights, version="v2")
    loaded = load(root)
    assert loaded.snapshot.weights.version == "v1"
    assert states(loaded, "weights") == {"v2": "rejected", "v1": "active"}
    (bad,) = [artifact for artifact in loaded.artifacts if artifact.state == "rejected"]
    assert name in bad.reason.location
    (root / "release.json").write_text('{"weights": "v2"}')  # asked for by name: nothing is guessed
    the_reason(root, bad.reason.code, "weights/v2", name)


@pytest.mark.parametrize(
    ("spoil", "code", "place"),
    [
        (lambda r: shutil.rmtree(r / "weights"), "no_weights", "weights/"),
        (lambda r: shutil.rmtree(r / "vocab"), "no_vocab", "vocab/"),
        (lambda r: (r / "weights/v1/MANIFEST.json").write_text("{"), "manifest_invalid", "weights/v1/MANIFEST.json"),
        (lambda r: truncate(r / "weights/v1/model.safetensors"), "file_size", "weights/v1/model.safetensors"),
        (lambda r: flip(r / "weights/v1/model.safetensors"), "file_digest", "weights/v1/model.safetensors"),
        (lambda r: (r / "weights/v1/config.json").unlink(), "file_missing", "weights/v1/config.json"),
        (lambda r: (r / "weights/v1/more.bin").write_text("x"), "file_unlisted", "weights/v1/more.bin"),
        (lambda r: (r / "policies/base.yaml").unlink(), "no_default_policy", "base"),
        (lambda r: (r / "policies/base.yaml").write_text("widebeam: 1\nwidths: [1]\n"), "no_default_policy", "base"),
        (lambda r: edit(r, 'family = "onerec"', 'family = "onerek"'), "unknown_family", "onerec"),
        (lambda r: edit(r, "sizes = [4, 5, 6]", "sizes = [4, 5, 7]"), None, ""),
    ],
)  # fmt: skip
def test_what_cannot_serve_says_why_and_where(root, spoil, code, place):
    spoil(root)
    loaded = load(root)
    assert loaded.snapshot is None
    (reason,) = loaded.reasons
    assert code is None or reason.code == code, reason
    assert place in str(reason)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-7])


def flip(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 16
    file.write_bytes(data)


def edit(root, old, new):
    file = root / "deployment.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_versions_that_require_each_other_must_agree(root):
    manifest = root / "weights" / "v1" / "MANIFEST.json"
    text = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**text, "requires": {"vocab": ["v1"]}}))
    assert load(root).snapshot is not None
    manifest.write_text(json.dumps({**text, "requires": {"vocab": ["v5"]}}))
    the_reason(root, "requires", "v5", "weights/v1")


def test_weights_that_require_a_vocab_that_is_not_there_wait_and_older_ones_serve(root):
    support.write_weights(
        root, support.onerec_config((4, 5, 6)), support.onerec_weights(support.onerec_config((4, 5, 6)), 1), "v2"
    )
    manifest = root / "weights" / "v2" / "MANIFEST.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "requires": {"vocab": ["v2"]}}))
    loaded = load(root)
    assert loaded.snapshot.weights.version == "v1"
    assert states(loaded, "weights") == {"v2": "waiting", "v1": "active"}
    support.write_vocab(root, (4, 5, 6), version="v2")
    assert states(load(root), "weights") == {"v2": "active", "v1": "discovered"}


def test_a_policy_that_is_wrong_leaves_the_others_alone(root):
    (root / "policies" / "bad.yaml").write_text("widebeam: 1\nbeam_widht: 3\n")
    loaded = load(root)
    assert loaded.snapshot is not None
    shown = document(loaded.in_force, 0.0)
    assert shown["bad"]["state"] == "rejected"
    assert shown["bad"]["errors"][0]["line"] == 2
    assert shown["base"]["state"] == "live"
    assert loaded.snapshot.policies.plan("bad") is None


def test_the_served_weights_are_the_processes_own(root):
    loaded = load(root)
    job = support.job_of(loaded.snapshot, read_deployment(root), ("i1",), k=40)
    (before,) = support.run_batch([job])
    for file in (root / "weights" / "v1" / "model.safetensors", *(root / "vocab" / "v1").glob("*.safetensors")):
        file.write_bytes(b"")
    (after,) = support.run_batch([job])
    assert before.items.tolist() == after.items.tolist()


def test_a_start_that_is_refused_keeps_nothing_in_memory(root, monkeypatch):
    file = root / "vocab" / "v1" / "items.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    engines, real = [], loader.read_weights

    def read(*args):
        weights = real(*args)
        engines.append(weakref.ref(weights.engine))
        return weights

    monkeypatch.setattr(loader, "read_weights", read)
    gc.disable()
    try:
        assert [reason.code for reason in load(root).reasons] == ["file_digest"]
        assert [engine() for engine in engines] == [None]
    finally:
        gc.enable()
