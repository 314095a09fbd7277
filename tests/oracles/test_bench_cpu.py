"""The CPU bench at toy size: generate, the own loops and Widebeam find the same items, and all are reported."""

import json
import subprocess
import sys
from pathlib import Path

from bench._peers import NAMES
from bench._report import OURS

CLONE = Path(__file__).parent.parent.parent


def test_everybody_finds_the_same_and_is_timed(tmp_path):
    command = [sys.executable, "-m", "bench.cpu", "--toy", "--only", "search", "--seconds", "0", "--out", str(tmp_path)]
    done = subprocess.run(command, check=False, cwd=CLONE, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    for cell in json.loads((tmp_path / "cpu.json").read_text())["search"]["cells"]:
        assert cell["items"] == cell["batch"] * cell["width"]
        assert set(cell["median_ms"]) == set(cell["near_ties_swapped"]) == {*NAMES, *OURS}
        assert all(0 < cell["min_ms"][name] <= value for name, value in cell["median_ms"].items())
    table = (tmp_path / "cpu.md").read_text()
    assert all(name in table for name in (*NAMES, *OURS))
