"""The pages of the codes are their tests: each shows a file and the whole text that it gets."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from app.config import RequestFields
from app.policies.builtin import BUILT_IN
from app.policies.cache import Cache
from app.policies.diagnostics import render
from app.policies.facts import Catalogue, Column
from app.policies.load import compile_folder, snapshot
from app.policies.rules import RULES
from tests.policies.contracts import BASE, contract

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "policies" / "codes"
FILE = re.compile(r"File `policies/(\S+)`:\n\n```yaml\n(.*?)```\n", re.DOTALL)


def page(code: str) -> tuple[str, str]:
    text = (PAGES / f"{code}.md").read_text("utf-8")
    bad, good = text.split("## Bad\n")[1].split("## Good\n")
    return bad, good


def test_every_code_has_a_page_and_every_page_a_code():
    assert {one.stem for one in PAGES.glob("*.md")} == set(RULES)


def test_every_code_is_raised_somewhere():
    source = "\n".join(path.read_text() for path in (ROOT / "app" / "policies").glob("*.py") if path.stem != "rules")
    assert {code for code in RULES if f'"{code}"' not in source} == set()
    assert {code for code in re.findall(r'"([STPXKEWC]\d{3})"', source) if code not in RULES} == set()


COLUMNS = (
    Column("attr", "age", low=0, high=10),
    Column("attr", "fresh", low=0, high=1, aggregate="share"),
    Column("attr", "any_fresh", "condition", aggregate="any"),
)
CATALOGUE = Catalogue((10**9,) * 3, COLUMNS)
WHY = "widebeam-gap 1.0 fails when it is imported: ModuleNotFoundError: No module named 'scipy'"
OPERATORS = replace(BUILT_IN, broken={"gap": WHY})
BEFORE = re.compile(r"Before, and running, `policies/(\S+)`:\n\n```yaml\n(.*?)```\n", re.DOTALL)
NOW = re.compile(r"Now: (\S+)\.\n")


def load(folder, page, files):
    """The set after `files` were written, and what its own policy says; where the page says what ran before, that is
    loaded first."""
    sizes, widths = (json.loads(one) for one in re.search(r"sizes (\[.*?\]), widths (\[.*?\])", page).groups())
    fields = dict.fromkeys(re.findall(r"request field `ctx\.(\w+)`", page), ())
    on = replace(contract(sizes, widths), request=RequestFields(ctx=fields))
    moment = NOW.search(page)
    now = datetime.fromisoformat(moment[1]).timestamp() if moment else None
    running = None
    (folder / "base.yaml").write_text(BASE)
    for stage in filter(None, ([*files[:-1], *BEFORE.findall(page)] if BEFORE.search(page) else [], files)):
        for name, text in stage:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(text.encode())
        loaded = compile_folder(snapshot(folder), on, CATALOGUE, cache=Cache(OPERATORS), running=running, now=now)
        running = loaded.traffic
    own = loaded.policies.get(Path(files[-1][0]).stem)
    return [*(own.findings if own else ()), *loaded.findings]


BY_FILES = sorted(set(RULES) - {"C101"})
"""C101 is a bug of ours, which no file can show; test_selfcheck plants some."""


@pytest.mark.parametrize("code", BY_FILES)
def test_the_bad_file_of_a_page_gets_exactly_the_text_of_the_page(code, tmp_path):
    bad, _ = page(code)
    findings = load(tmp_path, bad, FILE.findall(bad))
    assert render(findings) == re.search(r"```text\n(.*?)\n```", bad, re.DOTALL)[1]
    assert {one.rule.code for one in findings} == {code}


@pytest.mark.parametrize("code", BY_FILES)
def test_the_good_file_of_a_page_has_no_findings(code, tmp_path):
    bad, good = page(code)
    files = FILE.findall(bad)
    name = files[-1][0] if "/" in files[-1][0] or files[-1][0] == "traffic.yaml" else "feed.yaml"
    assert render(load(tmp_path, bad, [*files[:-1], (name, re.search(r"```yaml\n(.*?)```", good, re.DOTALL)[1])])) == ""


@pytest.mark.parametrize("code", sorted(RULES))
def test_a_page_starts_with_its_rule(code):
    assert (PAGES / f"{code}.md").read_text("utf-8").startswith(f"# {code}: {RULES[code].title}\n\n## What\n")
