"""Contract files: found, believed only where they say what they are, made where there is none."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
import torch

from app.cli.deployment import read_deployment
from app.engine.apart import export_apart
from app.engine.families.base import ModelFiles
from app.engine.registry import family
from app.errors import Rejected
from app.runtime import contracts
from app.runtime.contract import BESIDE, contract_id
from app.runtime.contracts import Contracts, read
from app.runtime.logs import make_log
from app.runtime.reading import model_files
from tests import support
from tests.engine import tiny
from tests.engine.toy import Toy

CONFIG = "weights/v1/config.json"


@pytest.fixture
def exports(monkeypatch):
    """How often somebody exported."""
    made = []

    def export(kind, files, sid, *rest):
        made.append(kind.name)
        return support.not_exported(kind, files, sid, *rest)

    monkeypatch.setattr(contracts, "export_apart", export)
    return made


@pytest.fixture
def root(tmp_path):
    """A root without a contract."""
    made = support.write_root(tmp_path / "root")
    shutil.rmtree(made / "contracts")
    return made


def make(root, dtype=torch.float32, kind=None, log=None, **how):
    deployment = read_deployment(root)
    files = model_files(root / "weights" / "v1")
    return Contracts(root, log).make(kind or family(deployment.family), files, deployment, dtype, **how)


def edit(root, old, new, file="deployment.toml"):
    path = root / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_a_contract_is_made_once_and_read_from_then_on(root, exports):
    one, two = make(root), make(root)
    assert (one.exported, two.exported, exports) == (True, False, ["onerec"])
    assert one.contract == two.contract
    assert one.file == two.file == root / "contracts" / f"{one.contract.id}.json"
    stored = json.loads(one.file.read_text())
    assert stored == json.loads(json.dumps(one.document))
    assert (stored["id"], stored["parallel"], stored["family"]) == (one.contract.id, {"tp": 1}, "onerec")


def test_the_id_is_made_of_what_a_contract_says_and_of_nothing_else(root, exports):
    made = make(root)
    stored = json.loads(made.file.read_text())
    for name in ("made_by", "made_for", "format"):
        stored[name] = "another"
    made.file.write_text(json.dumps(stored, indent=7))
    assert read(made.file).id == made.contract.id


def test_limits_that_no_function_reads_make_another_contract_without_an_export(root, exports):
    one = make(root)
    edit(root, "batch = 16", "batch = 8")
    two = make(root)
    assert one.contract.id != two.contract.id
    assert (two.exported, exports) == (False, ["onerec"])
    assert {file.stem for file in (root / "contracts").iterdir()} == {one.contract.id, two.contract.id}


@pytest.mark.parametrize(
    ("old", "new", "file"),
    [
        ("context = 64", "context = 5", "deployment.toml"),
        ('"ffn": 32', '"ffn": 40', "weights/v1/config.json"),
        ('"layers": 2', '"layers": 1', "weights/v1/config.json"),
    ],
)
def test_what_a_function_reads_is_exported_anew_and_makes_another_contract(root, exports, old, new, file):
    one = make(root)
    edit(root, old, new, file)
    two = make(root)
    assert one.contract.id != two.contract.id
    assert (two.exported, len(exports)) == (True, 2)


def test_a_context_above_the_positions_of_a_onerec_adds_none_and_the_contract_says_how_many_there_are(root, exports):
    def positions(context):
        edit(root, "context = 64", f"context = {context}")
        made = make(root).document
        edit(root, f"context = {context}", "context = 64")
        cross = next(state for state in made["states"] if state["name"] == "cross_k.0")
        return [one["positions"] for one in made["inputs"]], cross["shape"][0]

    own, held = positions(64)
    assert sum(own) + 1 == held < 64
    assert positions(4096) == (own, held)
    fewer, less = positions(held - 1)
    assert (sum(fewer), less) == (sum(own) - 1, held - 1)


def test_another_precision_is_another_contract(root, exports):
    assert make(root).contract.id != make(root, torch.bfloat16).contract.id
    assert len(exports) == 2


def test_code_that_has_changed_is_exported_anew(root, exports, tmp_path, monkeypatch):
    source = Path("tests/engine/toy.py").read_text().replace('"toy"', '"onerec"').replace('"width"', '"d_model"')
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "first_toy.py").write_text(source)
    (tmp_path / "second_toy.py").write_text(source.replace("0.5 * slots", "0.25 * slots"))
    one, two = (make(root, kind=import_module(name).Toy) for name in ("first_toy", "second_toy"))
    assert (one.exported, two.exported) == (True, True)
    assert one.contract.id == two.contract.id  # the same facts
    assert one.document["made_for"] != two.document["made_for"]


def test_config_values_that_the_model_does_not_read_change_nothing(tmp_path, exports):
    root = tmp_path
    (root / "deployment.toml").write_text(
        'family = "qwen3"\n[sid]\nsizes = [5, 6, 7]\ntoken_base = [10, 15, 21]\n[limits]\ncontext = 24\n'
    )
    tiny.write(root / "weights" / "v1")
    one = make(root)
    edit(root, '{"model_type"', '{"torch_dtype": "bfloat16", "initializer_range": 0.1, "model_type"', CONFIG)
    two = make(root)
    assert (one.contract.id, two.exported) == (two.contract.id, False)
    read_values = two.document["config"]
    assert read_values["hidden_size"] == 16
    assert read_values.keys().isdisjoint({"torch_dtype", "initializer_range"})
    edit(root, '{"torch_dtype"', '{"rms_norm_eps": 1e-5, "torch_dtype"', CONFIG)
    assert make(root).contract.id != one.contract.id


def test_weight_bindings_name_their_sources_and_what_is_done_to_them(tmp_path, exports):
    (tmp_path / "deployment.toml").write_text(
        'family = "qwen3"\n[sid]\nsizes = [5, 6, 7]\ntoken_base = [10, 15, 21]\n[limits]\ncontext = 24\n'
    )
    tiny.write(tmp_path / "weights" / "v1")
    weights = {one["parameter"]: one for one in make(tmp_path, torch.bfloat16).document["weights"]}
    qkv = weights["blocks.0.qkv"]
    assert [one["name"] for one in qkv["sources"]] == [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    assert [one["op"] for one in qkv["transform"]] == ["cast", "concatenate"]
    assert qkv["accepts"] == ["BF16", "F16", "F32"]
    head = weights["heads.1"]
    assert [one["name"] for one in head["sources"]] == ["lm_head.weight"]
    assert head["transform"][0] == {"op": "split", "first": 15, "rows": 6}


# ---- files that are not what they say ------------------------------------------------------------------------------


def spoiled(file, change):
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda file: spoiled(file, lambda one: one["limits"].update(k=7)), "contract_tampered"),
        (lambda file: spoiled(file, lambda one: one["functions"][0].update(exported=True)), "contract_tampered"),
        (lambda file: spoiled(file, lambda one: one.update(id="0" * 12)), "contract_tampered"),
        (lambda file: spoiled(file, lambda one: one.pop("functions")), "contract_unreadable"),
        (lambda file: spoiled(file, lambda one: one.update(functions=3)), "contract_unreadable"),
        (lambda file: file.write_bytes(file.read_bytes()[:-40]), "contract_unreadable"),
        (lambda file: file.write_bytes(b""), "contract_unreadable"),
        (lambda file: file.write_bytes(b"[" * 100_000), "contract_unreadable"),
        (lambda file: file.write_bytes(b"[]"), "contract_unreadable"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_never_used_and_made_again(root, exports, spoil, code):
    good = make(root)
    spoil(good.file)
    again = make(root)
    assert [(one.code, one.location) for one in again.found] == [(code, f"contracts/{good.contract.id}.json")]
    assert (again.exported, len(exports)) == (True, 2)
    assert again.contract.id == good.contract.id
    assert make(root).found == ()  # it was written anew


@pytest.mark.parametrize("what", ["many functions", "no step", "another's state", "other codes"])
def test_a_file_whose_functions_cannot_be_the_models_is_not_believed_however_well_it_is_made(what, root, exports):
    good = make(root)
    document = json.loads(good.file.read_text())
    functions = document["functions"]
    if what == "many functions":  # their links would fill the memory
        names = [f"s{number}" for number in range(200)]
        functions += [{"name": "step 4", "exported": True, "reads": names, "writes": names}] * 300
    elif what == "no step":
        functions.pop()
    elif what == "another's state":
        functions[0]["writes"] = ["nobodys"]
    else:
        facts = [{"name": "logits", "dtype": "float32", "shape": ["rows", 7]}]
        functions[1] |= {"exported": True, "reason": None, "outputs": facts}
    document["id"] = contract_id({name: value for name, value in document.items() if name not in BESIDE})
    good.file.unlink()
    forged = good.file.with_name(f"{document['id']}.json")
    forged.write_text(json.dumps(document))
    stream = io.BytesIO()
    again = make(root, log=make_log(stream=stream))
    assert (again.exported, again.contract.id) == (True, good.contract.id)
    refused = next(line for line in map(json.loads, stream.getvalue().splitlines()) if line["level"] == "error")
    assert (refused["code"], refused["location"]) == ("contract_tampered", f"contracts/{forged.name}")


def test_a_copy_under_another_name_and_a_link_out_of_the_root_are_refused(root, exports, tmp_path):
    good = make(root)
    good.file.rename(tmp_path / "outside.json")
    good.file.symlink_to(tmp_path / "outside.json")
    shutil.copy(tmp_path / "outside.json", good.file.with_name("other.json"))
    os.mkfifo(good.file.with_name("pipe.json"))
    found = {one.location: one.code for one in make(root, store=False).found}
    assert found == {
        f"contracts/{good.file.name}": "contract_unreadable",
        "contracts/other.json": "contract_tampered",
        "contracts/pipe.json": "contract_unreadable",
    }


def test_a_root_that_cannot_be_written_to_keeps_its_contract_with_the_servers_own_files(root, exports):
    (root / "contracts").write_text("no folder: whoever writes below it fails, root too")
    logged = io.BytesIO()
    made = make(root, log=make_log(logged))
    assert made.file == root / "state" / "contracts" / f"{made.contract.id}.json"
    (line,) = map(json.loads, logged.getvalue().splitlines())
    assert (line["event"], line["file"]) == ("contract_stored", f"state/contracts/{made.file.name}")
    again = make(root)
    assert (again.exported, again.file, again.found) == (False, made.file, ())
    spoiled(made.file, lambda one: one["limits"].update(k=7))
    assert [(one.code, one.location) for one in make(root).found] == [
        ("contract_tampered", f"state/contracts/{made.file.name}")
    ]


def test_where_nothing_can_be_written_a_contract_is_made_all_the_same(root, exports, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(contracts.state_dir, "write", full)
    made = make(root)
    assert (made.file, made.contract.id) == (None, make(root).contract.id)


def test_a_config_that_the_family_does_not_take_is_refused_before_anything_is_exported(root, exports):
    edit(root, '"layers": 2', '"layers": 0', "weights/v1/config.json")
    with pytest.raises(Rejected) as refused:
        make(root)
    assert (refused.value.code, refused.value.location) == ("bad_config", "config.json: layers")
    assert exports == []


# ---- what is stored, and how much is read ---------------------------------------------------------------------------


def of(contracts_of_root, root, **edits):
    deployment = read_deployment(root)
    files = model_files(root / "weights" / "v1")
    return contracts_of_root.of(family(deployment.family), files, deployment, torch.float32, **edits)


def test_what_is_made_for_a_server_is_stored_when_it_serves_and_exported_once(root, exports):
    known = Contracts(root)
    one = of(known, root)
    assert of(known, root) == one
    assert (exports, (root / "contracts").exists(), known.waits(one.id)) == (["onerec"], False, True)
    assert (known.keep(one.id), known.waits(one.id), known.unkept) == (True, False, ())
    assert [file.stem for file in (root / "contracts").iterdir()] == [one.id]
    assert of(known, root) == of(Contracts(root), root) == one
    assert exports == ["onerec"]


def test_a_server_remembers_a_few_contracts_that_nobody_served_under(root, exports, monkeypatch):
    monkeypatch.setattr(contracts, "MOST_MADE", 3)
    known, ids, text = Contracts(root), [], (root / "deployment.toml").read_text()
    for batch in range(2, 8):
        (root / "deployment.toml").write_text(text.replace("batch = 16", f"batch = {batch}"))
        ids.append(of(known, root).id)
    assert [known.waits(one) for one in ids] == [False, False, False, True, True, True]
    assert exports == ["onerec"]


def test_a_contract_for_which_there_is_no_room_is_said_once_and_kept_when_there_is(root, exports, monkeypatch):
    logged = io.BytesIO()
    known = Contracts(root, make_log(logged))
    new = of(known, root).id

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(contracts.state_dir, "write", full)
        assert (known.keep(new), known.keep(new), known.waits(new)) == (False, False, True)
        assert [(one.code, one.location) for one in known.unkept] == [("contract_not_stored", f"contracts/{new}.json")]
    assert (known.keep(new), known.unkept) == (True, ())
    assert read(root / "contracts" / f"{new}.json").id == new
    assert [json.loads(line)["event"] for line in logged.getvalue().splitlines()] == [
        "contract_not_stored",
        "contract_stored",
    ]


def test_many_large_files_beside_a_contract_are_not_taken_apart(root, exports, monkeypatch):
    good = make(root)
    other = json.loads(good.file.read_text()) | {"made_for": "another", "config": {"padding": "x" * contracts.LARGE}}
    other["id"] = contract_id({name: value for name, value in other.items() if name not in BESIDE})
    text = json.dumps(other)
    for number in range(200):
        file = root / "contracts" / f"{number:012x}.json"
        file.write_text(text)
        os.utime(file, (0, 0) if number < 180 else None)
    taken, seen, parsed, data = [], [], contracts._parsed, contracts._bytes
    monkeypatch.setattr(contracts, "_parsed", lambda *args: taken.append(args[0].name) or parsed(*args))
    monkeypatch.setattr(contracts, "_bytes", lambda *args: seen.append(args[0].name) or data(*args))
    again = make(root)
    assert (again.exported, again.file, again.found) == (False, good.file, ())
    assert set(taken) == {good.file.name}
    assert len(seen) <= contracts.MOST_FILES + 1
    monkeypatch.setattr(contracts, "MOST_BYTES", 3 * len(text))
    os.utime(good.file, (0, 0))
    seen.clear()
    again = make(root)  # beyond what is read: exported again, and then it is just there
    assert (again.exported, again.file) == (True, good.file)
    assert len(seen) <= 5


# ---- the process that exports --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)  # three processes that import torch: seconds on an idle machine
def test_another_process_exports_what_is_only_known_there_by_its_module(tmp_path):
    root = support.write_root(tmp_path / "root", (4, 5))
    sid, limits = read_deployment(root).sid, read_deployment(root).limits

    def export(width, kind=Toy):
        return export_apart(kind, ModelFiles({"width": width}, root, {}), sid, limits, torch.float32)

    functions = export(4)
    assert [(one.name, one.exported) for one in functions] == [("encode", True), ("step 1", True), ("step 2", True)]
    with pytest.raises(Rejected) as refused:
        export(0)
    assert (refused.value.code, refused.value.location) == ("bad_config", "config.json: width")

    class Nobody(Toy):
        """Cannot be imported."""

    with pytest.raises(Rejected) as refused:
        export(4, Nobody)
    assert refused.value.code == "export_failed"
    assert "<locals>" in refused.value.message


def test_a_refit_of_what_was_asked_for_last_is_behind_the_same_contract_and_nothing_is_made_anew(root, exports):
    deployment, files = read_deployment(root), model_files(root / "weights" / "v1")
    kind, known = family(deployment.family), Contracts(root)
    beside = frozenset({("config.json", "1")})

    def of(contracts=known, kind=kind, files=files, deployment=deployment, dtype=torch.float32, beside=beside):
        made = []
        make = Contracts.make
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Contracts, "make", lambda *given, **how: made.append(1) or make(*given, **how))
            return contracts.of(kind, files, deployment, dtype, beside), len(made)

    contract, made = of()
    assert made == 1
    assert of() == (contract, 1)  # it is not on the disk yet
    assert known.keep(contract.id)
    assert of() == (contract, 1)
    assert of() == (contract, 0)
    assert of(beside=None)[1] == 1
    assert of() == (contract, 0)
    others = {
        "beside": frozenset({("config.json", "2")}),
        "files": dataclasses.replace(files, shapes={**files.shapes, "more": (1,)}),
        "deployment": msgspec.structs.replace(deployment, limits=msgspec.structs.replace(deployment.limits, queue=7)),
        "dtype": torch.bfloat16,
    }
    for name, other in others.items():
        assert of(**{name: other})[1] == 1, name
        of()
        of()
    assert of() == (contract, 0)
    file = root / "contracts" / f"{contract.id}.json"
    text = file.read_bytes()
    file.unlink()
    assert of() == (contract, 1)
    assert known.waits(contract.id)
    file.write_bytes(text)
    assert of() == (contract, 1)
    assert of() == (contract, 0)
    file.write_bytes(text.replace(b"onerec", b"tworec"))  # an edit is looked at, and said
    assert of() == (contract, 1)
