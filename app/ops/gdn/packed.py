"""S_ctx as the kernel reads it: two 16-bit terms, in the order in which tensor cores take them. It has the bytes of the
float32 state and lies in its place.

S = hi + lo with hi = S in 16 bit and lo = S - hi in 16 bit (relative error 2^-17 in bfloat16, less in float16). Order,
slowest first: request, head, `columns(K)` columns of V at a time, term, k / 8, tile of 8 columns, column in it, k % 8,
with K and V permuted as `kernel.cu` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ORDER = (0, 1, 8, 2, 3, 5, 6, 9, 11, 10, 12, 4, 7)
_BACK = tuple(_ORDER.index(n) for n in range(len(_ORDER)))


def columns(k: int) -> int:
    """Columns of V whose fragments lie together: those whose accumulators a thread holds at a time."""
    return 64 if k <= 128 else 32


def pack(s_ctx: Tensor, dtype: torch.dtype) -> Tensor:
    """s_ctx [R, HV, K, V] float32 -> the same shape, dtype and bytes, holding its two terms in a 16-bit dtype."""
    high = s_ctx.to(dtype)
    terms = torch.stack([high, (s_ctx - high.float()).to(dtype)], 2)
    return terms.view(_split(s_ctx)).permute(_ORDER).contiguous().view(-1).view(torch.float32).view(s_ctx.shape)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """What `pack` was given, up to its rounding."""
    shape = _split(packed)
    terms = packed.contiguous().view(-1).view(dtype).view([shape[n] for n in _ORDER]).permute(_BACK)
    r, hv, k, v = packed.shape
    high, low = terms.reshape(r, hv, 2, k, v).float().unbind(2)
    return high + low


def _split(x: Tensor) -> tuple[int, ...]:
    """Dims of the terms of x: k = 32 a + 8 c + 4 b + 2 e + i, v = columns * half + 32 J + 8 n + 2 j + m."""
    r, hv, k, v = x.shape
    half = columns(k)
    return (r, hv, 2, k // 32, 4, 2, 2, 2, v // half, half // 32, 4, 4, 2)
