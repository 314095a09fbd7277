"""The products in torch's operators, in given memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scales(NamedTuple):
    """Of 8-bit operands: of each row of x [n], and of each output channel [m], float32."""

    x: Tensor
    weight: Tensor


def multiply(out: Tensor, x: Tensor, weight: Tensor, scales: Scales | None, *, onto: bool) -> None:
    """out [n, m] = x [n, k] weight [m, k]^T, or += where it goes `onto` what is there: sums in float32, rounded once in
    16 bits. In 8 bits (on a GPU, out in bfloat16) torch has no sum onto something: rounded before it, too."""
    if scales is None:
        if onto:
            out.addmm_(x, weight.t())
        else:
            torch.mm(x, weight.t(), out=out)
        return
    made = torch._scaled_mm(  # noqa: SLF001  torch has no public name for it yet
        x, weight.t(), scale_a=scales.x.unsqueeze(1), scale_b=scales.weight.unsqueeze(0), out_dtype=out.dtype,
        use_fast_accum=True, out=torch.empty_like(out) if onto else out,
    )  # fmt: skip
    if onto:
        out.add_(made)
