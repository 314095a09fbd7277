"""`kernel.cu` on torch's current stream: what it takes, and its launch. Needs CuPy and an NVIDIA GPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.ops import cuda

POSITIONS = 8
"""Positions of a row, its own with them, that the kernel takes at most."""
_SOURCE = Path(__file__).with_name("kernel.cu")
_THREADS = 128
_WALKED = 6
"""Positions from which on walking blocks are quicker."""
_WALK = 8


class _Shape(NamedTuple):
    """An entry point and what one block of it covers: so many (row, head), or `heads` heads of so many `rows`."""

    kernel: cuda.Kernel
    pairs: int
    heads: int
    rows: int


def unfit(q: Tensor, v: Tensor, positions: int) -> str | None:
    """Why the kernel cannot take these rows and so many positions (the own one with them); None where it can."""
    reason = cuda.unfit(q.device)
    if reason is not None:
        return reason
    if q.dtype not in {torch.bfloat16, torch.float16}:
        return f"q: {q.dtype}; bfloat16 and float16 are served"
    if v.shape[2] != q.shape[2]:
        return f"q: head dim {q.shape[2]}, v: {v.shape[2]}; equal ones are served"
    return shape_unfit(q.shape[2], positions)


def shape_unfit(dim: int, positions: int) -> str | None:
    """Why the kernel takes no heads of a dim, or not so many positions; None where it does."""
    if dim % 8 or not 0 < dim <= 256:
        return f"head dim {dim}; multiples of 8 up to 256 are served"
    return f"{positions} positions; at most {POSITIONS} are served" if positions > POSITIONS else None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    ancestry: Tensor,
    *,
    scale: float,
    first: int,
    compact: bool,
    bias: Tensor | None = None,
    shared: tuple[Tensor, Tensor] | None = None,
    lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`reference.prefix_attention`, and with `shared` `reference.extend_attention`, in one launch.

    Operands as there, q, k, v and slots in one 16-bit dtype; rows of q, k, v may lie apart (views of one product).
    Returns out [N, H, D], and the log-sum-exp [N, H] (stored head by head) where `lse` asks for it. Without ancestors,
    `shared` and `lse` only v is read. Slots, too, may lie apart: each whole, those of k as far from each other as those
    of v. Raises ValueError for what `unfit` and `slots_unfit` name.
    """
    (n, h, d), hkv = q.shape, k.shape[1]
    positions = ancestry.shape[1] - first + 1
    reason = unfit(q, v, positions)
    if reason is None:
        reason = slots_unfit(k_slots, v_slots)
    if reason is None and not q.dtype == k.dtype == v.dtype == k_slots.dtype == v_slots.dtype:
        reason = "k, v and slots: must have the dtype of q"
    if reason is not None:
        raise ValueError(reason)
    if positions == 1 and h == hkv and shared is None and not lse:
        return v.clone(memory_format=torch.contiguous_format), None
    out = torch.empty((n, h, d), dtype=q.dtype, device=q.device)
    sums = torch.empty((h, n), dtype=torch.float32, device=q.device) if lse else None
    if not n:
        return out, None if sums is None else sums.t()
    q, k, v = _rows(q), _rows(k), _rows(v)
    tree = ancestry if ancestry.dtype == torch.int32 else ancestry.to(torch.int32)
    added = None if bias is None else bias.to(torch.float32).contiguous()
    context, context_lse = (None, None) if shared is None else (_whole(shared[0]), shared[1])
    shape = _shape(q.device, d, h, positions, bf16=q.dtype == torch.bfloat16, compact=compact)
    blocks = h // shape.heads * -(-n // shape.rows) if shape.heads else -(-n * h // shape.pairs)
    shape.kernel.launch(
        blocks, _THREADS,
        q.data_ptr(), k.data_ptr(), v.data_ptr(), k_slots.data_ptr(), v_slots.data_ptr(), tree.data_ptr(),
        _pointer(added), _pointer(context), _pointer(context_lse), out.data_ptr(), _pointer(sums),
        q.stride(0), k.stride(0), v.stride(0), k_slots.stride(0), k_slots.stride(1), *tree.stride(),
        *((0, 0) if context_lse is None else context_lse.stride()),
        n, h, h // hkv, k_slots.shape[1], first, np.float32(scale),
    )  # fmt: skip
    return out, None if sums is None else sums.t()


@cache
def _shape(device: torch.device, d: int, h: int, positions: int, *, bf16: bool, compact: bool) -> _Shape:
    lanes = 1 << (d // 8 - 1).bit_length()  # of a (row, head), 16 bytes each
    pairs = _THREADS // lanes
    tile = min(pairs, 8)
    walks = positions >= _WALKED and not compact and h % tile == 0
    form = "compact" if compact and positions > 1 else "walk" if walks else "slots"
    kernel = cuda.load(_SOURCE, f"{form}_{positions}", device, D=d, BF16=int(bf16))
    return _Shape(kernel, pairs, tile if walks else 0, pairs // tile * _WALK)


def slots_unfit(k_slots: Tensor, v_slots: Tensor) -> str | None:
    """Why the kernel cannot read slots where they lie, [steps, rows, Hkv, D] each; None where it can."""
    if k_slots.shape != v_slots.shape:
        return f"slots: {list(k_slots.shape)} of keys, {list(v_slots.shape)} of values; equal ones are served"
    for name, slots in (("k_slots", k_slots), ("v_slots", v_slots)):
        *far, head, one = slots.stride()
        whole = one == 1 and (head == slots.shape[3] or slots.shape[2] == 1)
        if not whole or any(stride % 8 for stride in far) or slots.data_ptr() % 16:
            return f"{name}: strides {list(slots.stride())}; whole rows of 16-byte pieces are served"
    if k_slots.stride()[:2] != v_slots.stride()[:2]:
        return f"slots: strides {list(k_slots.stride())} of keys, {list(v_slots.stride())} of values; equal are served"
    return None


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _rows(x: Tensor) -> Tensor:
    """x [N, H, D] itself where every row is whole and 16-byte aligned, else a copy of it."""
    row, head, one = x.stride()
    whole = one == 1 and (head == x.shape[2] or x.shape[1] == 1)
    return x if whole and row % 8 == 0 and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _whole(x: Tensor) -> Tensor:
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
