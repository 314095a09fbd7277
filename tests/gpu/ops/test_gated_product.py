"""The product that gates itself, on a GPU of sm_90: against the definition in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

from app.ops.gated import gated, gated_product, product

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-10}
APART, ZONE, POISON = 8, 1 << 16, -12345.0
"""Numbers between two rows of an operand; numbers around the output, and their value."""

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="its products are those of compute capability 9.0",
)


def between_nans(values, dtype):
    """The values in memory whose rows lie apart, with NaN before, between and behind them."""
    n, m = values.shape
    whole = torch.full((n + 512, m + APART), torch.nan, device="cuda", dtype=dtype)
    part = whole[256 : 256 + n, :m]
    part.copy_(values)
    return part


def operands(rows, width, depth, dtype, seed=1):
    """x, whose rows have norms of 1e-3 to 30, and a weight that leaves them about so."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, depth, device="cuda", generator=generator)
    x *= torch.logspace(-3, 1.5, 97, device="cuda").repeat(rows // 97 + 1)[:rows].unsqueeze(1)
    weight = torch.randn(2 * width, depth, device="cuda", generator=generator) / depth**0.5
    return between_nans(x, dtype), between_nans(weight, dtype)


def assert_rounded(found, x, weight):
    """The definition up to one rounding, and to what sums in float32 leave of gate and up."""
    gate, up = linear(x.double(), weight.double()).chunk(2, 1)
    silu = gate.sigmoid() * gate
    size = x.double().square().mean(1, keepdim=True).sqrt()
    slack = 1e-4 * size * (1.1 * up.abs() + silu.abs()) + 1e-7
    expected = silu * up
    over = (found.double() - expected).abs() / (2 * ROUNDING[x.dtype] * expected.abs() + slack)
    assert float(over.max()) <= 1  # and not NaN


class Guarded:
    """torch with memory that lies between poisoned zones."""

    def __init__(self) -> None:
        self.made = []

    def empty(self, size, *, dtype, device):
        count = size[0] * size[1]
        whole = torch.full((count + 2 * ZONE,), POISON, dtype=dtype, device=device)
        self.made.append((whole, count))
        return whole[ZONE : ZONE + count].view(size)

    def __getattr__(self, name):
        return getattr(torch, name)


SHAPES = [
    (1, 128, 64), (32, 3584, 896), (300, 1024, 512),
    (2048, 128, 64), (2049, 128, 64), (5000, 7168, 64), (16384, 128, 128), (2049, 3584, 896), (16384, 3584, 896),
    (5000, 1152, 960), (2048, 7168, 4096), (5000, 128, 4096), (16384, 2560, 1024), (2305, 384, 192),
]  # fmt: skip
"""Below 896 channels a tile is shorter than what it takes to write it; 2305 rows leave one for the last cluster's first
block and none for its second."""


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("rows", "width", "depth"), SHAPES)
def test_it_is_the_definition_and_stays_inside_of_its_memory(rows, width, depth, dtype, monkeypatch):
    x, weight = operands(rows, width, depth, dtype)
    guard = Guarded()
    monkeypatch.setattr(product, "torch", guard)
    found = product.gated_product(x, weight)
    assert_rounded(found, x, weight)
    for whole, count in guard.made:
        assert bool((whole[:ZONE] == POISON).all() & (whole[ZONE + count :] == POISON).all())
    assert len(guard.made) == 1


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_rows_numbers_are_the_same_bits_among_however_many(dtype, monkeypatch):
    taken, real = [], product.gated_product
    monkeypatch.setattr(product, "gated_product", lambda x, weight: taken.append(len(x)) or real(x, weight))
    x, weight = operands(2100, 256, 128, dtype)
    every = gated_product(x, weight)
    assert_rounded(every, x, weight)
    few = (1, 8, 127, 128, 129, 257, 2047)
    for rows in few:
        assert torch.equal(gated_product(x[-rows:], weight), every[-rows:])
    assert taken == [2100, *few]


def test_what_it_does_not_take_is_product_and_gate(monkeypatch):
    monkeypatch.setattr(product, "gated_product", SimpleNamespace)  # takes no argument
    x, weight = operands(2304, 256, 128, torch.bfloat16)
    for a, b in (
        (x[:0], weight), (x, weight[:192]), (x[:, :96], weight[:, :96]), (x[:, 1:65], weight[:, 1:65]),
        (x.float(), weight.float()),
    ):  # fmt: skip
        assert product.unfit(a, b) is not None
        assert torch.equal(gated_product(a, b), gated(*linear(a, b).chunk(2, 1)))


def test_it_is_product_and_gate_up_to_the_roundings_of_gate_and_up():
    _, weight = operands(1, 3584, 896, torch.bfloat16)
    x = torch.randn(16384, 896, device="cuda").bfloat16()
    found, apart = gated_product(x, weight).float(), gated(*linear(x, weight).chunk(2, 1)).float()
    assert float((found - apart).norm() / apart.norm()) < 5e-3
    torch.testing.assert_close(found, apart, rtol=2**-5, atol=1e-3)


def test_a_row_is_what_it_is_among_any_others_and_what_is_no_number_stays_in_its_row():
    x, weight = operands(4300, 640, 896, torch.bfloat16)
    clean = gated_product(x, weight)
    assert torch.equal(gated_product(x[: 2048 + 1], weight), clean[: 2048 + 1])
    bad = torch.tensor([0, 63, 64, 127, 128, 255, 256, 4299], device="cuda")
    x[bad, 5] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan] * 2, device="cuda", dtype=x.dtype)
    found = gated_product(x, weight)
    assert not found[bad].isfinite().all(1).any()
    good = torch.ones(4300, dtype=torch.bool, device="cuda")
    good[bad] = False
    assert torch.equal(found[good], clean[good])


def test_gates_far_from_zero_are_up_or_nothing():
    x, weight = torch.ones(2048, 64, device="cuda").bfloat16(), torch.full((256, 64), 2.0, device="cuda").bfloat16()
    weight[:64] *= -1  # gates of -128 and 128, up of 128
    found = gated_product(x, weight)
    assert not found[:, :64].any()
    assert bool((found[:, 64:] == 128.0 * 128).all())


def test_a_replay_computes_with_what_is_there_then():
    x, weight = operands(5000, 3584, 896, torch.bfloat16)
    gated_product(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = x + 0  # an operand and an output of the graph's own pool
        out = gated_product(again, weight)
        last = gated_product(x, weight)
    for seed in (2, 3):
        values, other = operands(5000, 3584, 896, torch.bfloat16, seed=seed)
        x.copy_(values)
        weight.copy_(other)
        graph.replay()
        assert torch.equal(out, gated_product(values, other))
        assert torch.equal(out, last)
        assert_rounded(out[:300], values[:300], other)


def test_two_streams_do_not_disturb_each_other():
    sets = [operands(rows, 3584, 896, torch.bfloat16, seed=rows) for rows in (2048, 6000)]
    expected = [gated_product(*one) for one in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(20):
        for stream, one, into in zip(streams, sets, found, strict=True):
            with torch.cuda.stream(stream):
                into.append(gated_product(*one))
    torch.cuda.synchronize()
    for out, outs in zip(expected, found, strict=True):
        assert all(torch.equal(out, one) for one in outs)
