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
    """A compiled kernel: `columns` of V a block, `rows` of a request at a time, how many blocks are `resident` on a
    device, and how many there are at most (None: one an item)."""

    kernel: cuda.Kernel
    columns: int
    rows: int
    resident: int
    most: int | None


def unfit_state(device: torch.device, dtype: torch.dtype, hk: int, hv: int, k: int, v: int) -> str | None:
    """Why the kernel never takes a state of these heads, [HV, K, V], behind windows of this dtype; None where it does,
    and S_ctx then lies as `pack` makes it."""
    reason = cuda.unfit(device)
    if reason is not None:
        return reason
    if dtype not in _INPUTS:
        return f"window: {dtype}; bfloat16 and float16 are served"
    if hv % hk:
        return f"s_ctx: {hv} value heads over {hk} key heads; equal shares are served"
    reason = shape_unfit(k, v)
    return reason and f"s_ctx: {reason}"


def unfit(window: Tensor, s_ctx: Tensor, records: Records, *, key_heads: int, ancestors: int) -> str | None:
    """Why the kernel cannot take these operands; None where it can."""
    reason = unfit_state(window.device, window.dtype, key_heads, *s_ctx.shape[1:])
    if reason is not None:
        return reason
    if s_ctx.dtype != torch.float32 or records.delta.dtype != torch.float16 or records.k.dtype != window.dtype:
        return "s_ctx and records: float32, deltas in float16 and keys in the window's dtype are served"
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
    key: Tensor | None = None,
    into: int | None,
    dtype: torch.dtype = torch.float32,
    portable: bool = False,
    early: bool = False,
) -> Tensor:
    """One decode step of every row: unit keys and queries, `replay`, and the records' slots, in one launch.

    window     [N, 2 HK K + HV V] bfloat16 or float16: q, k, v of each row as the convolution gives them
    log_alpha, beta  [N, HV] float32
    s_ctx      [R, HV, K, V] float32, as `pack` makes it
    records    slots; delta float16, k in the window's dtype
    row_start  [R + 1], ancestry [N, t - 1] int32, both on the device; first, compact: see `replay`
    key        [N, HK K], dense: the rows' keys, instead of those in the window
    into       the slots (into, 0..N-1) are written; None = none. Where `key` is their k itself, that stays as it is
    dtype      of the output: float32 or the window's
    portable   use what every GPU since compute capability 8.0 has, on 9.0 too, where warpgroup products are quicker
    early      S_ctx, the gates, row_start and ancestry were there before the kernel launched last began: they may be
               read while that one ends
    Returns o [N, HV, V]. Raises ValueError with the reason of `unfit`. q, k are exact operands; S_ctx is rounded to two
    16-bit terms (relative 2^-17), delta to float16 in its slot only.
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
    window = window.contiguous()
    own = window[:, key_heads * k :] if key is None else key.contiguous()
    copied = into is not None and own.data_ptr() != records.k[into].data_ptr()
    operands = [log_alpha.contiguous(), beta.contiguous(), s_ctx.contiguous(), *records]
    start, tree = row_start.to(torch.int32).contiguous(), ancestry.to(torch.int32).contiguous()
    for name, tensor in zip(Records._fields, records, strict=True):
        if not tensor.is_contiguous():
            raise ValueError(f"records.{name}: must be contiguous")
    blocks = requests * hv * (v // shape.columns)
    splits = max(1, min(shape.resident // blocks, -(-n // (requests * shape.rows))))
    items, own_slot = blocks * splits, -1 if into is None else into
    shape.kernel.launch(
        min(items, shape.most or items), shape.rows * 4,
        window.data_ptr(), window.stride(0), own.data_ptr(), own.stride(0), *(x.data_ptr() for x in operands),
        start.data_ptr(), tree.data_ptr(), *(np.int32(x) for x in (tree.shape[1], first, compact)),
        records.k.shape[1], *(np.int32(x) for x in (own_slot, copied, key_heads, hv, splits, items)),
        out.data_ptr(), early=early and wgmma,
    )  # fmt: skip
    return out


class Blocks(NamedTuple):
    """Of a compiled kernel: `columns` of V and `warps` a block, how many blocks are `resident` on a processor, whether
    it has warpgroups' products and the copy engine, and whether queries are read ahead."""

    columns: int
    warps: int
    resident: int
    wgmma: bool
    staged: bool

    @property
    def ring(self) -> int:
        """Units of 32 bytes a thread of records that are on their way; blocks then take several items in turn."""
        return 4 if self.wgmma and self.staged else 0

    @property
    def defines(self) -> dict[str, int]:
        """What the source is compiled with."""
        return {"VT": self.columns, "WGMMA": int(self.wgmma), "STAGED": int(self.staged)}

    def memory(self, k: int) -> int:
        """Bytes of shared memory: columns of the state, what is read ahead, a barrier, a number a thread."""
        threads = self.warps * 32
        ahead = (2 * k + self.columns) // 2 if self.staged else 0
        ring = 32 * self.ring + 4 if self.ring else 0
        return k * self.columns * 4 + threads * (ahead + ring) + 16


def blocks(k: int, shared: int, *, wgmma: bool) -> Blocks:
    """How the kernel cuts heads of K; shared: bytes of shared memory of a processor."""
    if k != 128:
        return Blocks(128, 12, 1, wgmma, staged=False) if wgmma else Blocks(64, 4, 3, wgmma, staged=False)
    if wgmma:
        return Blocks(128, 16, 1, wgmma, staged=True)
    ahead = Blocks(128, 8, 2, wgmma, staged=True)
    return ahead._replace(staged=shared >= ahead.resident * (ahead.memory(k) + RESERVED))


@cache
def _compiled(device: torch.device, k: int, v: int, *, bf16: bool, out32: bool, wgmma: bool) -> _Shape:
    """Once for each device and shape."""
    about = torch.cuda.get_device_properties(device)
    cut = blocks(k, about.shared_memory_per_multiprocessor, wgmma=wgmma)
    kernel = cuda.load(
        Path(__file__).with_name("kernel.cu"), "replay", device, memory=cut.memory(k), arch="sm_90a" if wgmma else "",
        K=k, V=v, BF16=int(bf16), OUT32=int(out32), **cut.defines,
    )  # fmt: skip
    most = cut.resident * about.multi_processor_count
    return _Shape(kernel, cut.columns, cut.warps * 8, most, most if cut.ring else None)
