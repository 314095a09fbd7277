"""What surrounds the gated delta rule in a layer: gates, unit keys and queries, the gated norm. Everything is row by
row, in float32 inside, on any device; on NVIDIA GPUs gates and gated norm of 16-bit operands are one kernel each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from app.ops.gdn import around

_EPS = 1e-6
"""Added to a squared length before its root, as the models were trained."""


def decay_and_beta(ba: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gates of a token, per value head.

    ba      [N, 2 HV] float: b, then a
    a_log   [HV], dt_bias [HV]
    Returns log alpha [N, HV] float32 = -exp(a_log) * softplus(a + dt_bias) <= 0, and beta [N, HV] float32 = sigmoid(b).
    """
    if around.fits(ba, a_log, dt_bias):
        return around.gates(ba, a_log, dt_bias)
    b, a = ba.float().chunk(2, 1)
    return functional.softplus(a + dt_bias.float()).mul_(-a_log.float().exp()), torch.sigmoid(b)


def inverse_length(k: Tensor) -> Tensor:
    """k [..., K] any float -> 1 / sqrt(|k|^2 + 1e-6) [...], float32."""
    return torch.rsqrt(k.float().square().sum(-1) + _EPS)


def unit_keys(k: Tensor) -> Tensor:
    """k [..., K] any float -> k / sqrt(|k|^2 + 1e-6), float32."""
    return k.float() * inverse_length(k).unsqueeze(-1)


def unit_queries(q: Tensor) -> Tensor:
    """q [..., K] any float -> a unit query times 1 / sqrt(K), float32."""
    return unit_keys(q).mul_(q.shape[-1] ** -0.5)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """o [N, HV, V] float32, z [N, HV, V] any float, weight [V]: norm(o) * weight * silu(z), in z's dtype."""
    if around.norm_fits(o, z, weight):
        return around.gated_norm(o, z, weight, eps)
    normed = functional.rms_norm(o, o.shape[-1:], weight.float(), eps)
    return (normed * functional.silu(z.float())).to(z.dtype)
