"""The transition operators as the runtime calls them: on an NVIDIA GPU one pass over the output (`kernel.cu`).
Elsewhere, and without CuPy, torch's operators (`reference.py`).

`advance` is registered with `torch.library`, so that torch.export and torch.compile see one node; the runtime's own
tensors go to the function at once, as torch's way to an operator of its own takes longer than the launch.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from app.ops import cuda
from app.ops.library import register, traced
from app.ops.transition import reference
from app.ops.transition.reference import Written

_SOURCE = Path(__file__).with_name("kernel.cu")
_THREADS = 256


def advance(parent: Tensor, code: Tensor, sids: Tensor, ancestry: Tensor | None) -> Written:
    """`reference.advance`, in one launch on a GPU."""
    if traced(parent):
        made, codes, index = torch.ops.widebeam.advance(parent, code, sids, ancestry)
        return Written(made, codes, None if ancestry is None else index)
    return _advance(parent, code, sids, ancestry)


def _advance(parent: Tensor, code: Tensor, sids: Tensor, ancestry: Tensor | None) -> Written:
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


def _advance_node(parent: Tensor, code: Tensor, sids: Tensor, ancestry: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """A graph's node gives tensors only: an index of no columns where none is kept."""
    made, codes, index = _advance(parent, code, sids, ancestry)
    return made, codes, codes.new_empty(len(parent), 0) if index is None else index


def _advance_shapes(
    parent: Tensor, _code: Tensor, sids: Tensor, ancestry: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    n, depth = parent.shape[0], sids.shape[1] + 1
    index = parent.new_empty(n, 0 if ancestry is None else depth, dtype=torch.int32)
    return parent.new_empty(n, depth, dtype=torch.int64), parent.new_empty(n, dtype=torch.int32), index


register(
    "advance(Tensor parent, Tensor code, Tensor sids, Tensor? ancestry) -> (Tensor, Tensor, Tensor)",
    _advance_node,
    _advance_shapes,
)
