"""The transition operators as the runtime calls them: on an NVIDIA GPU one pass over the output (`kernel.cu`).
Elsewhere, and without CuPy, torch's operators (`reference.py`)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from app.ops import cuda
from app.ops.transition import reference
from app.ops.transition.reference import Written

_SOURCE = Path(__file__).with_name("kernel.cu")
_THREADS = 256


def advance(parent: Tensor, code: Tensor, sids: Tensor, ancestry: Tensor | None) -> Written:
    """`reference.advance`, in one launch on a GPU."""
    n, device = len(parent), parent.device
    if cuda.unfit(device) is not None or not n:
        return reference.advance(parent, code, sids, ancestry)
    depth = sids.shape[1] + 1
    made = torch.empty((n, depth), dtype=torch.int64, device=device)
    codes = torch.empty(n, dtype=torch.int32, device=device)
    index = None if ancestry is None else torch.empty((n, depth), dtype=torch.int32, device=device)
    given = [one if one is None else one.contiguous() for one in (parent, code, sids, ancestry)]
    at = [0 if one is None else one.data_ptr() for one in (*given, made, codes, index)]
    cuda.load(_SOURCE, "advance", device).launch(-(-n * depth // _THREADS), _THREADS, *at, n, depth)
    return Written(made, codes, index)
