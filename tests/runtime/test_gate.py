"""Every way in which an artifact can be bad, against what refuses it: `examine`, and the loader of a server."""

from __future__ import annotations

import io
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save

from app.cli.deployment import read_deployment
from app.runtime.gate import examine
from app.runtime.loader import load_root
from app.runtime.logs import make_log
from app.vocab.arrays import from_bytes, to_bytes
from app.vocab.manifest import read_manifest
from app.vocab.publish import commit, draft
from tests import support
from tests.engine import tiny

SIZES = (4, 5, 6)
CONFIG = support.onerec_config(SIZES)
GOOD = support.onerec_weights(CONFIG)
LAST = sorted(GOOD)[-1]
TENSORS, CONFIG_FILE = "weights/v2/model.safetensors", "weights/v2/config.json"
WIDE = next(name for name, one in sorted(GOOD.items()) if one.dim() == 2 and one.shape[0] != one.shape[1])
LONG = (1 << 40).to_bytes(8, "little") + b"{}"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return support.write_root(tmp_path_factory.mktemp("gate") / "root")


@pytest.fixture
def root(served, tmp_path):
    return shutil.copytree(served, tmp_path / "root")


def found(root, **versions):
    """(code, place) of every error."""
    report = examine(root, read_deployment(root), **versions)
    return [(one.code, one.place) for one in report.findings if one.severity == "error"]


def loaded(root):
    return load_root(root, read_deployment(root), make_log(io.BytesIO()))


def publish(root, tensors=GOOD, config=CONFIG, data=None, name="model.safetensors"):
    with draft(root, "weights") as made:
        made.write("config.json", [json.dumps(config).encode()])
        made.write(name, [save({k: v.contiguous() for k, v in tensors.items()}) if data is None else data])
        commit(made, "weights", "v2", "tests", {})


def without(name):
    return {k: v for k, v in GOOD.items() if k != name}


def poked(value):
    tensor = GOOD[LAST].clone()
    tensor.view(-1)[-1] = value
    return {**GOOD, LAST: tensor}


def damaged(root, change):
    """Published well, and spoiled afterwards."""
    publish(root)
    file = root / TENSORS
    file.write_bytes(bytes(change(bytearray(file.read_bytes()))))


def flip(data):
    data[-1] ^= 1
    return data


def outside(root):
    publish(root)
    (root / TENSORS).rename(root.parent / "elsewhere.safetensors")
    (root / TENSORS).symlink_to(root.parent / "elsewhere.safetensors")


def unreadable_name(root):
    publish(root)
    manifest = root / "weights/v2/MANIFEST.json"
    document = json.loads(manifest.read_text())
    document["files"]["../v1/config.json"] = document["files"]["config.json"]
    manifest.write_text(json.dumps(document))


def manifest(root, kind, **changes):
    file = root / kind / "MANIFEST.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


