"""`widebeam demo` on the repository's own root: the first thing that anybody runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests import support

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.timeout(700)  # seconds on an idle machine


def test_the_demo_recommends_for_three_users_and_stops():
    command = [sys.executable, "-m", "app", "demo", "--root", str(ROOT)]
    # threads that meet after each product sleep until the last has come: others may want the cores
    env = {**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=650, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("versions: snapshot") == 3
    assert done.stdout.count("│ 10 │") == 3
    assert "curl" not in done.stdout  # there is nobody to ask any more


def test_a_root_without_weights_is_an_error_with_its_reason(tmp_path):
    (tmp_path / "deployment.toml").write_text('family = "onerec"\n[sid]\nsizes = [4, 4]\n')
    command = [sys.executable, "-m", "app", "demo", "--root", str(tmp_path)]
    command += ["--users", str(ROOT / "examples" / "movielens" / "users.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=650, check=False)
    assert done.returncode == 1
    assert "no_weights" in done.stderr


def test_a_demo_that_is_asked_to_end_takes_its_server_along(tmp_path):
    root, users = support.write_root(tmp_path / "root"), tmp_path / "users.json"
    users.write_text('[{"id": "u", "history": ["i0"]}]')
    command = [sys.executable, "-m", "app", "demo", "--root", str(root), "--users", str(users), "--keep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        last = next(line for line in demo.stdout if line.startswith("serving at "))
        demo.send_signal(signal.SIGTERM)
        demo.communicate(timeout=600)
    assert demo.returncode in (0, 130)  # 130: before it began to wait
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{last.split()[2]}/livez")


def test_a_root_without_users_to_ask_for_names_the_option(tmp_path):
    command = [sys.executable, "-m", "app", "demo", "--root", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=650, check=False)
    assert done.returncode == 1
    assert "users.json: No such file or directory; --users names another file" in done.stderr
