"""Mixtures of experts on a GPU: the kernels and torch's grouped product against the definitions."""

from __future__ import annotations

import pytest
import torch

from app.ops import grouped
from app.ops.grouped import reference

DEVICE = torch.device("cuda", 0)
HALVES = [torch.bfloat16, torch.float16]
SHAPES = [(1, 5, 2), (7, 53, 3), (64, 8, 8), (65, 1, 1), (1000, 512, 10), (16384, 53, 3), (4097, 128, 8)]


def normal(*shape, seed=1, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", [(False, True, False), (False, False, False), (True, True, True), (True, False, False)])
def test_the_experts_of_a_row_are_the_definitions(shape, how, dtype):
    n, experts, k = shape
    sigmoid, normalise, with_bias = how
    logits = normal(n, experts, seed=n, dtype=dtype) * 3
    bias = normal(experts, seed=2, dtype=dtype) if with_bias else None
    asked = {"sigmoid": sigmoid, "normalise": normalise, "factor": 2.5}
    expert, weight = grouped.choose(logits, bias, k, **asked)
    expected, share = reference.choose(logits.cpu(), None if bias is None else bias.cpu(), k, **asked)
    # where a bias is added to a sigmoid, another last bit of it may turn a tie round
    same = (expert.cpu() == expected).all(1)
    assert bool(same.all()) if bias is None else same.float().mean() > 0.99
    torch.testing.assert_close(weight.cpu()[same], share[same], rtol=4e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", HALVES)
def test_ties_and_what_is_no_number_are_ordered_as_defined(dtype):
    logits = normal(300, 40, dtype=dtype).round()
    logits[0], logits[1, 3], logits[2], logits[3, :] = 0, torch.nan, -torch.inf, -0.0
    logits[3, 7:] = 0.0
    expert, weight = grouped.choose(logits, None, 8, sigmoid=False, normalise=True, factor=1.0)
    expected, share = reference.choose(logits.cpu(), None, 8, sigmoid=False, normalise=True, factor=1.0)
    assert torch.equal(expert.cpu(), expected)
    torch.testing.assert_close(weight.cpu(), share, rtol=4e-6, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["random", "one expert", "few"])
def test_rows_are_arranged_bit_by_bit_as_a_stable_sort_does(shape, kind, dtype):
    n, experts, k = shape
    made = torch.Generator().manual_seed(n)
    if kind == "random":
        expert = torch.rand(n, experts, generator=made).argsort(1)[:, :k]
    else:
        expert = torch.randint(0, 1 if kind == "one expert" else min(experts, 3), (n, k), generator=made)
    expert, x = expert.to(torch.int32).contiguous().to(DEVICE), normal(n, 24, dtype=dtype)
    row, place, ends = reference.arrange(expert.cpu(), experts)
    found = grouped.dispatch(x, expert, experts)
    assert torch.equal(found.place.cpu(), place)
    assert torch.equal(found.ends.cpu(), ends)
    assert torch.equal(found.x.cpu(), x.cpu()[row])


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("shape", [(1, 5, 2), (500, 53, 3), (4096, 8, 2)])
def test_a_product_is_each_rows_with_its_experts_matrix(shape, dtype):
    n, experts, k = shape
    inputs, outputs = 64, 96
    weight, x = normal(experts, outputs, inputs, dtype=dtype), normal(n, inputs, seed=4, dtype=dtype)
    expert = torch.randint(0, max(1, experts - 2), (n, k), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    rows = grouped.dispatch(x, expert.to(DEVICE), experts)
    owner = torch.searchsorted(rows.ends, torch.arange(n * k, device=DEVICE), right=True)
    exact = torch.bmm(weight.double()[owner], rows.x.double().unsqueeze(2)).squeeze(2)
    size = torch.bmm(weight.double().abs()[owner], rows.x.double().abs().unsqueeze(2)).squeeze(2)
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[dtype]
    found = grouped.product(rows.x, weight, rows.ends)
    assert bool(((found.double() - exact).abs() <= rounding * exact.abs() + 2 * inputs * 2.0**-24 * size).all())


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 8), (33, 3, 1408), (4000, 10, 64)])
def test_what_comes_back_is_summed_as_defined(shape, onto, dtype):
    n, k, d = shape
    made = torch.Generator().manual_seed(n)
    y, base = normal(n * k, d, dtype=dtype), normal(n, d, seed=5, dtype=dtype) if onto else None
    place = torch.randperm(n * k, generator=made).view(n, k).to(torch.int32).to(DEVICE)
    weight = torch.rand(n, k, generator=made).to(DEVICE)
    parts = y[place].double() * weight.double().unsqueeze(2)
    exact = parts.sum(1) + (0 if base is None else base.double())
    size = parts.abs().sum(1) + (0 if base is None else base.double().abs())
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[dtype]
    found = grouped.combine(y, place, weight, base)
    assert bool(((found.double() - exact).abs() <= rounding * exact.abs() + (k + 2) * 2.0**-24 * size).all())


def test_a_mixture_is_captured_into_a_cuda_graph_and_follows_its_rows():
    x, router = normal(700, 64), normal(9, 64, seed=2)
    weight = normal(9, 64, 64, seed=3)

    def mixture():
        expert, share = grouped.choose(x @ router.t(), None, 3, sigmoid=False, normalise=True, factor=1.0)
        rows = grouped.dispatch(x, expert, 9)
        return grouped.combine(grouped.product(rows.x, weight, rows.ends), rows.place, share, x)

    expected = mixture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = mixture()
    x.copy_(x.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(found, expected.flip(0), rtol=2**-7, atol=2**-7)
    x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert not found.any()
