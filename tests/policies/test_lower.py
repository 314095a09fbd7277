from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.contracts import plan_of
from tests.policies.grids import close, grids, largest_term, reference, run


def policy(mask: str = "trie", score: str = "parent + logp", rank: str = "score", normalize: str = "full") -> str:
    params = "params:\n  a: {value: 0.7, range: [0.1, 9]}\n  b: {value: -2, range: [-9, 9]}\n"
    return (
        f"widebeam: 1\n{params}steps:\n  all:\n    mask: {mask}\n    normalize: {normalize}\n"
        f"    score: {score}\n    rank: {rank}\n"
    )


PLAIN = {
    (mask, normalize): plan_of(policy(mask, normalize=normalize))
    for mask in ("trie", "none", "trie and not seen", "trie or seen", "not (trie and seen) and step < 3")
    for normalize in ("full", "step", "valid", "none")
}


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_ranks_are_within_four_ulp_of_the_reference_and_bad_counts_equal(data):
    plan = PLAIN[data.draw(st.sampled_from(sorted(PLAIN)))]
    grid = data.draw(grids(plan.structure.steps[0].children))
    got, want = run(plan, grid), reference(plan, grid)
    terms = largest_term(grid)
    assert close(got.rank.numpy(), want.rank, terms).all()
    assert close(got.score.numpy(), want.score, terms).all()
    assert got.bad.tolist() == want.bad.tolist()


ARITHMETIC = [
    "parent + logit_ * 0.1",
    "parent * 0.1 + 0.2 - width / 3",
    "parent / 3",
    "1 / (parent + 0.5) + param.a",
    "parent * param.b / param.a - step * 0.1",
    "where(seen, -param.a * 8, parent) * 0.3",
    "clip(parent, -10, -1) ** 3 + min(parent, param.b, -2)",
    "parent ** -2 - abs(parent) ** 2 * 1e-3",
    "max(parent, param.b) - step / 7 + 0.1 + 0.2",
    "where(parent > -1 and not seen or trie, 1, parent - 1 / 3)",
    "where(parent == -1.5, parent, -parent * 1e30 * 1e30)",
    "(0.1 + 0.2) * parent",
    "parent / (1 - 1 + parent)",
    "parent - (-0.0)",
]
EXACT = {text: plan_of(policy("none", score=text.replace("logit_", "logp"), normalize="none")) for text in ARITHMETIC}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_arithmetic_is_bit_equal_to_the_reference(data):
    plan = EXACT[data.draw(st.sampled_from(ARITHMETIC))]
    params = {"a": data.draw(st.sampled_from([0.1, 0.7, 9.0])), "b": data.draw(st.sampled_from([-9.0, 0.0, 0.3]))}
    grid = data.draw(grids(False, params))
    got, want = run(plan, grid), reference(plan, grid)
    assert got.rank.numpy().tobytes() == want.rank.tobytes()
    assert got.bad.tolist() == want.bad.tolist()


FUNCTIONS = {
    text: plan_of(policy("none", score="parent + logp", rank=text, normalize="step"))
    for text in ("log(prob)", "exp(score / 100)", "sqrt(-score)", "sigmoid(score)", "prob ** 0.5", "prob ** 1.5")
}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_functions_are_close_to_the_reference(data):
    plan = FUNCTIONS[data.draw(st.sampled_from(sorted(FUNCTIONS)))]
    grid = data.draw(grids(False))
    got, want = run(plan, grid), reference(plan, grid)
    a, b = got.rank.numpy(), want.rank
    same = np.isfinite(a) & np.isfinite(b)
    assert np.allclose(a[same], b[same], rtol=1e-4, atol=1e-4 * float(largest_term(grid).max()))


def logits(*rows: list[float]) -> dict[str, object]:
    from app.policies.reference import Grid

    values = np.array(rows, np.float32)
    w, c = values.shape
    all_true, none = np.ones((w, c), bool), np.zeros((w, c), bool)
    code = np.tile(np.arange(c), (w, 1))
    parent = np.zeros(w, np.float32)
    return Grid(values, code, all_true, all_true, none, none, parent, None, {}, 1, 4)


def test_masks_come_before_normalisation_and_invalid_is_minus_infinity():
    from dataclasses import replace

    grid = replace(logits([1.0, 2.0, 3.0]), seen=np.array([[False, True, False]]))
    rank = run(plan_of(policy("trie and not seen", normalize="valid")), grid).rank[0]
    assert rank[1] == -np.inf
    assert torch.allclose(rank[[0, 2]].exp().sum(), torch.tensor(1.0))
    full = run(plan_of(policy("trie and not seen", normalize="step")), grid).rank[0]
    assert full[[0, 2]].exp().sum() < 0.9


def test_a_forced_code_costs_nothing_when_only_legal_codes_count():
    from dataclasses import replace

    grid = replace(logits([1.0, 50.0, 3.0]), legal=np.array([[True, False, False]]))
    assert run(plan_of(policy(normalize="valid")), grid).rank[0].tolist() == [0.0, -np.inf, -np.inf]


def test_excluded_candidates_are_masked_whatever_the_policy_says():
    from dataclasses import replace

    grid = replace(logits([1.0, 2.0]), excluded=np.array([[False, True]]))
    assert run(plan_of(policy("none")), grid).rank[0, 1] == -np.inf


def test_a_code_without_a_token_is_invalid_even_where_the_score_does_not_read_it():
    got = run(plan_of(policy(score="parent")), logits([1.0, -np.inf]))
    assert got.rank[0].tolist() == [0.0, -np.inf]
    assert got.bad.tolist() == [0]


def test_a_dead_row_is_all_invalid_and_not_counted():
    for normalize in ("full", "step", "valid", "none"):
        got = run(plan_of(policy(normalize=normalize)), logits([-np.inf, -np.inf], [0.0, 1.0]))
        assert torch.isinf(got.rank[0]).all()
        assert torch.isfinite(got.rank[1]).all()
        assert got.bad.tolist() == [0, 0]


@pytest.mark.parametrize("rank", ["log(score - 100)", "score / (step - 1)", "sqrt(score - 100)", "1e30 * 1e30 * step"])
def test_nan_infinity_and_division_by_zero_make_a_candidate_bad(rank):
    got = run(plan_of(policy("none", rank=rank)), logits([1.0, 2.0, 3.0]))
    assert got.bad.tolist() == [3]
    assert torch.isinf(got.rank).all()
    assert torch.isinf(got.score).all()


def test_minus_zero_ties_with_zero():
    got = run(plan_of(policy("none", rank="where(logp == 1, 0, -0.0) * 1", normalize="none")), logits([1.0, 2.0]))
    assert not torch.signbit(got.rank).any()


def test_inputs_in_half_precision_are_computed_in_fp32():
    grid = logits([1.0, 2.0, 3.0])
    plan = plan_of(policy("none", score="parent + 0.1 * logp", normalize="none"))
    assert run(plan, grid).rank.dtype == torch.float32


def test_step_vocab_and_width_are_numbers_of_the_step():
    plan = plan_of(policy("none", score="step * 10000 + vocab + width / 1000", normalize="none"))
    assert run(plan, logits([0.0]), 2).rank.item() == np.float32(np.float32(20064) + np.float32(4) / np.float32(1000))
