"""The list after `expand` against plain loops, and what each operator promises."""

from __future__ import annotations

import numpy as np
import pytest

from app.policies.facts import Catalogue, Column
from app.policies.plan import FinalInputs, Plan
from app.policies.reference_final import Listed, final_list
from tests.policies.contracts import contract, plan_of

COLUMNS = (
    Column("item", "author", "text", labels=("a", "b", "c")),
    Column("item", "cold", "condition"),
    Column("item", "stock"),
    Column("item", "fresh", low=0, high=1),
)
CATALOGUE = Catalogue((10**6,) * 3, COLUMNS)


def policy(text: str) -> Plan:
    params = "params:\n  w: {value: 0.5, range: [0, 1]}\n"
    return plan_of(f"widebeam: 1\n{params}final:\n{text}", contract(), CATALOGUE)


POLICIES = {
    "mask": "  mask: item.stock > 0 and not seen\n",
    "mask label": '  mask: item.author in ["a", "c"] or item.cold\n',
    "score": "  score: score + param.w * item.fresh - 0.01 * position\n",
    "bad score": "  score: score + log(item.stock)\n",
    "dedupe": "  dedupe: item.author\n",
    "dedupe number": "  dedupe: item.stock\n",
    "no dedupe": "  dedupe: none\n  mask: item.stock > 0\n",
    "cap": "  quota:\n    - cap(item.author, max=2)\n",
    "cap label": '  quota:\n    - cap(item.author == "a", max=1)\n',
    "floor": "  limit: 6\n  quota:\n    - floor(item.cold, min=3)\n",
    "floor and cap": "  limit: 6\n  quota:\n    - floor(item.cold, min=3)\n    - cap(item.author, max=2)\n",
    "mmr": "  rerank: mmr(weight=0.6, pool=8)\n  limit: 5\n",
    "mmr after cap": "  quota:\n    - cap(item.author, max=3)\n  rerank: mmr()\n  limit: 7\n",
    "all": (
        "  mask: item.stock > 0\n  score: score + param.w * item.fresh\n  quota:\n    - cap(item.author, max=4)\n"
        "  rerank: mmr(weight=0.3, pool=10)\n  limit: 6\n"
    ),
}
PLANS = {name: policy(text) for name, text in POLICIES.items()}


def items(rng: np.random.Generator) -> Listed:
    m = int(rng.integers(0, 14))
    extra = {
        "item.author": rng.integers(-1, 3, m),
        "item.cold": rng.random(m) < 0.3,
        "item.stock": rng.integers(0, 3, m).astype(np.float32),
        "item.fresh": rng.choice(np.array([0, 0.5, 1], np.float32), m),
    }
    score = np.sort(rng.choice(np.array([-0.5, -1, -1, -2, -3.5], np.float32), m))[::-1].copy()
    sid = rng.integers(0, 2, (m, 3)).astype(np.int32)
    seen = rng.random(m) < 0.3
    labels = {one.key: one.labels for one in COLUMNS if one.labels}
    return Listed(score, rng.integers(0, 9, m).astype(np.int64), sid, seen, extra, labels, {"w": 0.5})


def run(plan: Plan, given: Listed):
    assert plan.final is not None
    extra = {name: given.extra[name] for name in plan.final.uses if name != "seen"}
    inputs = FinalInputs(given.score, given.item, given.sid, given.seen if "seen" in plan.final.uses else None, extra)
    return plan.final.run(inputs, given.params)


@pytest.mark.parametrize("name", PLANS)
def test_the_list_is_that_of_the_plain_loops(name):
    rng = np.random.default_rng(len(name))
    plan = PLANS[name]
    for _ in range(150):
        given = items(rng)
        got = run(plan, given)
        want = final_list(plan.resolved["final"], given, plan.limit)
        assert got.index.tolist() == [at for at, _ in want]
        assert np.array_equal(got.score, np.array([score for _, score in want], np.float32))


def test_a_policy_that_only_expands_and_cuts_needs_no_program():
    for text in (
        "  limit: 5\n",
        "  expand: sid(max_items=2)\n",
        "  dedupe: item.id\n",
        "  score: score\n",
        "  mask: none\n",
    ):
        assert policy(text).final is None


def test_items_that_nan_or_infinity_cost_are_counted():
    given = items(np.random.default_rng(1))
    bad = run(PLANS["bad score"], given).bad
    assert bad == int((given.extra["item.stock"] == 0).sum())


def test_mmr_with_weight_one_keeps_the_order_of_scores():
    plan = policy("  rerank: mmr(weight=1, pool=100)\n")
    for seed in range(30):
        given = items(np.random.default_rng(seed))
        given.item[:] = np.arange(len(given.item))
        assert run(plan, given).index.tolist() == list(range(len(given.score)))


def test_an_empty_list_stays_empty():
    none = Listed(np.zeros(0, np.float32), np.zeros(0, np.int64), np.zeros((0, 3), np.int32), np.zeros(0, bool), {
        one.key: np.zeros(0, np.int64) for one in COLUMNS
    })  # fmt: skip
    for plan in PLANS.values():
        assert run(plan, Listed(**{**none.__dict__, "params": {"w": 0.5}})).index.tolist() == []
