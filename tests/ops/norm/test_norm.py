"""Root mean square norms: the definition, on a device without our kernel."""

from __future__ import annotations

import pytest
import torch

from app.ops.norm import rms_norm
from app.ops.norm.operators import pieces, unfit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 48), (3, 2, 16), (0, 8)])
def test_it_divides_by_the_root_of_the_mean_square_and_leaves_its_operands_alone(shape, dtype):
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(size, generator=generator).to(dtype) for size in (shape, shape[-1]))
    kept, wide = x.clone(), x.double()
    found = rms_norm(x, weight, 1e-5)
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=1e-6)
    assert torch.equal(x, kept)


def test_a_cpu_has_no_kernel():
    assert unfit(torch.zeros(1, 8), torch.zeros(8)) is not None


@pytest.mark.parametrize(("width", "most"), [(8, 1), (256, 1), (264, 2), (896, 4), (2048, 8), (4096, 16)])
def test_a_row_is_kept_by_one_warp(width, most):
    assert pieces(width) == most


def test_an_export_keeps_it_as_one_node():
    class Norm(torch.nn.Module):
        def forward(self, x, weight):
            return rms_norm(x, weight, 1e-6)

    graph = torch.export.export(Norm(), (torch.zeros(2, 8), torch.zeros(8))).graph
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == ["widebeam.rms_norm.default"]
