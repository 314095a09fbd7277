"""8-bit products as the engine calls them: `torch._scaled_mm` on an NVIDIA GPU of compute capability 9.0, with rows
quantised in one pass over them (`kernel.cu`); the definition (`reference.py`) elsewhere."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from app.ops import cuda
from app.ops.fp8 import reference

_SOURCE = Path(__file__).with_name("kernel.cu")
_ROWS, _PIECE = 8, 8
"""Rows of a block, a warp each; elements of a 16-byte piece."""


def unfit(device: torch.device) -> str | None:
    """Why a device cannot compute in 8 bits; None where it can. A CPU emulates them."""
    if device.type == "cpu":
        return None
    if not cuda.nvidia(device) or torch.cuda.get_device_capability(device) < (9, 0):
        return f"fp8 needs an NVIDIA GPU of compute capability 9.0, {device} is none"
    return None


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.quantise_rows`, bit by bit."""
    n, width = x.shape
    if x.dtype != torch.bfloat16 or width % _PIECE or cuda.unfit(x.device) is not None:
        return reference.quantise_rows(x)
    if x.stride(1) != 1 or x.stride(0) % _PIECE or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    q = torch.empty((n, width), dtype=reference.FP8, device=x.device)
    scale = torch.empty(n, dtype=torch.float32, device=x.device)
    if n:
        kernel = cuda.load(_SOURCE, "quantise", x.device)
        kernel.launch(-(-n // _ROWS), 32 * _ROWS, x.data_ptr(), x.stride(0), q.data_ptr(), scale.data_ptr(), n, width)
    return q, scale


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`reference.linear` up to the order of its sums. K and M must be multiples of 16; on a GPU x is bfloat16."""
    if x.device.type != "cuda":
        return reference.linear(x, weight, scale, bias)
    if not len(x):
        return x.new_empty(0, len(weight))
    q, own = quantise_rows(x)
    return torch._scaled_mm(  # noqa: SLF001  torch has no public name for it yet
        q, weight.t(), scale_a=own.unsqueeze(1), scale_b=scale.unsqueeze(0), bias=bias, out_dtype=x.dtype,
        use_fast_accum=True,
    )  # fmt: skip
