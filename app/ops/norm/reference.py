"""The root mean square norm in torch, on any device."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim: x [.., D] float, weight [D] of x's dtype -> [.., D]."""
    return functional.rms_norm(x, x.shape[-1:], weight, eps)
