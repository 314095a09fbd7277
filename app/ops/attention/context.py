"""`context.cu` on torch's current stream: what it takes, and its launch. Needs CuPy and a GPU of sm_90."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from app.ops import cuda

SOURCE = Path(__file__).with_name("context.cu")
ARCH = "sm_90a"
HEADS = (64, 128)
"""Head dims that it is compiled for."""
SHORT = 256
"""Positions below which torch's flash attention is quicker with head dim 128 (measured on an H200)."""
_THREADS, _ROWS, _KEYS, _STAGES = 256, 128, 64, 6


def unfit(q: Tensor, k: Tensor, v: Tensor, scale: float) -> str | None:
    """Why the kernel cannot take these operands of `reference.context_attention`; None where it can."""
    reason = cuda.unfit(q.device)
    if reason is not None:
        return reason
    if q.dtype not in {torch.bfloat16, torch.float16} or not q.dtype == k.dtype == v.dtype:
        return f"q: {q.dtype}, k: {k.dtype}, v: {v.dtype}; one of bfloat16 and float16 is served"
    if v.shape[3] != q.shape[2]:
        return f"q: head dim {q.shape[2]}, v: {v.shape[3]}; equal ones are served"
    if (reason := shape_unfit(q.shape[2], cuda.architecture(q.device))) is not None:
        return reason
    if scale <= 0 or (q.shape[2] == 128 and k.shape[1] < SHORT):
        return f"scale: {scale}, {k.shape[1]} positions; positive ones, with head dim 128 {SHORT} and more, are served"
    whole = all(_pieces(x) for x in (q, k, v))
    return None if whole else "q, k and v: heads must lie together, rows on 16 bytes"


def shape_unfit(dim: int, arch: str) -> str | None:
    """Why there is no kernel for heads of a dim on an architecture ("sm_90"); None where there is."""
    if arch != "sm_90":
        return f"{arch}; its products are those of sm_90"
    return None if dim in HEADS else f"head dim {dim}; {HEADS[0]} and {HEADS[1]} are served"


def attend(
    q: Tensor, k: Tensor, v: Tensor, length: Tensor, row_start: Tensor, *, widest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`reference.context_attention` without a bias, in one launch.

    Operands as there, 16 bit; what is unfit is the caller's to know. widest: rows that no request exceeds
    Returns out [N, H, D] and the log-sum-exp [N, H] float32, stored head by head.
    """
    (n, h, d), (requests, positions, hkv, _) = q.shape, k.shape
    out = torch.empty((n, h, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((h, n), dtype=torch.float32, device=q.device)
    lengths, start = length.to(torch.int32).contiguous(), row_start.to(torch.int32).contiguous()
    tiles = -(-widest * (h // hkv) // _ROWS)
    if blocks := requests * hkv * tiles:
        _kernel(q.device, d, bf16=q.dtype == torch.bfloat16).launch(
            blocks, _THREADS,
            q.data_ptr(), k.data_ptr(), v.data_ptr(), lengths.data_ptr(), start.data_ptr(), out.data_ptr(),
            lse.data_ptr(), q.stride(0), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            n, h, hkv, positions, tiles, np.float32(scale),
        )  # fmt: skip
    return out, lse.t()


@cache
def _kernel(device: torch.device, d: int, *, bf16: bool) -> cuda.Kernel:
    memory = _STAGES * 2 * _KEYS * d * 2 + 1024  # places on 1024 bytes
    return cuda.load(SOURCE, "context", device, memory=memory, arch=ARCH, D=d, BF16=int(bf16))


def _pieces(x: Tensor) -> bool:
    """Whether [..., heads, D] has its heads together and everything before them on 16 bytes."""
    together = x.stride(-1) == 1 and (x.stride(-2) == x.shape[-1] or x.shape[-2] == 1)
    return together and x.data_ptr() % 16 == 0 and all(step % 8 == 0 for step in x.stride()[:-2])
