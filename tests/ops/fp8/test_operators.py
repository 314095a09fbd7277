"""The operators of 8 bits as nodes of torch's graphs, on a device without our kernels."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

from app.ops import fp8
from app.ops.fp8 import EightBits, reference
from tests.ops import nodes

DIMS = 48


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weights(outputs=32, groups=1):
    """[M, K], or [E, M, K], in 8 bits, and their scales."""
    weight, scale = reference.quantise_rows(normal(groups * outputs, DIMS, seed=2).float())
    return (weight, scale) if groups == 1 else (weight.view(groups, outputs, DIMS), scale.view(groups, outputs))


@pytest.mark.parametrize("rows", [0, 7])
def test_torch_finds_them_to_be_what_they_say(rows):
    both, norm = normal(rows, 2 * DIMS), torch.rand(DIMS).bfloat16()
    gate, up = both.chunk(2, 1) if rows else both.view(2, 0, DIMS)  # torch's check fails at no rows that lie apart
    for x in (gate, gate.contiguous(), gate.t().contiguous().t()):
        nodes.check("fp8_rows", x)
        nodes.check("fp8_gated", x, up)
        nodes.check("fp8_normed", x, norm, 1e-6)
    nodes.check("fp8_summed", gate.contiguous(), norm, 1e-6, up)
    q, own = reference.quantise_rows(gate)
    how = {"checks": nodes.GRAPHS}  # torch compares no arguments of 8 bits; `layer` says what changes
    for bias, dtype in ((None, torch.bfloat16), (normal(32), torch.float32)):
        nodes.check("fp8_linear", q, own, *weights(), bias, dtype, **how)
    nodes.check("fp8_linear_into", torch.zeros(rows, 32), q, own, *weights(), **how)
    nodes.check("fp8_linear_into", torch.zeros(rows, 40)[:, 4:36], q, own, *weights(), **how)
    ends = torch.tensor([0, rows // 2, rows // 2, rows]).int()
    nodes.check("fp8_grouped_linear", q, own, *weights(groups=4), ends, **how)


def layer(x, gate_up, gate_scale, down, down_scale, norm, ends, matrices, scales):
    """A sum and its norm, a gate, products of each kind; x and out are changed."""
    rows = fp8.quantise_normed(x, norm, 1e-6)
    hidden = fp8.linear(rows, gate_up, gate_scale)
    inner = fp8.quantise_gated(*hidden.chunk(2, 1))
    rows = fp8.quantise_normed(x, norm, 1e-6, fp8.linear(inner, down, down_scale))
    out = torch.zeros(x.shape[0], 3 * DIMS)
    fp8.linear_into(out[:, DIMS : 2 * DIMS], rows, down, down_scale)
    return out, fp8.linear(x, down, down_scale), fp8.grouped_linear(rows, matrices, scales, ends)


def layer_defined(x, gate_up, gate_scale, down, down_scale, norm, ends, matrices, scales):
    rows = reference.quantise_normed(x, norm, 1e-6, None)
    hidden = reference.linear(*rows, gate_up, gate_scale, None, torch.bfloat16)
    inner = reference.quantise_gated(*hidden.chunk(2, 1))
    added = reference.linear(*inner, down, down_scale, None, torch.bfloat16)
    rows = reference.quantise_normed(x, norm, 1e-6, added)
    out = torch.zeros(x.shape[0], 3 * DIMS)
    out[:, DIMS : 2 * DIMS] = reference.linear(*rows, down, down_scale, None, torch.float32)
    again = reference.linear(*reference.quantise_rows(x), down, down_scale, None, torch.bfloat16)
    return out, again, reference.grouped_linear(*rows, matrices, scales, ends)


def test_an_export_and_a_compiled_graph_have_one_node_each():
    ends = torch.tensor([2, 2, 5, 7], dtype=torch.int32)
    given = (
        normal(7, DIMS), *weights(2 * DIMS), *weights(DIMS), torch.rand(DIMS).bfloat16(), ends, *weights(groups=4),
    )  # fmt: skip
    names = [
        "fp8_normed", "fp8_linear", "fp8_gated", "fp8_linear", "fp8_summed", "fp8_linear_into", "fp8_rows",
        "fp8_linear", "fp8_grouped_linear",
    ]  # fmt: skip
    dynamic = ({0: Dim("rows", min=1, max=1 << 20)}, *(None,) * 8)
    assert nodes.exported(layer, given, dynamic, layer_defined) == names
    assert nodes.compiled(layer, given, layer_defined) == names
    nodes.same(layer, layer_defined, given)


def test_rows_of_a_graph_are_rows():
    found = EightBits(*torch.ops.widebeam.fp8_rows(normal(7, DIMS)))
    expected = reference.quantise_rows(normal(7, DIMS))
    assert torch.equal(found.q.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found.scale, expected[1])