WEIGHTS = {
    "0 bytes": (lambda r: damaged(r, lambda _: b""), "file_size", TENSORS),
    "8 bytes": (lambda r: damaged(r, lambda data: data[:8]), "file_size", TENSORS),
    "half": (lambda r: damaged(r, lambda data: data[: len(data) // 2]), "file_size", TENSORS),
    "one byte less": (lambda r: damaged(r, lambda data: data[:-1]), "file_size", TENSORS),
    "three bytes more": (lambda r: damaged(r, lambda data: data + b"abc"), "file_size", TENSORS),
    "published with 0 bytes": (lambda r: publish(r, data=b""), "truncated", TENSORS),
    "published half": (lambda r: publish(r, data=save(GOOD)[:-9]), "truncated", TENSORS),
    "published with a tail": (lambda r: publish(r, data=save(GOOD) + b"abc"), "bad_safetensors", TENSORS),
    "a flipped bit": (lambda r: damaged(r, flip), "file_digest", TENSORS),
    "a NaN": (lambda r: publish(r, poked(torch.nan)), "not_finite", f"{TENSORS}: {LAST}"),
    "an infinity": (lambda r: publish(r, poked(torch.inf)), "not_finite", f"{TENSORS}: {LAST}"),
    "missing": (lambda r: publish(r, without(LAST)), "missing_tensors", TENSORS),
    "extra": (lambda r: publish(r, {**GOOD, "ghost": torch.ones(1)}), "unknown_tensors", TENSORS),
    "shape": (lambda r: publish(r, {**GOOD, LAST: GOOD[LAST][:-1]}), "bad_shape", f"{TENSORS}: {LAST}"),
    "transposed": (lambda r: publish(r, {**GOOD, WIDE: GOOD[WIDE].T}), "bad_shape", f"{TENSORS}: {WIDE}"),
    "dtype": (lambda r: publish(r, {**GOOD, LAST: GOOD[LAST].double()}), "bad_dtype", f"{TENSORS}: {LAST}"),
    "whole numbers": (lambda r: publish(r, {**GOOD, LAST: GOOD[LAST].int()}), "bad_dtype", f"{TENSORS}: {LAST}"),
    "a pickle": (lambda r: publish(r, data=pickle.dumps({"a": 1})), "bad_safetensors", TENSORS),
    "pt only": (lambda r: publish(r, data=b"PK", name="weights.pt"), "no_weights", "weights/v2/v2"),
    "a header of 2^40 bytes": (lambda r: publish(r, data=LONG), "bad_safetensors", TENSORS),
    "other sizes": (lambda r: publish(r, config={**CONFIG, "sizes": [4, 5, 7]}), "bad_config", f"{CONFIG_FILE}: sizes"),
    "another family": (lambda r: publish(r, config={**CONFIG, "family": "t5"}), "bad_config", f"{CONFIG_FILE}: family"),
    "a link out of the folder": (outside, "path_escape", TENSORS),
    "a name out of the folder": (unreadable_name, "file_name", "weights/v2/MANIFEST.json"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "code", "place"), WEIGHTS.values(), ids=WEIGHTS)
def test_bad_weights_are_refused_with_code_and_place_twice_and_the_old_ones_serve(root, spoil, code, place):
    spoil(root)
    errors = found(root)
    assert (code, place) in [(one, where) for one, where in errors]
    assert found(root) == errors
    result = loaded(root)
    assert result.snapshot.weights.version == "v1"
    (bad,) = [one for one in result.artifacts if one.state == "rejected"]
    assert (bad.reason.code, bad.reason.location) == (code, place)


def test_a_cast_that_overflows_is_refused(root):
    file = root / "deployment.toml"
    file.write_text('precision = "float16"\n' + file.read_text())
    publish(root, poked(1e30))
    assert found(root) == [("not_finite", f"{TENSORS}: {LAST}")]
    assert loaded(root).snapshot.weights.version == "v1"


def test_a_version_that_is_no_name_is_never_opened(root):
    for name in ("../v1", "/etc", "v1/../v1", ".hidden"):
        assert found(root, weights=name) == [("no_such_version", "weights/")]


def table(root, items, sizes=SIZES, version="v2"):
    support.write_vocab(root, sizes, items, version=version)


def rewritten(root, change):
    """A vocab whose arrays say something else than they may, with a manifest that is right about that."""
    data = (root / "vocab/v1/items.safetensors").read_bytes()
    arrays, text = from_bytes(bytearray(data), "items.safetensors")
    arrays = {name: array.copy() for name, array in arrays.items()}
    change(arrays)
    with draft(root, "vocab") as made:
        made.write("items.safetensors", to_bytes(arrays, text))
        commit(made, "vocab", "v2", "tests", {})


def reverse(arrays):
    arrays["sid"][:] = arrays["sid"][::-1].copy()


def repeat(arrays):
    arrays["id.text"][2:4] = arrays["id.text"][:2]


VOCAB = {
    "a codebook of another size": (lambda r: table(r, [{"id": "a", "sid": [0, 0]}], (4, 5)), "sizes_differ"),
    "a code out of range": (lambda r: rewritten(r, lambda a: a["sid"].__setitem__((-1, 2), 6)), "code_out_of_range"),
    "a negative code": (lambda r: rewritten(r, lambda a: a["sid"].__setitem__((0, 0), -1)), "code_out_of_range"),
    "out of order": (lambda r: rewritten(r, reverse), "not_in_sid_order"),
    "an id twice": (lambda r: rewritten(r, repeat), "duplicate_id"),
    "bounds that fall": (lambda r: rewritten(r, lambda a: a["id.start"].__setitem__(1, 9999)), "arrays_invalid"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "code"), VOCAB.values(), ids=VOCAB)
def test_a_bad_vocab_is_refused_with_code_and_place_and_the_old_one_serves(root, spoil, code):
    spoil(root)
    places = found(root)
    assert {one for one, _ in places} == {code}
    assert all(place.startswith("vocab/v2/items.safetensors") for _, place in places)
    result = loaded(root)
    assert result.snapshot.vocab_ref.version == "v1"
    (bad,) = [found for found in result.artifacts if found.state == "rejected"]
    assert [(one.code, one.location) for one in (bad.reason, *bad.reason.others)] == places


def test_items_whose_codes_have_no_token_are_named_step_by_step(tmp_path):
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/base.yaml").write_text(support.BASE)
    (tmp_path / "deployment.toml").write_text(
        'family = "qwen3"\ndevice = "cpu"\n[sid]\nsizes = [5, 6, 7]\ntokens = "file"\n'
        "[limits]\nwidths = [8, 8, 8]\nrows = 64\nbatch = 4\ncontext = 24\n"
    )
    tiny.write(tmp_path / "made")
    lists = [list(range(10, 15)), list(range(15, 21)), list(range(21, 28))]
    lists[0][3], lists[2][1] = -1, -1
    with draft(tmp_path, "weights") as made:
        made.write("config.json", [(tmp_path / "made/config.json").read_bytes()])
        made.write("model.safetensors", [(tmp_path / "made/model.safetensors").read_bytes()])
        made.write("sid_tokens.json", [json.dumps(lists).encode()])
        commit(made, "weights", "v1", "tests", {})
    items = [{"id": "a", "sid": [0, 0, 0]}, {"id": "b", "sid": [3, 0, 0]}, {"id": "c", "sid": [0, 1, 1]}]
    support.write_vocab(tmp_path, (5, 6, 7), items)
    report = examine(tmp_path, read_deployment(tmp_path))
    errors = [one for one in report.findings if one.severity == "error"]
    assert [(one.code, one.place, one.message.partition(":")[0]) for one in errors] == [
        ("token_missing", "vocab/v1", "step 1, code 3"),
        ("token_missing", "vocab/v1", "step 3, code 1"),
    ]
    assert loaded(tmp_path).reasons[0].code == "token_missing"


@pytest.mark.parametrize(
    ("kind", "requires"),
    [("weights/v1", {"vocab": ["v7"]}), ("vocab/v1", {"weights": ["v7", "0" * 64]})],
)
def test_versions_that_require_others_are_named(root, kind, requires):
    manifest(root, kind, requires=requires)
    assert found(root) == [("requires", f"{kind}/MANIFEST.json")]
    digest = {other: read_manifest(root / other / "v1", other).digest for other in ("weights", "vocab")}
    (other,) = requires
    manifest(root, kind, requires={other: [digest[other]]})
    assert found(root) == []


def test_one_report_has_every_finding_with_its_place(root):
    good = load_file(root / "weights/v1/model.safetensors")
    spoiled = {**good, LAST: good[LAST] * torch.nan, "ghost": torch.ones(1)}
    first, second = sorted(good)[:2]
    del spoiled[first]
    spoiled[second] = spoiled[second].double()
    publish(root, spoiled)
    rewritten(root, lambda arrays: arrays["sid"].__setitem__((0, 0), 9))
    manifest(root, "weights/v2", requires={"vocab": ["v1"]})
    (root / "policies/bad.yaml").write_text("widebeam: 1\nbeam_widht: 3\nwidths: [999, 1, 1]\n")
    (root / "policies/experiments").mkdir()
    (root / "policies/experiments/x.yaml").write_text("widebeam: 1\nlayer: 7\n")
    (root / "policies/traffic.yaml").write_text("widebeam: 1\ndefault: nobody\n")
    (root / "takedowns/v1").mkdir(parents=True)
    (root / "takedowns/v1/MANIFEST.json").write_text("{}")
    errors = found(root)
    places = {place.partition(":")[0] for _, place in errors}
    assert {("missing_tensors", TENSORS), ("unknown_tensors", TENSORS)} <= set(errors)
    assert {("bad_dtype", f"{TENSORS}: {second}"), ("not_finite", f"{TENSORS}: {LAST}")} <= set(errors)
    assert ("requires", "weights/v2/MANIFEST.json") in errors
    assert ("manifest_invalid", "takedowns/v1/MANIFEST.json") in errors
    assert ("code_out_of_range", "vocab/v2/items.safetensors: row 0") in errors
    assert {"policies/bad.yaml", "policies/traffic.yaml", "policies/experiments/x.yaml"} <= places


def test_a_good_root_has_no_errors_and_a_missing_contract_is_a_warning(root):
    assert examine(root, read_deployment(root)).errors == 0
    [file] = (root / "contracts").iterdir()
    file.unlink()
    report = examine(root, read_deployment(root))
    assert [(one.severity, one.code, one.place) for one in report.findings if one.severity == "warning"] == [
        ("warning", "contract_missing", f"contracts/{report.contract}.json")
    ]
    assert not file.exists()


def test_a_contract_file_that_was_edited_is_an_error_with_its_place(root):
    [file] = (root / "contracts").iterdir()
    file.write_text(file.read_text().replace('"batch": 16', '"batch": 17'))
    assert found(root) == [("contract_tampered", f"contracts/{file.name}")]


def test_another_contract_checks_all_policies_again(root):
    (root / "policies/wide.yaml").write_text("widebeam: 1\nwidths: [4, 16, 16]\n")
    assert found(root) == []
    file = root / "deployment.toml"
    file.write_text(file.read_text().replace("widths = [64, 64, 64]", "widths = [8, 8, 8]"))
    assert {(code, place.rpartition(":")[0]) for code, place in found(root)} == {("K003", "policies/wide.yaml:2")}
