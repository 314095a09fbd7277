"""The shape of the tree: sizes, mirrors, and words that have no place in it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "app").rglob("*.py"))
MAX_LINES = 500
FORBIDDEN = re.compile(
    r"^\s*(?:import|from)\s+(?:pickle|cloudpickle|dill|shelve|marshal)\b|\btorch\.load\(|(?<![\w.])(?:eval|exec)\("
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("module", MODULES, ids=name)
def test_a_module_is_one_room_and_runs_nothing_from_data(module):
    text = module.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    code = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
    assert not FORBIDDEN.search(code)


def test_every_module_has_a_docstring():
    without = [name(m) for m in MODULES if m.name != "__init__.py" and not m.read_text().startswith('"""')]
    assert without == []


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["dev"] + extras["oracles"]
    names = {re.match(r"[A-Za-z0-9_.-]+", want)[0].lower().replace("_", "-") for want in wanted}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    assert names - pinned == set()


def test_the_data_has_its_own_terms_beside_it():
    folder = ROOT / "data" / "ml-latest-small"
    assert (folder / "README.txt").exists()
    assert "GroupLens" in (folder / "DATA_LICENSE.md").read_text()


def test_the_makefile_names_what_ci_calls():
    makefile, ci = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
    for target in re.findall(r"^make (\S+)$", ci, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
