"""From JUnit files of GPU tests to the table of docs/gpu.md."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from bench import gpu_tests

MADE = {"commit": "abc", "device": "NVIDIA H200", "torch": "2.11.0+cu130", "python": "3.12.3"}
TESTS = """
import pytest
@pytest.mark.parametrize("n", [1, 2, 3])
def test_one(n):
    assert n != 2
def test_two():
    pytest.skip("no")
"""


@pytest.fixture
def round_of(tmp_path):
    """A round whose JUnit file pytest itself has written."""
    place = tmp_path / "tests" / "gpu" / "ops"
    place.mkdir(parents=True)
    (place / "test_norm.py").write_text(TESTS)
    folder = tmp_path / "round" / "some"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir",
               str(tmp_path), f"--junitxml={folder / 'tests.xml'}", "tests/gpu/ops/test_norm.py"]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, timeout=100)
    (folder / "empty.xml").write_text("")
    (folder / "interrupted.xml").write_text('<testsuites><testsuite><testcase time="0.002" /></testsuite></testsuites>')
    (tmp_path / "round" / "about.json").write_text(json.dumps(MADE))
    return tmp_path / "round"


def test_a_round_is_recorded_beside_what_was_known(round_of, tmp_path):
    known, page = tmp_path / "known.json", tmp_path / "page.md"
    known.write_text(json.dumps({"tests/gpu/test_trie.py": {"said": "passed", "device": "an H200"}}))
    page.write_text(f"# Page\n\n{gpu_tests.BEGIN}\nold\n{gpu_tests.END}\n\nend\n")
    cases = {"tests/gpu/ops/test_norm.py": 6}
    found = gpu_tests.record(round_of, cases, known, page)
    assert list(found) == ["tests/gpu/ops/test_norm.py"]
    one = found["tests/gpu/ops/test_norm.py"]
    assert (one["passed"], one["failed"], one["skipped"], one["commit"]) == (2, 1, 1, "abc")
    assert one["failures"] == ["test_one[2]"]
    text = page.read_text()
    told = "2 passed, 1 skipped, 1 failed, 2 not run: `test_one[2]` | 0 | NVIDIA H200, torch 2.11.0 | abc |"
    assert f"| `ops/test_norm` | {told}" in text
    assert "| `test_trie` | passed |  | an H200 |  |" in text
    assert "| `test_attention` | not run |  |  |  |" in text
    assert "old" not in text
    assert text.startswith("# Page\n") and text.endswith("end\n")
    again = tmp_path / "again"
    shutil.copytree(round_of, again)
    assert gpu_tests.record(again, cases, known, page) == found
    assert page.read_text() == text


def test_a_case_that_failed_once_has_failed(tmp_path):
    def suite(body):
        return f'<testsuite><testcase classname="tests.gpu.test_x" name="a" time="1">{body}</testcase></testsuite>'

    for name, body in (("a", "<failure/>"), ("b", ""), ("c", "<skipped/>")):
        (tmp_path / f"{name}.xml").write_text(suite(body))
    found = gpu_tests.found(sorted(tmp_path.glob("*.xml")), MADE, {})
    assert (found["tests/gpu/test_x.py"]["failed"], found["tests/gpu/test_x.py"]["passed"]) == (1, 0)


def test_a_table_names_few_of_many_failures():
    many = {"passed": 0, "skipped": 0, "failed": 9, "not run": 0, "seconds": 1.0, "failures": list("abcdefghi"), **MADE}
    text = gpu_tests.section({"tests/gpu/test_x.py": many}, ["tests/gpu/test_x.py"])
    assert "| `test_x` | 9 failed: `a`, `b`, `c`, `d`, `e`, 4 more | 1 |" in text


def test_without_a_test_or_a_place_nothing_is_written(tmp_path):
    (tmp_path / "about.json").write_text(json.dumps(MADE))
    with pytest.raises(SystemExit, match="no test has ended"):
        gpu_tests.record(tmp_path, {}, tmp_path / "known.json", tmp_path / "page.md")
    with pytest.raises(ValueError, match=r"no .* before"):
        gpu_tests.put("# Page", "")


def test_the_page_has_its_place_and_names_every_file():
    page, known = gpu_tests.PAGE.read_text(), json.loads(gpu_tests.KNOWN.read_text())
    assert gpu_tests.written(page, known) == page, "run `python -m bench.gpu_tests page`"
