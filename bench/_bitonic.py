"""Bitonic top-K, the peer of RecoGEM's figure 8 (`_bitonic.cu`)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from app.ops import cuda

SOURCE = Path(__file__).with_name("_bitonic.cu")
SLICE, THREADS = 4096, 512


def top(rank: Tensor, keep: int) -> Tensor:
    """The best `keep` of each request, falling, as keys [R, keep] int64: the lower half is 2**32 - 1 less the place.

    rank [R, N] float32, contiguous, N < 2**32, without NaN · keep a power of two below SLICE
    """
    requests, count = rank.shape
    keys: Tensor | None = None
    while True:
        blocks = -(-count // SLICE)
        out = torch.empty(requests, blocks * keep, dtype=torch.int64, device=rank.device)
        kernel = cuda.load(SOURCE, "best_of_slices", rank.device, FIRST=int(keys is None))
        before = 0 if keys is None else keys.data_ptr()
        kernel.launch(requests * blocks, THREADS, rank.data_ptr(), before, out.data_ptr(), count, blocks, keep)
        keys, count = out, blocks * keep
        if blocks == 1:
            return keys


def places(keys: Tensor) -> Tensor:
    """Where the best are in their requests, [R, keep] int64."""
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)
