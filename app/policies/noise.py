"""Noise that belongs to a candidate, not to its place: Philox4x32-10 (Salmon et al. 2011) in torch.

    key      the request's seed, 64 bits
    counter  (code, step + stream * 2**16, hash of the prefix in two halves)

So the noise of (prefix, code) is the same wherever the row lies, whatever shares its batch, on every device.
32-bit words are carried in int64, where a product of two of them does not fit: it is taken in two halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
# FNV-1a over the codes, in wrapping 64-bit arithmetic; Philox mixes it further
_OFFSET = 14695981039346656037 - 2**64
_PRIME = 1099511628211
_BLOCK = 2**15

GUMBEL, UNIFORM, EXPLORE = 0, 1, 2
"""Streams: two uses of noise in one step are independent."""


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four 32-bit words for each counter; all tensors int64 with values below 2**32, broadcastable."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _M0)
        high1, low1 = _product(c2, _M1)
        c0, c1, c2, c3 = (high1 ^ c1) ^ k0, low1, (high0 ^ c3) ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def _product(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """High and low word of a * m."""
    low, high = (a & 0xFFFF) * m, (a >> 16) * m
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def prefix_hash(prefix: Tensor) -> Tensor:
    """[n] int64: a hash of each row's codes, prefix [n, t - 1]."""
    out = torch.full((len(prefix),), _OFFSET, dtype=torch.int64, device=prefix.device)
    for at in range(prefix.shape[1]):
        out = (out ^ prefix[:, at].to(torch.int64)) * _PRIME
    return out


def uniform(seed: Tensor, prefix: Tensor, code: Tensor, step: int, stream: int = UNIFORM) -> Tensor:
    """Uniform numbers in (0, 1), exact in fp32: [n, F] for seed [n], prefix [n, t - 1], code [n, F]."""
    # two hundred passes over the words: on a CPU they are made block by block, inside its cache
    rows = max(1, _BLOCK // max(1, code.shape[1])) if code.device.type == "cpu" else max(1, len(code))
    parts = zip(torch.split(seed, rows), torch.split(prefix_hash(prefix), rows), torch.split(code, rows), strict=True)
    return torch.cat([_block(*part, step, stream) for part in parts])


def _block(seed: Tensor, prefix: Tensor, code: Tensor, step: int, stream: int) -> Tensor:
    mixed, own = prefix[:, None], seed[:, None]
    place = torch.full_like(mixed, step + stream * 2**16)
    counter = (code, place, mixed & _MASK, (mixed >> 32) & _MASK)
    first = philox(counter, (own & _MASK, (own >> 32) & _MASK))[0]
    # 23 bits and a half: never 0, never 1
    return ((first >> 9).to(torch.float32) + 0.5) * 2.0**-23


def gumbel(seed: Tensor, prefix: Tensor, code: Tensor, step: int, stream: int = GUMBEL) -> Tensor:
    """Standard Gumbel numbers [n, F] float32: -log(-log(u)), in double precision and rounded once, so that all devices
    agree."""
    u = uniform(seed, prefix, code, step, stream).to(torch.float64)
    return torch.neg(torch.log(torch.neg(torch.log(u)))).to(torch.float32)
