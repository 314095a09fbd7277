"""Mixtures of experts against plain loops over experts and rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.ops import grouped
from app.ops.grouped import reference

EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Half the step between neighbours, as a share of a number."""


@st.composite
def shapes(draw):
    """(rows, experts, chosen, seed)."""
    experts = draw(st.integers(1, 70))
    return draw(st.integers(0, 40)), experts, draw(st.integers(1, min(experts, 10))), draw(st.integers(0, 2**32 - 1))


def logits_of(n, experts, seed, ties):
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(n, experts, generator=made) * 3
    return x.round() if ties else x


@settings(deadline=None)
@given(shapes(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([1.0, 2.5]))
def test_the_best_experts_of_a_row_come_first_and_equal_ones_by_number(shape, sigmoid, normalise, ties, factor):
    n, experts, k, seed = shape
    logits = logits_of(n, experts, seed, ties)
    expert, weight = grouped.choose(logits, None, k, sigmoid=sigmoid, normalise=normalise, factor=factor)
    assert (expert.dtype, weight.dtype, expert.shape, weight.shape) == (torch.int32, torch.float32, (n, k), (n, k))
    for row, values in enumerate(logits.double().numpy()):
        score = (
            1 / (1 + np.exp(-values))
            if sigmoid
            else np.exp(values - values.max()) / np.exp(values - values.max()).sum()
        )
        order = sorted(range(experts), key=lambda e: (-values[e], e))[:k]
        own = score[order] / (score[order].sum() if normalise else 1) * factor
        assert expert[row].tolist() == order
        np.testing.assert_allclose(weight[row].numpy(), own, rtol=2e-6, atol=1e-12)


def test_a_bias_decides_who_is_chosen_and_not_what_it_weighs():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 3.0])
    expert, weight = grouped.choose(logits, bias, 2, sigmoid=True, normalise=False, factor=1.0)
    assert expert.tolist() == [[3, 0]]
    torch.testing.assert_close(weight, logits.sigmoid()[:, [3, 0]])


def test_a_row_that_is_not_a_number_touches_no_other_and_names_experts_that_are_there():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    logits[2, 5] = torch.nan
    expert, weight = grouped.choose(logits, None, 3, sigmoid=False, normalise=True, factor=1.0)
    assert bool(((expert >= 0) & (expert < 9)).all())
    assert torch.isfinite(weight).all(1).tolist() == [True, True, False, True]


@settings(deadline=None)
@given(shapes())
def test_rows_lie_by_expert_in_their_order_and_each_knows_its_places(shape):
    n, experts, k, seed = shape
    made = np.random.default_rng(seed)
    expert = np.stack([made.permutation(experts)[:k] for _ in range(n)]) if n else np.zeros((0, k))
    x = torch.arange(n, dtype=torch.float32).unsqueeze(1) * torch.ones(8)
    found = grouped.dispatch(x, torch.from_numpy(expert.astype(np.int32)), experts)
    pairs = sorted((int(e), row) for row, own in enumerate(expert) for e in own)
    assert found.x[:, 0].tolist() == [row for _, row in pairs]
    assert found.ends.tolist() == [sum(e <= one for e, _ in pairs) for one in range(experts)]
    for row, own in enumerate(expert):
        assert [pairs[place] for place in found.place[row].tolist()] == [(int(e), row) for e in own]


@settings(deadline=None)
@given(shapes(), st.sampled_from(sorted(EPS, key=str)))
def test_a_product_is_each_rows_with_its_experts_matrix(shape, dtype):
    n, experts, k, seed = shape
    made = torch.Generator().manual_seed(seed)
    inputs, outputs = 16, 24
    weight = torch.randn(experts, outputs, inputs, generator=made).to(dtype)
    expert = torch.randint(0, experts, (n, k), generator=made, dtype=torch.int32)
    rows = grouped.dispatch(torch.randn(n, inputs, generator=made).to(dtype), expert, experts)
    owner = torch.searchsorted(rows.ends, torch.arange(n * k), right=True)
    exact = torch.einsum("mk,mok->mo", rows.x.double(), weight[owner].double())
    size = torch.einsum("mk,mok->mo", rows.x.double().abs(), weight[owner].double().abs())
    bound = EPS[dtype] * exact.abs() + 2 * inputs * EPS[torch.float32] * size
    for found in (grouped.product(rows.x, weight, rows.ends), reference.product(rows.x, weight, rows.ends)):
        assert found.dtype == dtype
        assert bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", sorted(EPS, key=str))
@pytest.mark.parametrize("onto", [False, True])
def test_what_comes_back_is_summed_by_weight_and_rounded_once(dtype, onto):
    made = torch.Generator().manual_seed(3)
    y = torch.randn(12, 8, generator=made).to(dtype)
    place = torch.randperm(12, generator=made).view(4, 3).to(torch.int32)
    weight, base = torch.rand(4, 3, generator=made), torch.randn(4, 8, generator=made).to(dtype) if onto else None
    parts = y[place].double() * weight.double().unsqueeze(2)
    exact = parts.sum(1) + (0 if base is None else base.double())
    size = parts.abs().sum(1) + (0 if base is None else base.double().abs())
    found = grouped.combine(y, place, weight, base)
    assert found.dtype == dtype
    assert bool(((found.double() - exact).abs() <= EPS[dtype] * exact.abs() + 8 * EPS[torch.float32] * size).all())


def test_a_cpu_multiplies_by_expert_and_an_older_gpu_or_another_dtype_would_by_definition():
    assert grouped.unfit(torch.device("cpu"), torch.float32, 7, 7) is None
    assert "compute capability 9 or 10" in str(grouped.unfit(torch.device("meta"), torch.bfloat16, 8, 8))


def test_an_export_keeps_the_operators_as_nodes_for_any_number_of_rows():
    class Mixture(torch.nn.Module):
        def forward(self, x, weight):
            expert, share = grouped.choose(x, None, 2, sigmoid=False, normalise=True, factor=1.0)
            rows = grouped.dispatch(x, expert, 8)
            return grouped.combine(grouped.product(rows.x, weight, rows.ends), rows.place, share, x)

    many = torch.export.Dim("rows", min=1, max=4096)
    arguments = (torch.zeros(5, 8), torch.zeros(8, 8, 8))
    program = torch.export.export(Mixture(), arguments, dynamic_shapes=({0: many}, None))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [name for name in names if name.startswith("widebeam")] == [
        f"widebeam.{name}.default"
        for name in ("choose_experts", "dispatch_experts", "grouped_product", "combine_experts")
    ]
    assert program.module()(torch.randn(1, 8), torch.randn(8, 8, 8)).shape == (1, 8)
