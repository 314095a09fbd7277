"""docs/policies/testing.md, executed: its tests pass, its command gives what it shows."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

from typer.testing import CliRunner

from app.cli.main import app

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "policies" / "testing.md").read_text("utf-8")


def run(*args):
    return CliRunner().invoke(app, [*map(str, args), "--root", str(ROOT)])


def test_the_tests_of_the_page_pass_on_the_demo(tmp_path):
    [text] = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    folder = shutil.copytree(ROOT / "policies", tmp_path / "policies")
    shutil.rmtree(folder / "tests")
    (folder / "tests").mkdir()
    (folder / "tests" / "page.yaml").write_text(text)
    result = run("policy", "test", folder)
    assert (result.exit_code, result.stdout) == (0, ""), result.stdout
    assert result.stderr.startswith("2 tests, 0 failed\n")


def test_the_failure_of_the_page_is_a_real_one(tmp_path):
    folder = shutil.copytree(ROOT / "policies", tmp_path / "policies")
    file = folder / "tests" / "demo.yaml"
    lines = file.read_text().splitlines(keepends=True)
    place, row = re.search(r"demo\.yaml:(\d+):.*\n +\d+ \|( +survivors: .*\n)", GUIDE).groups()
    lines[int(place) - 1] = row[1:]
    file.write_text("".join(lines))
    result = run("policy", "test", folder)
    shown = re.search(r"```text\n(policies/tests/demo.yaml.*?)```", GUIDE, re.DOTALL)[1]
    assert result.stdout.replace(f"{folder}/", "policies/") == shown


def test_the_commands_of_the_page_give_what_it_shows():
    for command, output in re.findall(r"```console\nwidebeam (.*?)\n```\n```text\n(.*?)```", GUIDE, re.DOTALL):
        result = run(*shlex.split(command))
        assert (result.exit_code, masked(result.stdout)) == (0, masked(output))


def masked(text):
    """Without policy ids, which change with every edit of the demo."""
    return re.sub(r"\b[0-9a-f]{12}\b", "ID", text)
