"""`explain` of every shipped policy is a golden file: a change that moves one must say so.

Write them anew with: python -m tests.policies.test_explain
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.policies.check_contract import Catalogue
from app.policies.compile import check_policy, lower
from app.policies.explain import explain, explain_text
from app.policies.resolve import Library
from app.policies.source import Source
from tests.policies.contracts import contract

FOLDER = Path(__file__).parents[2] / "policies"
GOLDEN = Path(__file__).parent / "golden"
SHIPPED = sorted(one.stem for one in FOLDER.glob("*.yaml") if one.stem != "traffic")
CONTRACT = contract((64, 64, 64), (512, 512, 512))
CATALOGUE = Catalogue((64, 2000, 9000))


def explained(name: str) -> tuple[str, dict[str, object]]:
    sources = {one: Source(f"policies/{one}.yaml", (FOLDER / f"{one}.yaml").read_bytes()) for one in SHIPPED}
    policy, found = check_policy(name, Library(sources), CONTRACT, CATALOGUE)
    assert not found.errors, found.text()
    plan = lower(policy, CONTRACT)
    return explain_text(policy, plan, CONTRACT, CATALOGUE) + "\n", explain(policy, plan, CONTRACT, CATALOGUE)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_plan_of_a_shipped_policy_is_its_golden_file(name):
    assert explained(name)[0] == (GOLDEN / f"{name}.txt").read_text("utf-8")


def test_golden_files_are_those_of_the_shipped_policies():
    assert sorted(one.stem for one in GOLDEN.glob("*.txt")) == SHIPPED


def test_the_data_says_the_same_as_the_text():
    _, data = explained("rewatch")
    assert json.loads(json.dumps(data)) == data
    assert data["extends"] == ["base"]
    assert [step["planned"] for step in data["steps"]] == [64, 512, 512]
    last = data["steps"][2]["phases"]["rank"]
    assert last == {"value": "score - where(seen, param.penalty, 0)", "from": "last of policies/rewatch.yaml:8"}
    assert data["steps"][0]["phases"]["select"] == {"value": "top()", "from": "all of policies/base.yaml:8"}
    assert data["params"]["penalty"]["range"] == [0.0, 50.0]
    assert data["widths"] == {"value": [512, 512, 512], "from": "contract"}
    assert data["steps"][1]["bytes"] == {"logits": 64 * 64 * 4, "ranks": 64 * 64 * 4, "survivors": 512 * 20}


@pytest.mark.parametrize(
    ("phase", "cut"),
    [
        ("select: top()", "rows to their best K"),
        ("select: explore(share=0.1)", "rows to their best K by rank, and again by rank with noise"),
        ("select: diverse(groups=2, penalty=1)", "rows to their best K, once and unpenalised, for all groups"),
        ("quota: ['cap(prefix[1], 3)']", "rows to their best K: every group of the quota is a union of rows"),
        (
            "quota: ['cap(token[3], 3)']",
            "none: groups of the quota cross rows; 4 K of a request a look, without groups that are full then",
        ),
    ],
)
def test_what_is_cut_from_the_rows_is_said_for_each_way_to_select(phase, cut):
    key = "all" if "select" in phase else "3"
    sources = {"feed": Source("feed.yaml", f"widebeam: 1\nsteps:\n  {key}:\n    {phase}\n".encode())}
    policy, found = check_policy("feed", Library(sources), CONTRACT, CATALOGUE)
    assert not found.errors, found.text()
    plan = lower(policy, CONTRACT)
    assert str(explain(policy, plan, CONTRACT, CATALOGUE)["steps"][2]["cuts"]).startswith(cut)
    assert f"  cut          {cut}" in explain_text(policy, plan, CONTRACT, CATALOGUE)


if __name__ == "__main__":
    for one in SHIPPED:
        (GOLDEN / f"{one}.txt").write_text(explained(one)[0], "utf-8")
