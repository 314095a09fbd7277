"""The gate of a SwiGLU on a GPU: the kernel against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from app.ops.gated import gated
from app.ops.gated.operators import unfit

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("rows", "width", "apart"), [(1, 8, 0), (33, 24, 8), (1000, 3584, 0), (257, 2816, 2816)])
def test_the_kernel_is_the_definition(rows, width, apart, dtype):
    generator = torch.Generator("cuda").manual_seed(rows)
    whole = 4 * torch.randn(2, rows, width + apart, device="cuda", generator=generator)
    whole[0, :, 0] = torch.tensor([-200.0, 200.0, 0.0, -0.0, 90.0], device="cuda").repeat(rows // 5 + 1)[:rows]
    gate, up = (one[:, :width] for one in whole.to(dtype))
    assert unfit(gate, up) is None
    found, wide = gated(gate, up), gate.double()
    expected = wide / (1 + torch.exp(-wide)) * up.double()
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=2 * ROUNDING[dtype], atol=1e-6)


def test_what_is_no_number_stays_none():
    gate = torch.tensor([[torch.nan, torch.inf, 1, 1, 1, 1, 1, 1]], device="cuda", dtype=torch.bfloat16)
    up = torch.ones_like(gate)
    up[0, 2] = torch.nan
    found = gated(gate, up)[0]
    assert found[0].isnan()
    assert found[1] == torch.inf
    assert found[2].isnan()
    assert found[3:].isfinite().all()


def test_operands_that_are_no_whole_pieces_take_the_definition():
    both = torch.randn(7, 20, device="cuda", dtype=torch.float16)
    gate, up = both[:, 1:9], both[:, 9:17]
    assert unfit(gate, up) is not None
    torch.testing.assert_close(gated(gate, up), torch.nn.functional.silu(gate) * up)
