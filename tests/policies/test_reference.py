"""The oracle against the plainest code there is, and against answers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from app.policies.reference import evaluate, normalise, sanitise, top

VALUES = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, -np.inf])


def by_hand(rank, order, code, codes, k):
    """T0 as the sentence says it: rank descending, then order * C + code ascending."""
    candidates = [
        (-float(rank[r, f]) + 0.0, int(order[r]) * codes + int(code[r, f]), r * rank.shape[1] + f)
        for r in range(rank.shape[0])
        for f in range(rank.shape[1])
        if rank[r, f] > -np.inf
    ]
    return [flat for _, _, flat in sorted(candidates)][:k]


@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=VALUES),
    st.integers(1, 20),
    st.data(),
)
def test_top_is_the_total_order_t0(rank, k, data):
    w, c = rank.shape
    order = np.array(data.draw(st.permutations(range(w))))
    code = np.tile(np.arange(c), (w, 1))
    assert top(rank + np.float32(0), order, code, c, k).tolist() == by_hand(rank, order, code, c, k)


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=VALUES), st.randoms())
def test_the_physical_order_of_rows_changes_nothing(rank, random):
    w, c = rank.shape
    code, order = np.tile(np.arange(c), (w, 1)), np.arange(w)
    shuffled = np.array(random.sample(range(w), w))
    first = top(rank, order, code, c, 7)
    second = top(rank[shuffled], order[shuffled], code, c, 7)
    assert [(shuffled[at // c], at % c) for at in second] == [(at // c, at % c) for at in first]


def test_fewer_valid_than_k_are_not_filled_up():
    rank = np.array([[1.0, -np.inf, 2.0]], np.float32)
    assert top(rank, np.zeros(1, int), np.arange(3)[None], 3, 10).tolist() == [2, 0]


def test_bad_logits_become_minus_infinity_and_are_counted_by_row():
    clean, bad = sanitise(np.array([[np.nan, np.inf, -np.inf, 1.0], [1, 2, 3, 4]], np.float32))
    assert clean[0].tolist() == [-np.inf, -np.inf, -np.inf, 1.0]
    assert bad.tolist() == [2, 0]


def test_log_probabilities_sum_to_one_over_what_they_are_normalised_over():
    logits = np.array([[1.0, 2.0, 3.0]], np.float32)
    valid = np.array([[True, False, True]])
    step = normalise("step", logits, logits, valid, None)
    legal = normalise("valid", logits, logits, valid, None)
    assert math.isclose(np.exp(step).sum(), 1, rel_tol=1e-6)
    assert math.isclose(np.exp(legal[valid]).sum(), 1, rel_tol=1e-6)
    full = normalise("full", logits, logits, valid, np.array([10.0], np.float32))
    assert full.tolist() == (logits - 10).tolist()
    assert normalise("none", logits, logits, valid, None).tolist() == logits.tolist()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x + 0.1 * 2", np.float32(3) + np.float32(0.1) * np.float32(2)),
        ("2 ** 3 ** 2", 512.0),
        ("-x ** 2", -9.0),
        ("x ** -1", np.float32(1) / np.float32(3)),
        ("clip(x, 0, 1) + min(x, 2, 5) + max(x, 4)", 7.0),
        ("where(x > 2 and not x == 4, 1, 2)", 1.0),
        ("x / 0", math.nan),
        ("log(0)", math.nan),
        ("sigmoid(0)", 0.5),
        ("sqrt(x * x) - abs(-x)", 0.0),
        ("param.a * exp(0)", 7.0),
    ],
)
def test_expressions_have_the_values_of_their_arithmetic(text, value):
    got = float(np.asarray(evaluate(text, {"x": np.float32(3), "param.a": np.float32(7)})))
    assert got == value or (math.isnan(got) and math.isnan(value))
