from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import save_file
from typer.testing import CliRunner

from app.cli.main import app
from app.errors import BadDeployment, Rejected, WidebeamError

DEPLOYMENT = """family = "onerec"
[sid]
sizes = [4, 8]
token_base = [10, 20]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "deployment.toml").write_text(DEPLOYMENT)
    return tmp_path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["vocab", *map(str, arguments)])


def refusal(*arguments: object) -> WidebeamError:
    """The error that the entry point prints before it exits with 1."""
    result = call(*arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, WidebeamError), result.output
    return result.exception


def items(root: Path, name: str, *rows: tuple[str, list[int]], **attrs: object) -> Path:
    path = root / name
    lines = [json.dumps({"id": id_, "sid": sid} | ({"attrs": attrs} if attrs else {})) for id_, sid in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_import_makes_versions_that_count_up(root: Path) -> None:
    source = items(root, "a.jsonl", ("x", [1, 2]), ("y", [1, 2]), ("z", [0, 7]))
    first = call("import", "--format", "jsonl", source, "--root", root, "--json")
    assert first.exit_code == 0, first.output
    made = json.loads(first.stdout)
    assert made == {
        "kind": "vocab", "version": "v1", "digest": made["digest"], "directory": str(root / "vocab" / "v1"),
        "items": 3, "sids": 2, "warnings": ["2 of 3 items share their SID: the model cannot tell them apart"],
    }  # fmt: skip
    second = call("import", "--format", "jsonl", source, "--root", root, "--requires-weights", "w7")
    assert second.exit_code == 0
    assert second.stdout == f"{root / 'vocab' / 'v2'}: 3 items on 2 SIDs, digest {made['digest'][:12]}\n"
    manifest = json.loads((root / "vocab/v2/MANIFEST.json").read_text())
    assert manifest["requires"] == {"weights": ["w7"]}
    assert manifest["made_by"].startswith("widebeam ")


def test_an_existing_version_is_refused(root: Path) -> None:
    source = items(root, "a.jsonl", ("x", [1, 2]))
    assert call("import", "--format", "jsonl", source, "--root", root, "--version", "7").exit_code == 0
    error = refusal("import", "--format", "jsonl", source, "--root", root, "--version", "7")
    assert isinstance(error, Rejected)
    assert (error.code, error.location) == ("version_exists", "vocab/7")


def test_a_bad_row_is_refused_with_its_line_and_nothing_is_left(root: Path) -> None:
    source = items(root, "a.jsonl", ("x", [1, 2]), ("y", [1, 9]))
    error = refusal("import", "--format", "jsonl", source, "--root", root)
    assert str(error).startswith("a.jsonl: line 2: sid[1] = 9, but step 2 has 8 codes")
    assert not (root / "vocab").exists()


def test_a_bad_deployment_is_refused_with_its_line(root: Path) -> None:
    source = items(root, "a.jsonl", ("x", [1, 2]))
    (root / "deployment.toml").write_text('family = "onerec"\n[sid]\nsizes = [0]\n')
    error = refusal("import", "--format", "jsonl", source, "--root", root)
    assert isinstance(error, BadDeployment)
    assert error.line == 3
    (root / "deployment.toml").unlink()
    assert isinstance(refusal("import", "--format", "jsonl", source, "--root", root), BadDeployment)


@pytest.mark.parametrize(
    "arguments",
    [
        ["import", "a.jsonl"],
        ["import", "--format", "csv", "a.jsonl"],
        ["import", "--format", "jsonl", "nothing.jsonl"],
        ["import", "--format", "jsonl", "a.jsonl", "--ids", "a.jsonl"],
        ["import", "--format", "jsonl", "a.jsonl", "--sid-tokens", "a.jsonl"],
        ["import", "--format", "jsonl", "a.jsonl", "--root", "nowhere"],
        ["build", "nothing.npy"],
        ["inspect", "v9"],
        ["inspect"],
        ["diff", "v1"],
        ["export", "v9"],
        ["nonsense"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items(root, "a.jsonl", ("x", [1, 2]))
    monkeypatch.chdir(root)
    assert call(*arguments).exit_code == 2


def test_tokens_become_codes_through_the_deployment(root: Path) -> None:
    (root / "catalog.jsonl").write_text('{"item_id": 5, "token_ids": [13, 27]}\n')
    assert call("import", "--format", "nvidia-jsonl", root / "catalog.jsonl", "--root", root).exit_code == 0
    assert call("export", "--root", root).stdout == '{"id":"5","sid":[3,7]}\n'


def test_npy_with_ids(root: Path) -> None:
    np.save(root / "codes.npy", np.array([[1, 2], [0, 0]]))
    (root / "ids.txt").write_text("a\nb\n")
    made = call("import", "--format", "npy", root / "codes.npy", "--ids", root / "ids.txt", "--root", root)
    assert made.exit_code == 0
    assert call("export", "v1", "--root", root).stdout == '{"id":"b","sid":[0,0]}\n{"id":"a","sid":[1,2]}\n'


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_build_gives_every_item_an_sid(kind: str, root: Path) -> None:
    points = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    file = root / f"points.{kind}"
    if kind == "npy":
        np.save(file, points)
    else:
        save_file({"points": points, "other": np.zeros(3, np.float32)}, file)
        assert "say which tensor" in str(refusal("build", file, "--root", root))
    (root / "ids.json").write_text(json.dumps([f"item {i}\n" for i in range(32)]))
    tensor = ["--tensor", "points"] if kind == "safetensors" else []
    made = call("build", file, *tensor, "--ids", root / "ids.json", "--root", root, "--seed", 3, "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["sids"] == 32
    lines = [json.loads(line) for line in call("export", "--root", root).stdout.splitlines()]
    assert {line["id"] for line in lines} == {f"item {i}\n" for i in range(32)}


def test_build_refuses_more_items_than_sids_and_too_few_ids(root: Path) -> None:
    np.save(root / "points.npy", np.zeros((33, 4), np.float32))
    assert "33 items do not fit into the 32 SIDs" in str(refusal("build", root / "points.npy", "--root", root))
    (root / "ids.txt").write_text("a\n")
    error = refusal("build", root / "points.npy", "--ids", root / "ids.txt", "--root", root)
    assert str(error) == "ids.txt: 1 id for 33 embeddings"


def test_inspect_says_what_is_there(root: Path) -> None:
    source = items(root, "a.jsonl", ("x", [1, 2]), ("y", [1, 2]), ("z", [0, 7]), ("w", [1, 0]), genre="é", year=1994)
    call("import", "--format", "jsonl", source, "--root", root)
    result = call("inspect", "--root", root, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["items"], report["sids"], report["items_sharing"], report["most_items"]) == (4, 3, 2, 2)
    assert report["steps"] == [
        {"step": 1, "codes": 4, "codes_used": 2, "prefixes": 2, "fan_out_mean": 2.0, "fan_out_max": 2},
        {"step": 2, "codes": 8, "codes_used": 3, "prefixes": 3, "fan_out_mean": 1.5, "fan_out_max": 2},
    ]
    assert report["largest"] == [{"sid": [1], "items": 3}, {"sid": [1, 2], "items": 2}]
    assert report["attributes"] == [
        {"name": "genre", "type": "text", "items": 4, "texts": 1},
        {"name": "year", "type": "number", "items": 4, "texts": None},
    ]
    text = call("inspect", root / "vocab" / "v1")
    assert text.exit_code == 0
    assert "v1: 4 items on 3 SIDs of sizes [4, 8]" in text.stdout


def test_inspect_refuses_a_damaged_version(root: Path) -> None:
    call("import", "--format", "jsonl", items(root, "a.jsonl", ("x", [1, 2])), "--root", root)
    with (root / "vocab/v1/items.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"!")
    error = refusal("inspect", "--root", root)
    assert isinstance(error, Rejected)
    assert (error.code, error.location) == ("file_digest", "items.safetensors")


def test_a_degenerate_catalogue_is_pointed_out(root: Path) -> None:
    source = items(root, "a.jsonl", *[(str(i), [1, 2]) for i in range(10)])
    result = call("import", "--format", "jsonl", source, "--root", root)
    assert result.exit_code == 0
    assert "warning: 10 of 10 items share their SID" in result.stderr
    assert "warning: step 1 uses one of its 4 codes" in result.stderr


def test_diff_says_what_changed(root: Path) -> None:
    rows = [("a", [0, 0]), ("b", [0, 1]), ("c", [0, 2]), ("d", [0, 3])]
    call("import", "--format", "jsonl", items(root, "1", *rows, year=1, genre="x"), "--root", root)
    lines = [
        {"id": "a", "sid": [3, 0], "attrs": {"year": 1, "genre": "x"}},
        {"id": "c", "sid": [0, 2], "attrs": {"year": 1, "genre": "y"}},
        {"id": "d", "sid": [0, 3], "attrs": {"year": 1, "genre": "x"}},
        {"id": "e", "sid": [0, 1]},
    ]
    (root / "2").write_text("\n".join(map(json.dumps, lines)))
    call("import", "--format", "jsonl", root / "2", "--root", root)
    found = json.loads(call("diff", "v1", "v2", "--root", root, "--json").stdout)
    assert {key: found[key] for key in ("added", "removed", "moved", "changed")} == dict.fromkeys(
        ("added", "removed", "moved", "changed"), 1
    )
    assert found["first_moved"] == [{"id": "a", "old": [0, 0], "new": [3, 0]}]
    assert (found["first_added"], found["first_removed"], found["first_changed"]) == (["e"], ["b"], ["c"])
    text = call("diff", root / "vocab/v1", root / "vocab/v2", "--limit", 0)
    assert text.exit_code == 0
    assert "v1: 4 items; v2: 4 items" in text.stdout
    same = json.loads(call("diff", "v1", "v1", "--root", root, "--json").stdout)
    assert (same["added"], same["removed"], same["moved"], same["changed"]) == (0, 0, 0, 0)


def test_export_never_overwrites(root: Path) -> None:
    source = items(root, "a.jsonl", ("x", [1, 2]), genre="é", price=0.1)
    call("import", "--format", "jsonl", source, "--root", root)
    out = root / "out.jsonl"
    assert call("export", "--out", out, "--root", root).exit_code == 0
    assert json.loads(out.read_text()) == json.loads(source.read_text())
    assert call("export", "--out", out, "--root", root).exit_code == 2
