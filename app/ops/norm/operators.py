"""The root mean square norm as the engine calls it: one pass over the memory on an NVIDIA GPU in 16 bit (`kernel.cu`),
the definition (`reference.py`) elsewhere. Registered with `torch.library`, so torch.export keeps it as one node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from app.ops import cuda
from app.ops.library import register
from app.ops.norm import reference

_SOURCE = Path(__file__).with_name("kernel.cu")
_PIECE, _WARP, _WARPS, _MOST = 8, 32, 8, 16
"""Elements of a 16-byte piece; threads of a row; rows of a block; pieces of a thread."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm`; on a GPU in 16 bit it is rounded once. Rows may lie apart."""
    out: Tensor = _CALL(x, weight, eps)
    return out


def unfit(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernel cannot take these; None where it can."""
    reason = cuda.unfit(x.device)
    if reason is not None:
        return reason
    if x.dtype not in {torch.bfloat16, torch.float16} or weight.dtype != x.dtype:
        return f"{x.dtype} and {weight.dtype}; one of bfloat16 and float16 is served"
    if x.dim() != 2 or x.shape[1] > _MOST * _WARP * _PIECE:
        return f"{list(x.shape)}; rows of at most {_MOST * _WARP * _PIECE} are served"
    whole = x.stride(1) == 1 and x.stride(0) % _PIECE == 0 and weight.is_contiguous()
    whole = whole and x.shape[1] % _PIECE == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return None if whole else "rows are not whole pieces of 16 bytes"


def pieces(width: int) -> int:
    """PIECES of the kernel for rows of so many elements."""
    needed = -(-width // (_PIECE * _WARP))
    return 1 << (needed - 1).bit_length()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    flat = x.flatten(0, -2) if x.dim() > 2 and x.is_contiguous() else x
    if unfit(flat, weight) is not None:
        return reference.rms_norm(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rows, width = flat.shape
        bf16 = int(x.dtype == torch.bfloat16)
        kernel = cuda.load(_SOURCE, "rms_norm", x.device, BF16=bf16, PIECES=pieces(width))
        kernel.launch(
            -(-rows // _WARPS), _WARP * _WARPS, x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width // _PIECE,
            flat.stride(0), np.float32(eps),
        )  # fmt: skip
    return out


def _shape(x: Tensor, _weight: Tensor, _eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_CALL = register("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, _shape, reference.rms_norm)
