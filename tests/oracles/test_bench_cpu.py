"""The CPU bench at toy size: everybody finds the same items, the demo is measured under load, and all is reported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench._peers import NAMES
from bench._report import OURS, markdown

CLONE = Path(__file__).parent.parent.parent


@pytest.mark.timeout(1000)
def test_everybody_finds_the_same_and_is_timed(tmp_path):
    command = [sys.executable, "-m", "bench.cpu", "--toy", "--only", "search", "--seconds", "0", "--out", str(tmp_path)]
    done = subprocess.run(command, check=False, cwd=CLONE, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    for cell in json.loads((tmp_path / "cpu.json").read_text())["search"]["cells"]:
        assert cell["items"] == cell["batch"] * cell["width"]
        assert set(cell["median_ms"]) == set(cell["near_ties_swapped"]) == {*NAMES, *OURS}
        assert all(0 < cell["min_ms"][name] <= value for name, value in cell["median_ms"].items())
    table = (tmp_path / "cpu.md").read_text()
    assert all(name in table for name in (*NAMES, *OURS))


@pytest.mark.timeout(1000)
def test_the_demo_half_runs_and_reports(tmp_path):
    command = [sys.executable, "-m", "bench.cpu", "--toy", "--only", "demo", "--out", str(tmp_path)]
    done = subprocess.run(command, check=False, cwd=CLONE, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "cpu.json").read_text())
    demo = found["demo"]
    assert demo["saturation_per_s"] > 0
    assert demo["open_loop"]["answered"] == demo["open_loop"]["sent"] > 0
    assert [row["k"] for row in demo["rest_adds"]] == [10, 10, 100]
    assert demo["settings"]["environment"]["OMP_NUM_THREADS"] == "2"
    assert (tmp_path / "cpu.md").read_text() == markdown(found)
