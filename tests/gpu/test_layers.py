"""Pieces that families share, on a GPU."""

from __future__ import annotations

import pytest
import torch

from app.engine import layers

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (14, 64), (3, 12), (2, 5)])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_rows_of_one_product_are_kept_as_they_are(heads, dim, first, dtype):
    whole = torch.randn(300, 3 * heads + 1, dim, device=DEVICE).to(dtype)
    rows, slots = whole[:, first : first + heads], torch.zeros(400, heads, dim, device=DEVICE, dtype=dtype)
    layers.keep(slots[50:], rows)
    assert torch.equal(slots[50:350], rows)
    assert not slots[:50].any()
    assert not slots[350:].any()
