"""Root mean square norms on a GPU: the kernel against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from app.ops.norm import rms_norm
from app.ops.norm.operators import unfit

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-10}


def expected(x, weight, eps):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("rows", "width", "apart"), [(1, 8, 0), (33, 24, 8), (1000, 896, 0), (9, 264, 16), (7, 4096, 0)]
)
def test_the_kernel_is_the_definition_and_writes_nothing_else(rows, width, apart, dtype):
    generator = torch.Generator("cuda").manual_seed(rows)
    whole = 3 * torch.randn(rows, width + apart, device="cuda", generator=generator).to(dtype)
    x, weight = whole[:, :width], torch.randn(width, device="cuda", generator=generator).to(dtype)
    x[rows // 2] = 0
    kept = whole.clone()
    assert unfit(x, weight) is None
    found = rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(found.double(), expected(x, weight, 1e-6), rtol=2 * ROUNDING[dtype], atol=1e-6)
    assert found.is_contiguous()
    assert torch.equal(whole, kept)


def test_heads_are_normed_one_by_one_and_bad_numbers_stay_in_their_row():
    x = torch.randn(5, 3, 64, device="cuda").bfloat16()
    weight = torch.randn(64, device="cuda").bfloat16()
    x[1, 2, 7], x[3, 0, 0] = torch.nan, torch.inf
    found = rms_norm(x, weight, 1e-6)
    bad = ~found.isfinite().all(2)
    assert bad.nonzero().tolist() == [[1, 2], [3, 0]]
    torch.testing.assert_close(found[~bad].double(), expected(x, weight, 1e-6)[~bad], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(("width", "first", "last"), [(12, 0, 12), (8200, 0, 8200), (24, 1, 9)])
def test_other_rows_take_the_definition(width, first, last):
    x = torch.ones(3, width, device="cuda", dtype=torch.float16)[:, first:last]
    assert unfit(x, torch.ones_like(x[0])) is not None
    torch.testing.assert_close(rms_norm(x, torch.ones_like(x[0]), 1e-6), torch.ones_like(x))
