"""The pages of the codes are their tests: each shows a file and the whole text that it gets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.policies.diagnostics import render
from app.policies.load import load_policies
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


@pytest.mark.parametrize("code", sorted(RULES))
def test_the_bad_file_of_a_page_gets_exactly_the_text_of_the_page(code, tmp_path):
    bad, _ = page(code)
    sizes, widths = (json.loads(one) for one in re.search(r"sizes (\[.*?\]), widths (\[.*?\])", bad).groups())
    files = FILE.findall(bad)
    (tmp_path / "base.yaml").write_text(BASE)
    for name, text in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    loaded = load_policies(tmp_path, contract(sizes, widths))
    own = loaded.policies.get(Path(files[-1][0]).stem)
    got = render([*(own.findings if own else ()), *loaded.findings])
    assert got == re.search(r"```text\n(.*?)\n```", bad, re.DOTALL)[1]
    assert {one.rule.code for one in (*(own.findings if own else ()), *loaded.findings)} == {code}


@pytest.mark.parametrize("code", sorted(RULES))
def test_the_good_file_of_a_page_has_no_findings(code, tmp_path):
    bad, good = page(code)
    sizes, widths = (json.loads(one) for one in re.search(r"sizes (\[.*?\]), widths (\[.*?\])", bad).groups())
    name = "traffic" if "policies/traffic.yaml" in bad else "feed"
    (tmp_path / "base.yaml").write_text(BASE)
    for other, text in FILE.findall(bad)[:-1]:
        (tmp_path / other).write_text(text)
    (tmp_path / f"{name}.yaml").write_text(re.search(r"```yaml\n(.*?)```", good, re.DOTALL)[1])
    loaded = load_policies(tmp_path, contract(sizes, widths))
    assert render([*loaded.findings, *(loaded.policies[name].findings if name == "feed" else ())]) == ""


@pytest.mark.parametrize("code", sorted(RULES))
def test_a_page_starts_with_its_rule(code):
    assert (PAGES / f"{code}.md").read_text("utf-8").startswith(f"# {code}: {RULES[code].title}\n\n## What\n")
