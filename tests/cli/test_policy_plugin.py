"""docs/policies/plugin-example, installed and used as its README says, in a process of its own."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import compose as composition
from app.cli.compose import Overrides, compose
from app.policies.builtin import BUILT_IN
from app.policies.operators import Operators
from tests.served.process import serving
from tests.support import store_contract, write_root

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "policies" / "plugin-example"
README = (EXAMPLE / "README.md").read_text("utf-8")
BASE = "widebeam: 1\nwidths: [8, 16, 16]\n"
RUN = """
import json, sys
import pytest
from typer.testing import CliRunner
from app.cli.main import app
root, tests, commands = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
passed = pytest.main(["-q", "-p", "no:cacheprovider", tests])
results = [CliRunner().invoke(app, args) for args in commands]
print(json.dumps([passed, [[one.exit_code, one.stdout, one.stderr] for one in results]]))
"""

pytestmark = pytest.mark.slow


def test_the_example_is_installed_tested_explained_and_served_as_its_page_says(tmp_path, monkeypatch):
    commands = re.search(r"```console\n(.*?)```", README, re.DOTALL)[1].splitlines()
    assert commands[:2] == ["pip install ./docs/policies/plugin-example", "pytest docs/policies/plugin-example/tests"]
    assert commands[3] == "cp docs/policies/plugin-example/policies/clear.yaml policies/"

    package = shutil.copytree(EXAMPLE, tmp_path / "package")
    place = tmp_path / "installed"
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(place), str(package)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("PYTHONPATH", f"{place}:{ROOT}")

    root = store_contract(write_root(tmp_path / "root", policies={"base": BASE}))
    shutil.copy(package / "policies" / "clear.yaml", root / "policies")
    asked = [one.removeprefix("widebeam ").split() for one in commands[2:] if one.startswith("widebeam ")]
    asked += [["policy", "schema"]]
    run = [sys.executable, "-c", RUN, str(root), str(package / "tests"), json.dumps(asked)]
    done = subprocess.run(run, cwd=root, capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stderr
    passed, [help_, check, explain, schema] = json.loads(done.stdout.splitlines()[-1])
    assert passed == 0, done.stdout
    assert help_[:2] == [
        0,
        "gap(drop=2)   (under `keep`, of widebeam-gap, version 1)\n"
        "a row's codes, best first, down to the first fall of more than drop nats\n"
        "  drop: a number or a `param` from 0 to 100; 2 where it is not given\n"
        "  precut class M: who stays is a head of each row, and the best K of the row know it\n",
    ]
    assert check == [0, "", "0 errors, 0 warnings, 0 notes\n"]
    assert explain[0] == 0
    assert re.search(r"`explain` says.*?```text\n(.*?)\n```", README, re.DOTALL)[1] in explain[1].splitlines()
    assert "gap(drop=2): a row's codes" in schema[1]

    with serving(root) as server:
        server.ready()
        answer = server.ask("i1", "i2", policy="clear", explain=True).json()
        assert answer["versions"]["policy"] == "clear"
        assert answer["items"]
        steps = [one for one in answer["explain"] if one["kind"] == "step"]
        assert len(steps) == len(answer["explain"]) == 3  # no mismatch with the definition
        assert sum(step["removed"].get("keep", 0) for step in steps) > 0, steps
        assert not [line for line in server.lines if line.get("event") == "operator_refused"]


def test_a_start_names_what_is_refused_and_goes_on(tmp_path, monkeypatch):
    root = store_contract(
        write_root(tmp_path, policies={"base": BASE, "clear": (EXAMPLE / "policies" / "clear.yaml").read_text()})
    )
    broken = Operators(BUILT_IN.known, {"gap": "widebeam-gap 1.0 fails when it is imported: ImportError: no"})
    monkeypatch.setattr(composition, "installed", lambda: broken)
    log = io.BytesIO()
    loaded = compose(root, Overrides(), log).load()
    assert loaded.snapshot is not None
    assert loaded.snapshot.plan("base") is not None
    assert loaded.snapshot.plan("clear") is None
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    [refused] = [line for line in lines if line["event"] == "operator_refused"]
    assert (refused["operator"], refused["reason"]) == ("gap", broken.broken["gap"])
    [policy] = [line for line in lines if line["event"] == "policy_rejected"]
    assert "error P004: `gap` cannot be used: widebeam-gap 1.0 fails" in policy["diagnostics"]
