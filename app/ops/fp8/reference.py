"""What 8-bit products are, in torch's operators: everything is rounded as on a GPU, and multiplied in float32."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

FP8: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0
"""The largest number of the format."""
LEAST: Final = 2.0**-100
"""A row whose largest element is smaller counts as this, so that rows of zeros need no case of their own."""


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row by its own scale: x [n, K] -> q [n, K] float8_e4m3fn, scale [n] float32; x is about q * scale.

    The largest element of a row becomes 448; elements are multiplied by 448 / largest in float32 and rounded to even.
    """
    most = x.abs().amax(1).float().clamp_min(LEAST)
    factor = torch.full_like(most, LARGEST) / most  # a number over a tensor would be rounded twice
    scaled = x.float() * factor.unsqueeze(1)
    return scaled.clamp(-LARGEST, LARGEST).to(FP8), most / LARGEST


def quantise_gated(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """`quantise_rows` of silu(gate) * up in their dtype: gate, up [n, K]."""
    return quantise_rows(silu(gate).mul_(up))


def quantise_normed(x: Tensor, weight: Tensor, eps: float, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """`quantise_rows` of x [n, K] / sqrt(mean(x^2) + eps) * weight [K], the mean in float32, in x's dtype.

    added  [n, K]: x += added before it, in x's memory
    """
    if added is not None:
        x.add_(added)
    return quantise_rows(rms_norm(x, x.shape[1:], weight, eps))


def linear(q: Tensor, own: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product of quantised rows q [n, K], own [n] and weight [M, K] float8_e4m3fn, scale [M] float32: the sum is in
    float32 and is rounded once to `dtype`, after the scales and the bias [M]."""
    out = torch.mm(q.float(), weight.float().t()) * (own.unsqueeze(1) * scale)
    return (out if bias is None else out + bias.float()).to(dtype)


def grouped_linear(q: Tensor, own: Tensor, weight: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """`linear` in bfloat16 with a matrix for each group of rows: weight [E, M, K], scale [E, M]; group e has rows
    ends[e - 1] .. ends[e], ends [E] int32, which are read on the host."""
    out, first = torch.empty(q.shape[0], weight.shape[1], dtype=torch.bfloat16, device=q.device), 0
    for matrix, factor, last in zip(weight, scale, ends.tolist(), strict=True):
        if last > first:
            out[first:last] = linear(q[first:last], own[first:last], matrix, factor, None, out.dtype)
        first = last
    return out
