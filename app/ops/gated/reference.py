"""The gate of a SwiGLU in torch, on any device."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear, silu


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: gate, up [N, F] float -> [N, F], contiguous."""
    return silu(gate).mul_(up).contiguous()


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x gate^T) * (x up^T): x [N, d], weight [2 F, d], gate before up -> [N, F], contiguous."""
    gate, up = linear(x, weight).chunk(2, 1)
    return gated(gate, up)
