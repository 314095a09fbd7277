"""Running cases: expectations that hold and that do not, cases that do not fit, and a compiler with a bug in it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.policies.cases import read_cases
from app.policies.diagnostics import Findings
from app.policies.facts import facts_of
from app.policies.source import Source
from app.policies.testing import run_case
from tests.policies.batches import CATALOGUE
from tests.policies.contracts import contract, plan_of

HEAD = "widebeam: 1\nkind: tests\ntests:\n  t:\n    policy: p\n"
PENALTY = (
    "widebeam: 1\nparams:\n  penalty: {value: 2, range: [0, 9]}\nsteps:\n  last:\n"
    "    rank: score - where(seen, param.penalty, 0)\n"
)


def run(body, policy="widebeam: 1\n", plan=None):
    source = Source("policies/tests/t.yaml", (HEAD + body).encode())
    found = Findings(lambda _: source.lines())
    [case] = read_cases(source, found)
    assert list(found) == []
    plan = plan or plan_of(policy, catalogue=CATALOGUE)
    ran = run_case(case, plan, contract(), facts_of(contract(), CATALOGUE), source.lines())
    return [one.text() for one in ran.failures]


def one(expect, step=1, parents="- {logits: [3, 2, 1]}", more=""):
    return f"    step: {step}\n{more}    parents:\n      {parents}\n    expect: {{survivors: {expect}}}\n"


def test_what_holds_passes():
    assert run(one("[[0, 0], [0, 1], [0, 2]]")) == []
    assert run(one("[[0, 0], [0, 1]]", more="    width: 2\n")) == []
    assert run(one("none", parents="- {logits: [1], trie: [4]}")) == []


def test_what_does_not_hold_says_what_came_and_why():
    [text] = run(one("[[0, 1], [0, 2]]", parents="- {logits: [3, 2, 1], exclude: [2]}", more="    width: 1\n"))
    assert text == (
        "policies/tests/t.yaml:10:25: error test: t: survivors are [[0, 0]], expected [[0, 1], [0, 2]]\n"
        "    10 |     expect: {survivors: [[0, 1], [0, 2]]}\n"
        "       |                         ^\n"
        "  help: [0, 0] rank -0.4076; [0, 1] rank -1.408 beyond the width; [0, 2] removed by exclude"
    )


def test_scores_are_compared_to_three_digits():
    body = one("[[0, 0]], scores: [%s]", more="    width: 1\n")
    assert run(body % "-0.408") == []
    [text] = run(body % "-0.42")
    assert "t: scores are [-0.4076]\n" in text


def test_parameters_seen_items_and_columns_reach_the_policy():
    parents = "- {prefix: [1, 2], logits: [3, 2, 0], seen: [0]}"
    assert run(one("[[0, 1], [0, 0], [0, 2]]", 3, parents), PENALTY) == []
    assert run(one("[[0, 0], [0, 1], [0, 2]]", 3, parents, "    params: {penalty: 0.5}\n"), PENALTY) == []
    fresh = "widebeam: 1\nsteps:\n  2:\n    mask: trie and not attr.cold\n    rank: score + attr.age + user.age\n"
    rows = "- {prefix: [1], logits: [0, 0, 0], columns: {attr.age: {1: 2, 2: 1}, attr.cold: {0: true}}}"
    assert run(one("[[0, 1], [0, 2]]", 2, rows, "    columns: {user.age: 31}\n"), fresh) == []
    genre = 'widebeam: 1\nsteps:\n  2:\n    mask: trie and attr.genre == "drama"\n'
    rows = "- {prefix: [1], logits: [0, 0], columns: {attr.genre: {0: crime, 1: drama}}}"
    assert run(one("[[0, 1]]", 2, rows), genre) == []


def test_carried_numbers_and_noise_are_the_policys_own():
    diverse = "widebeam: 1\nwidths: [4, 4, 4]\nsteps:\n  all:\n    select: diverse(groups=2, penalty=5)\n"
    rows = "- {prefix: [1], logits: [3, 2, 0], carry: 0}\n      - {prefix: [2], logits: [3, 2, 0], carry: 1}"
    assert run(one("[[0, 0], [0, 1], [1, 2], [1, 0]]", 2, rows), diverse) == []
    [text] = run(one("none", 2, rows.replace(", carry: 1", "")), diverse)
    assert "this policy's beams carry a number" in text
    noisy = "widebeam: 1\nsteps:\n  all:\n    rank: score + gumbel\n"
    heads = {run(one("none", more=f"    seed: {seed}\n"), noisy)[0].splitlines()[0] for seed in range(12)}
    assert len(heads) > 1


@pytest.mark.parametrize(
    ("body", "policy", "message"),
    [
        (one("none", 9), "widebeam: 1\n", "there is no step 9"),
        (one("none", parents="- {logits: {64: 1}}"), "widebeam: 1\n", "code 64 is above the codes of step 1, 0 to 63"),
        (one("none", parents="- {logits: [1]}\n      - {logits: [1]}"), "widebeam: 1\n", "step 1 has one parent"),
        (one("none", 3, "- {prefix: [1], logits: [1]}"), "widebeam: 1\n", "has a prefix of 2 codes"),
        (one("none", more="    params: {w: 1}\n"), "widebeam: 1\n", "p has no parameter `w`"),
        (one("none", more="    params: {penalty: 99}\n"), PENALTY, "param penalty is 99; allowed range is 0 to 9"),
        (one("none", 2), "widebeam: 1\nsteps:\n  2:\n    rank: score + attr.age\n", "the policy reads `attr.age`"),
        (
            one("none", 2, "- {prefix: [1], logits: [1], columns: {attr.genre: jazz}}"),
            'widebeam: 1\nsteps:\n  2:\n    mask: trie and attr.genre == "drama"\n',
            "`attr.genre` has no value `jazz`",
        ),
        (
            one("none", 2, "- {prefix: [1], logits: [1], columns: {attr.cold: 1}}"),
            "widebeam: 1\nsteps:\n  2:\n    mask: trie and attr.cold\n",
            "`attr.cold` is a flag, not `1",
        ),
    ],
)
def test_what_does_not_fit_fails_at_its_place(body, policy, message):
    [text] = run(body, plan=replace(plan_of(policy, catalogue=CATALOGUE), policy="p"))
    assert message in text.splitlines()[0]
    assert text.startswith("policies/tests/t.yaml:")


def test_a_bug_of_the_compiler_fails_every_test_that_meets_it():
    plan = plan_of("widebeam: 1\n")
    step = plan.structure.steps[0]
    shifted = replace(step, run=lambda inputs: step.run(inputs._replace(logits=inputs.logits + inputs.code)))
    broken = replace(plan, structure=replace(plan.structure, steps=(shifted, *plan.structure.steps[1:])))
    assert run(one("[[0, 0], [0, 1], [0, 2]]")) == []
    [text] = run(one("[[0, 0], [0, 1], [0, 2]]"), plan=broken)
    assert "t: the compiled plan and the reference differ: scores" in text
    assert "bug of Widebeam" in text
