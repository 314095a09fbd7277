"""`widebeam policy test`: the demo's own tests, and what a failing one looks like."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli.main import app
from tests import support

ROOT = Path(__file__).parents[2]
GOOD = """\
widebeam: 1
kind: tests
tests:
  the best survive:
    policy: base
    step: 1
    parents:
      - {logits: [3, 2, 1]}
    width: 2
    expect:
      survivors: [[0, 0], [0, 1]]
  a list has items:
    policy: base
    request: {history: [i1], k: 3, exclude: [i2]}
    expect: {least: 3, absent: [i2], status: ok}
  a recorded one too:
    policy: base
    record: log.jsonl#r-7
    expect: {least: 2}
"""


def run(*args):
    return CliRunner().invoke(app, ["policy", "test", *(str(arg) for arg in args)])


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    root = support.write_root(tmp_path_factory.mktemp("root"), policies={"other": "widebeam: 1\nwidths: [2, 2, 2]\n"})
    (root / "policies" / "tests").mkdir()
    (root / "policies" / "tests" / "good.yaml").write_text(GOOD)
    record = {"request_id": "r-7", "context": {"history": ["i3"]}, "k": 2}
    (root / "policies" / "tests" / "log.jsonl").write_text(json.dumps(record) + "\n")
    return root


@pytest.fixture
def root(clean, tmp_path):
    return shutil.copytree(clean, tmp_path / "root")


def test_the_tests_of_the_demo_pass_and_cover_its_policies():
    result = run("--root", ROOT)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "9 tests, 0 failed\n"


def test_good_ones_pass_and_untested_policies_are_named(root):
    result = run("--root", root)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "3 tests, 0 failed\npolicies without a test: other\n"


def test_a_failing_one_says_where_and_why_with_exit_1(root):
    file = root / "policies" / "tests" / "good.yaml"
    file.write_text(GOOD.replace("[[0, 0], [0, 1]]", "[[0, 1], [0, 0]]").replace("absent: [i2]", "present: [i2]"))
    result = run("--root", root)
    assert result.exit_code == 1
    assert (
        f"{file}:11:18: error test: the best survive: survivors are [[0, 0], [0, 1]], expected [[0, 1], [0, 0]]\n"
        in result.stdout
    )
    assert "error test: a list has items: i2 is not in the list\n" in result.stdout
    assert "  help: i2 is excluded" in result.stdout
    assert result.stderr.startswith("3 tests, 2 failed\n")


def test_machines_get_every_test_and_the_fields_of_an_editor(root):
    file = root / "policies" / "tests" / "good.yaml"
    file.write_text(GOOD.replace("r-7", "r-8"))
    result = run("--root", root, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [(one["test"], one["line"], one["ok"]) for one in found["tests"]] == [
        ("the best survive", 4, True), ("a list has items", 12, True), ("a recorded one too", 16, False),
    ]  # fmt: skip
    [one] = found["diagnostics"]
    assert (one["file"], one["line"], one["col"], one["code"]) == (str(file), 18, 13, "test")
    assert "log.jsonl has no request r-8" in one["message"]
    assert found["untested"] == ["other"]


def test_a_policy_that_cannot_serve_fails_its_tests(root):
    (root / "policies" / "other.yaml").write_text("widebeam: 1\nstep: 1\n")
    file = root / "policies" / "tests" / "good.yaml"
    file.write_text(GOOD.replace("policy: base", "policy: other", 1).replace("policy: base", "policy: nope", 1))
    result = run("--root", root)
    assert result.exit_code == 1
    assert "the best survive: has errors: `other`" in result.stdout
    assert "a list has items: there is no policy `nope`" in result.stdout


def test_another_folder_is_tested_with_its_own_policies(root):
    folder = shutil.copytree(root / "policies", root / "next")
    (folder / "base.yaml").write_text("widebeam: 1\nwidths: [1, 1, 1]\n")
    result = run(folder, "--root", root)
    assert result.exit_code == 1
    assert "the list has 1 item, at least 3 are expected" in result.stdout
    assert run("--root", root).exit_code == 0


def test_no_tests_and_bad_files_are_not_a_pass(root):
    file = root / "policies" / "tests" / "good.yaml"
    file.write_text(GOOD.replace("step: 1", "step: one"))
    broken = run("--root", root)
    assert broken.exit_code == 1
    assert "error S011" in broken.stdout
    shutil.rmtree(root / "policies" / "tests")
    assert run("--root", root).exit_code == 2
