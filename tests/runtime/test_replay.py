"""Two policies over recorded requests: the numbers by hand, and over a real runtime."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core import Item
from app.runtime.recorded import Recorded, recorded
from app.runtime.replay import compare, replay, summary
from tests.runtime.test_records import ASKED, OUTCOME
from tests.runtime.test_runtime import started

MADE = {"weights": "w", "vocab": "v", "policy_id": "id", "contract": "c"}


def answer(*items, policy_id="id"):
    found = tuple(Item(name, score, (0, 0, 0)) for name, score in items)
    return replace(OUTCOME, items=found, versions=OUTCOME.versions._replace(policy_id=policy_id))


def record(items=None, versions=MADE):
    return Recorded(ASKED, "log:1", versions, items)


def test_overlap_score_and_underfill_of_two_lists():
    one = answer(("a", -1.0), ("b", -2.0), ("c", -3.0))
    other = answer(("b", -1.5), ("a", -2.0))
    found = compare(record(), one, other)
    assert (found.overlap, found.same, found.first) == (2 / 3, False, False)
    assert found.score == pytest.approx((-1.0 + 0.5) / 2)
    assert (found.items, found.underfilled) == ((3, 2), (False, True))
    same = compare(record(), one, one)
    assert (same.overlap, same.same, same.first, same.score) == (1.0, True, True, 0.0)
    empty = compare(record(), answer(), answer())
    assert (empty.overlap, empty.same, empty.score) == (1.0, True, None)
    apart = compare(record(), one, answer(("x", 0.0)))
    assert (apart.overlap, apart.score) == (0.0, None)


def test_a_recorded_answer_is_compared_with_the_policy_that_gave_it():
    one, other = answer(("a", -1.0)), answer(("b", -1.0), policy_id="else")
    assert compare(record(("a",)), one, other).recorded is True
    assert compare(record(("b",)), one, other).recorded is False
    assert compare(record(("b",), {**MADE, "policy_id": "else"}), one, other).recorded is True
    assert compare(record(("a",), {**MADE, "weights": "old"}), one, other).recorded is None
    assert compare(record(None), one, other).recorded is None


def test_the_summary_is_over_those_that_were_answered():
    one = answer(("a", -1.0), ("b", -2.0), ("c", -3.0))
    pairs = [
        compare(record(("a", "b", "c")), one, one),
        compare(record(), one, answer(("a", -2.0))),
        compare(record(), answer(), answer(("a", -2.0))),
        compare(record(), one, one)._replace(error="invalid_request: k is 0"),
    ]
    found = summary(pairs)
    assert (found.requests, found.failed, found.reproduced, found.comparable) == (4, 1, 1, 1)
    assert found.overlap == pytest.approx((1 + 1 / 3 + 0) / 3)
    assert (found.least_overlap, found.same, found.same_first) == (0.0, 1 / 3, 2 / 3)
    assert (found.score, found.score_size) == (-0.5, 0.5)
    assert found.underfilled == (1 / 3, 2 / 3)
    assert found.no_items == (1 / 3, 0.0)
    assert summary([]).overlap is None
    assert summary(pairs[3:]).underfilled is None


async def test_records_are_asked_under_both_policies_in_their_order():
    policies = {"narrow": "widebeam: 1\nwidths: [2, 2, 2]\n", "also": "widebeam: 1\nwidths: [64, 64, 64]\n"}
    lines = [
        b'{"request_id": "r%d", "context": {"history": ["i%d"]}, "k": 5, "exclude": ["i%d"]}' % (n, n, n + 1)
        for n in range(30)
    ]
    bad = b'{"request_id": "bad", "context": {"history": ["i1"]}, "k": 5000}'
    async with started(policies) as world:
        records = [recorded(line, f"log:{n}") for n, line in enumerate([*lines, bad])]
        same = [one async for one in replay(world.runtime, records, "base", "also")]
        assert [one.request_id for one in same] == [*(f"r{n}" for n in range(30)), "bad"]
        assert all(one.same and one.score == pytest.approx(0, abs=1e-5) for one in same[:30])
        assert same[30].error.startswith("invalid_request: k is 5000")
        narrow = [one async for one in replay(world.runtime, records[:30], "base", "narrow")]
        assert summary(narrow).underfilled == (0.0, 1.0)
        for one, outcome in zip(narrow[:5], records[:5], strict=True):
            left, right = [
                {item.id for item in (await world.runtime.admit(replace(outcome.request, policy=name)).outcome()).items}
                for name in ("base", "narrow")
            ]
            assert one.overlap == len(left & right) / 5
            assert one.items == (5, len(right))
