"""`widebeam contract` as a person and a script use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from app.cli.deployment import read_deployment
from app.cli.main import app
from app.engine.registry import family
from app.runtime import contracts
from app.runtime.contracts import Contracts
from app.runtime.reading import model_files
from tests import support


@pytest.fixture
def root(tmp_path):
    return support.write_root(tmp_path / "root")


def run(*arguments):
    done = CliRunner().invoke(app, ["contract", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def stored(root):
    [file] = (root / "contracts").iterdir()
    return file


def test_generate_writes_the_contract_and_says_where(root):
    file = stored(root)
    text = file.read_text()
    file.unlink()
    code, out, err = run("generate", "--root", root)
    assert (code, out.strip()) == (0, file.stem)
    assert "step 3: not exported: a test's" in err
    assert file.read_text() == text
    code, out, _ = run("generate", "--root", root, "--json")
    assert (code, json.loads(out)["contract"], json.loads(out)["findings"]) == (0, file.stem, [])


def test_generate_check_only_writes_nothing_and_fails_where_the_stored_one_is_another(root):
    file = stored(root)
    assert run("generate", "--root", root, "--check-only")[0] == 0
    file.unlink()
    assert run("generate", "--root", root, "--check-only")[0] == 1
    assert list((root / "contracts").iterdir()) == []
    file.write_text('{"id": "x"}')
    code, _, err = run("generate", "--root", root, "--check-only")
    assert code == 1
    assert f"contracts/{file.name}: error contract_unreadable" in err


def test_show_prints_the_contract(root):
    code, out, _ = run("show", "--root", root, "--json")
    assert (code, json.loads(out)) == (0, json.loads(stored(root).read_text()))
    document = json.loads(out)
    code, out, _ = run("show", "--root", root)
    shown = dict(line.strip().split(maxsplit=1) for line in out.splitlines() if len(line.split()) > 1)
    assert (code, shown["contract"], shown["family"]) == (0, stored(root).stem, "onerec")
    assert shown["weights"].startswith(f"{len(document['weights'])} parameters bound to ")
    assert shown["limits.batch"] == str(document["limits"]["batch"])
    assert shown["workspace.arena_bytes"] == f"{document['workspace']['arena_bytes']:,}"
    assert "6 codes, beams up to 64" in out
    assert len(out.splitlines()) < 40


def test_check_reports_everything_and_exits_1_for_errors_only(root):
    code, out, err = run("check", "--root", root)
    assert code == 0
    assert "0 errors" in err
    (root / "policies" / "bad.yaml").write_text("widebeam: 1\nbeam_widht: 3\n")
    (root / "weights" / "v1" / "stray.txt").write_text("x")
    code, out, _ = run("check", "--root", root, "--json")
    report = json.loads(out)
    assert (code, report["weights"], report["vocab"]) == (1, "v1", "v1")
    places = {one["place"]: one["code"] for one in report["findings"] if one["severity"] == "error"}
    assert places["weights/v1/stray.txt"] == "file_unlisted"
    assert [place.partition(":")[0] for place in places] == ["weights/v1/stray.txt", "policies/bad.yaml"]


def test_contracts_of_a_gpu_are_made_and_checked_where_there_is_none(root):
    file = root / "deployment.toml"
    file.write_text(file.read_text().replace('device = "cpu"', 'device = "cuda"'))
    code, out, _ = run("show", "--root", root, "--json")
    assert (code, json.loads(out)["precision"]) == (0, "bfloat16")
    assert run("check", "--root", root)[0] == 0
    for precision in ("float16", "fp8"):
        code, out, _ = run("show", "--root", root, "--json", "--precision", precision)
        assert (code, json.loads(out)["precision"]) == (0, precision)


def test_check_says_where_deployment_toml_is_wrong(root):
    (root / "deployment.toml").write_text("family = 3\n")
    code, out, _ = run("check", "--root", root, "--json")
    assert code == 1
    assert [(one["code"], one["place"]) for one in json.loads(out)["findings"]] == [
        ("bad_deployment", "deployment.toml:1")
    ]


def test_check_of_a_folder_that_is_no_root_says_how_to_name_one(tmp_path):
    code, out, said = run("check", "--root", tmp_path / "nowhere")
    assert code == 1
    assert "deployment.toml: error bad_deployment: is not there; --root names the folder that holds it" in out
    assert "contract none, weights none, vocab none" in out + said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # what a CPU and a GPU take
def test_the_demo_ships_the_contracts_that_its_start_looks_for(dtype, monkeypatch):
    monkeypatch.setattr(contracts, "export_apart", lambda *_: ())
    demo = Path(__file__).parents[2]
    deployment, files = read_deployment(demo), model_files(demo / "weights" / "v1")
    command = f"widebeam contract generate --root . --precision {str(dtype).removeprefix('torch.')}"
    made = Contracts(demo).make(family(deployment.family), files, deployment, dtype, store=False)
    assert not made.exported, f"the family's code or the demo's limits have changed: `{command}`, and commit the file"
    assert made.file is not None, f"`{command}`, and commit the file"
    assert all(function.exported for function in made.functions)


def test_a_version_that_is_not_there_and_wrong_usage(root):
    assert run("check", "--root", root, "--weights", "v9")[0] == 1
    assert run("check", "--nope")[0] == 2
    code, _, _ = run("generate", "--root", root, "--weights", "v9")
    assert code == 1
