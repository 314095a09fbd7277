"""The gate of a SwiGLU: the definition, on a device without our kernel."""

from __future__ import annotations

import pytest
import torch

from app.ops.gated import gated
from app.ops.gated.operators import unfit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_silu_times_up_and_leaves_its_operands_alone(dtype):
    generator = torch.Generator().manual_seed(1)
    both = torch.randn(5, 48, generator=generator).to(dtype)
    kept = both.clone()
    found = gated(*both.chunk(2, 1))
    gate, up = kept.double().chunk(2, 1)
    torch.testing.assert_close(found.double(), gate / (1 + torch.exp(-gate)) * up, rtol=0.02, atol=1e-6)
    assert found.is_contiguous()
    assert torch.equal(both, kept)


def test_no_rows_give_no_rows():
    assert gated(torch.empty(0, 8), torch.empty(0, 8)).shape == (0, 8)


def test_a_cpu_has_no_kernel():
    assert unfit(torch.zeros(1, 8), torch.zeros(1, 8)) is not None


def test_an_export_keeps_it_as_one_node():
    class Gate(torch.nn.Module):
        def forward(self, gate, up):
            return gated(gate, up)

    graph = torch.export.export(Gate(), (torch.zeros(2, 8), torch.zeros(2, 8))).graph
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == ["widebeam.gated.default"]
