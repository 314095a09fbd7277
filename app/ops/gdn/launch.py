"""The fused kernel of `kernel.cu` on torch's current stream: what it takes, and its launch. Needs CuPy and a GPU.

Nothing is read back from the device, so a launch may be captured into a CUDA graph (after one launch outside of it,
which compiles).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.ops import cuda
from app.ops.gdn.replay import Records

DEPTH = 8
"""Ancestors that the kernel replays at most."""
RESERVED = 1024
"""Bytes of shared memory that the system keeps of every block."""
_INPUTS = (torch.bfloat16, torch.float16)


class _Shape(NamedTuple):
    """A compiled kernel: `columns` of V a block, `rows` of a request at a time, and how many blocks are `resident` on a
    processor."""

    kernel: cuda.Kernel
    columns: int
    rows: int
    resident: int
    processors: int


def unfit(window: Tensor, s_ctx: Tensor, records: Records, *, key_heads: int, ancestors: int) -> str | None:
    """Why the kernel cannot take these operands; None where it can."""
    hv, k, v = s_ctx.shape[1:]
    reason = cuda.unfit(window.device)
    if reason is not None:
        return reason
    if window.dtype not in _INPUTS:
        return f"window: {window.dtype}; bfloat16 and float16 are served"
    if hv % key_heads:
        return f"s_ctx: {hv} value heads over {key_heads} key heads; equal shares are served"
    if (reason := shape_unfit(k, v)) is not None:
        return f"s_ctx: {reason}"
    if s_ctx.dtype != torch.float32 or records.delta.dtype != torch.float16 or records.k.dtype != torch.float16:
        return "s_ctx and records: float32 and float16 are served"
    return f"ancestry: {ancestors} ancestors; at most {DEPTH}" if ancestors > DEPTH else None


def shape_unfit(k: int, v: int) -> str | None:
    """Why there is no kernel for states [K, V]; None where there is."""
    return f"K {k}, V {v}; K 128 or 256 and V a multiple of 128 are served" if k not in {128, 256} or v % 128 else None


def fused_replay(
    window: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    s_ctx: Tensor,
    records: Records,
    *,
    key_heads: int,
    row_start: Tensor,
    ancestry: Tensor,
    first: int = 0,
    compact: bool = False,
    into: int | None,
    dtype: torch.dtype = torch.float32,
    portable: bool = False,
) -> Tensor:
    """One decode step of every row: unit keys and queries, `replay`, and the records' slots, in one launch.

    window     [N, 2 HK K + HV V] bfloat16 or float16: q, k, v of each row as the convolution gives them
    log_alpha, beta  [N, HV] float32
    s_ctx      [R, HV, K, V] float32
    records    slots; k and delta float16
    row_start  [R + 1], ancestry [N, t - 1] int32, both on the device; first, compact: see `replay`
    into       the slots (into, 0..N-1) are written; None = none
    dtype      of the output: float32 or the window's
    portable   use what every GPU since compute capability 8.0 has, on 9.0 too, where warpgroup products are quicker
    Returns o [N, HV, V]. Raises ValueError with the reason of `unfit`. q, k are exact operands; S_ctx is rounded to two
    16-bit terms (relative 2^-17), delta and k to float16 in their slots only.
    """
    n, (requests, hv, k, v) = len(window), s_ctx.shape
    reason = unfit(window, s_ctx, records, key_heads=key_heads, ancestors=ancestry.shape[1] - first)
    if reason is None and dtype not in {torch.float32, window.dtype}:
        reason = f"dtype: {dtype}; float32 or the window's"
    if reason is not None:
        raise ValueError(reason)
    out = torch.empty((n, hv, v), dtype=dtype, device=window.device)
    if not n:
        return out
    wgmma = not portable and torch.cuda.get_device_capability(window.device) == (9, 0)
    bf16, out32 = window.dtype == torch.bfloat16, dtype == torch.float32
    shape = _compiled(window.device, k, v, bf16=bf16, out32=out32, wgmma=wgmma)
    operands = [window.contiguous(), log_alpha.contiguous(), beta.contiguous(), s_ctx.contiguous(), *records]
    start, tree = row_start.to(torch.int32).contiguous(), ancestry.to(torch.int32).contiguous()
    for name, tensor in zip(Records._fields, records, strict=True):
        if not tensor.is_contiguous():
            raise ValueError(f"records.{name}: must be contiguous")
    blocks = requests * hv * (v // shape.columns)
    splits = max(1, min(shape.resident * shape.processors // blocks, -(-n // (requests * shape.rows))))
    shape.kernel.launch(
        blocks * splits, shape.rows * 4,
        operands[0].data_ptr(), np.int32(operands[0].shape[1]), *(x.data_ptr() for x in operands[1:]),
        start.data_ptr(), tree.data_ptr(), *(np.int32(x) for x in (tree.shape[1], first, compact)),
        records.k.shape[1], *(np.int32(x) for x in (-1 if into is None else into, key_heads, hv, splits)),
        out.data_ptr(),
    )  # fmt: skip
    return out


def staged(k: int, shared: int) -> bool:
    """Whether queries are read ahead; shared: bytes of shared memory of a processor."""
    columns, warps, resident = _blocks(k)
    state, ahead = k * columns * 4, warps * 32 * (2 * k + columns) // 2
    return k == 128 and shared >= resident * (state + ahead + RESERVED)


def _blocks(k: int) -> tuple[int, int, int]:
    """Columns of V and warps of a block, and blocks of a processor."""
    return (128, 8, 2) if k == 128 else (64, 4, 3)


@cache
def _compiled(device: torch.device, k: int, v: int, *, bf16: bool, out32: bool, wgmma: bool) -> _Shape:
    """Once for each device and shape."""
    columns, warps, resident = _blocks(k)
    flags = {"K": k, "V": v, "VT": columns, "BF16": int(bf16), "OUT32": int(out32), "WGMMA": int(wgmma)}
    about = torch.cuda.get_device_properties(device)
    state, ahead = k * columns * 4, warps * 32 * (2 * k + columns) // 2
    stage = staged(k, about.shared_memory_per_multiprocessor)
    source, memory = Path(__file__).with_name("kernel.cu"), state + ahead * stage
    arch = "sm_90a" if wgmma else ""
    kernel = cuda.load(source, "replay", device, memory=memory, arch=arch, **flags, STAGED=int(stage))
    return _Shape(kernel, columns, warps * 8, resident, about.multi_processor_count)
