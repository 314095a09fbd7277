from __future__ import annotations

import json
import re

import pytest

from tests.policies.contracts import BASE, contract, plan_of

TEXT = """\
widebeam: 1
extends: base
params:
  w: {value: 0.5, range: [0.1, 2]}
steps:
  all:
    score: parent + param.w * logp
"""


def test_ids_are_twelve_hex_digits():
    plan = plan_of("widebeam: 1\n")
    for one in (plan.policy_id, plan.structure.id, plan.plan_id):
        assert re.fullmatch("[0-9a-f]{12}", one)


@pytest.mark.parametrize(
    "same",
    [
        "# a comment\n" + TEXT,
        TEXT.replace("parent + param.w * logp", "( parent+(param.w*logp) )  # why"),
        TEXT.replace("0.5", "5e-1").replace("[0.1, 2]", "[0.10, 2.0]"),
        TEXT + "    mask: trie\n",
        TEXT + "  last:\n    select: top()\n    normalize: full\n",
        TEXT + "about: other words\nowner: me\n",
        TEXT.replace("\n", "\r\n"),
        TEXT.replace("extends: base\n", ""),
        TEXT.replace("score: parent + param.w * logp", "score: |\n      parent\n      + param.w * logp"),
    ],
)
def test_spelling_comments_and_overrides_without_effect_keep_the_id(same):
    assert plan_of(same).policy_id == plan_of(TEXT).policy_id


@pytest.mark.parametrize(
    "other",
    [
        TEXT.replace("0.5", "0.6"),
        TEXT.replace("2]", "3]"),
        TEXT.replace("param.w * logp", "logp * param.w"),
        TEXT + "    mask: not seen\n",
        TEXT + "widths: [1, 2, 3]\n",
        TEXT + "final: {limit: 5}\n",
        TEXT + "underfill: error\n",
    ],
)
def test_whatever_changes_an_answer_changes_the_id(other):
    assert plan_of(other).policy_id != plan_of(TEXT).policy_id


def test_parameters_and_widths_share_a_structure_and_operators_do_not():
    structure = plan_of(TEXT).structure.id
    assert plan_of(TEXT.replace("0.5", "0.6") + "widths: [1, 2, 3]\nfinal: {limit: 5}\n").structure.id == structure
    assert plan_of(TEXT + "    mask: not seen\n").structure.id != structure
    # another precut class: a range that reaches zero no longer keeps the order of a row
    assert plan_of(TEXT.replace("[0.1, 2]", "[0, 2]")).structure.id != structure


def test_a_plan_belongs_to_a_contract():
    from dataclasses import replace

    one, other = plan_of(TEXT), plan_of(TEXT, replace(contract(), id="other"))
    assert (one.policy_id, one.structure.id) == (other.policy_id, other.structure.id)
    assert one.plan_id != other.plan_id


def test_the_resolved_policy_is_json_and_compiles_to_itself():
    plan = plan_of(TEXT)
    assert json.loads(json.dumps(plan.resolved)) == plan.resolved
    steps = plan.resolved["steps"]
    again = {
        "widebeam": 1,
        "params": {"w": {"value": 0.5, "range": [0.1, 2]}},
        "steps": {
            str(t): {word: value for word, value in step.items() if value is not None and word not in ("logits",)}
            for t, step in enumerate(steps, 1)
        },
    }
    text = json.dumps(again).replace('"full"', "full").replace('"1":', "1:")
    assert plan_of(text, base=BASE).policy_id == plan.policy_id
