"""One decode call of a ReplaySSM-like path as a Triton kernel: every beam has a state of its own that is read and not
written, and a ring of its records that moves with it. Not ReplaySSM's own code, which needs its server around it.

It is given what helps it: the states are never re-ordered (all beams of a request hold the same one), never flushed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Ring(NamedTuple):
    """The records of every beam: alpha [L, N, HV] float32, delta [L, N, HV, V] and unit k [L, N, HK, K] float16."""

    alpha: Tensor
    delta: Tensor
    k: Tensor


@triton.jit(do_not_specialize=["rows", "t"])
def _replay_ssm(
    q, k, v, log_alpha, beta, state, ring_alpha, ring_delta, ring_k, out, rows, t,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,  # noqa: N803
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    tile, h, n = pid % (V // BV), pid // (V // BV) % HV, pid // (V // BV) // HV
    hk = h // (HV // HK)
    at_k, at_v = tl.arange(0, K), tile * BV + tl.arange(0, BV)
    query = tl.load(q + (n * HK + hk) * K + at_k).to(tl.float32)
    key = tl.load(k + (n * HK + hk) * K + at_k).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query) + 1e-6) * tl.rsqrt(K * 1.0)
    key *= tl.rsqrt(tl.sum(key * key) + 1e-6)
    s = tl.load(state + ((n * HV + h) * K + at_k[:, None]) * V + at_v[None, :])
    u_q, u_k = tl.sum(s * query[:, None], 0), tl.sum(s * key[:, None], 0)
    for j in range(t):
        slot = (j * rows + n).to(tl.int64)
        decay = tl.load(ring_alpha + slot * HV + h)
        wrote = tl.load(ring_delta + (slot * HV + h) * V + at_v).to(tl.float32)
        past = tl.load(ring_k + (slot * HK + hk) * K + at_k).to(tl.float32)
        u_q = decay * u_q + wrote * tl.sum(past * query)
        u_k = decay * u_k + wrote * tl.sum(past * key)
    decay = tl.exp(tl.load(log_alpha + n * HV + h))
    value = tl.load(v + (n * HV + h) * V + at_v).to(tl.float32)
    delta = tl.load(beta + n * HV + h) * (value - decay * u_k)
    o = decay * u_q + delta * tl.sum(query * key)
    tl.store(out + (n * HV + h) * V + at_v, o.to(out.dtype.element_ty))
    slot = (t * rows + n).to(tl.int64)
    tl.store(ring_delta + (slot * HV + h) * V + at_v, delta.to(tl.float16))
    if tile == 0:
        tl.store(ring_alpha + slot * HV + h, decay)
        if h % (HV // HK) == 0:
            tl.store(ring_k + (slot * HK + hk) * K + at_k, key.to(tl.float16))


def replay_ssm(
    heads: tuple[Tensor, Tensor, Tensor], log_alpha: Tensor, beta: Tensor, state: Tensor, ring: Ring, t: int
) -> Tensor:
    """heads: q, k [N, HK, K], v [N, HV, V], 16 bit; state [N, HV, K, V] float32; entries 0..t-1 of the ring are the
    rows' own, entry t is written. Returns o [N, HV, V], 16 bit."""
    q, k, v = heads
    n, hv, width = v.shape
    out = torch.empty_like(v)
    block = 32
    grid: Any = (n * hv * (width // block),)
    _replay_ssm[grid](
        q, k, v, log_alpha, beta, state, ring.alpha, ring.delta, ring.k, out, n, t,
        HK=k.shape[1], HV=hv, K=k.shape[2], V=width, BV=block, num_warps=4,
    )  # fmt: skip
    return out
