"""The gate of a SwiGLU in torch, on any device."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: gate, up [N, F] float -> [N, F], contiguous."""
    return silu(gate).mul_(up).contiguous()
