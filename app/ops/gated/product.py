"""`product.cu` on torch's current stream: what it takes, and its launch. Needs CuPy and a GPU of sm_90."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from app.ops import cuda
from app.ops.driver import tensor_map

SOURCE = Path(__file__).with_name("product.cu")
ARCH = "sm_90a"
WEIGHTS = 32 << 20
"""Bytes of a weight up to which it is taken: its tiles go over all columns first, so L2 must hold the weights."""
_THREADS, _BLOCKS, _ROWS, _DEEP = 384, 2, 128, 64
_MEMORY = 4 * 3 * _ROWS * 2 * _DEEP + 1024
"""Places of all stages, on 1024 bytes."""


def unfit(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernel cannot take these operands of `reference.gated_product`, or should not; None where it can."""
    reason = cuda.unfit(x.device)
    if reason is not None:
        return reason
    if x.dtype not in {torch.bfloat16, torch.float16} or weight.dtype != x.dtype:
        return f"x: {x.dtype}, weight: {weight.dtype}; one of bfloat16 and float16 is served"
    if (arch := cuda.architecture(x.device)) != "sm_90":
        return f"{arch}; its products are those of sm_90"
    if weight.device != x.device or weight.shape[1] != x.shape[1]:
        return "x and weight do not belong together"
    return shape_unfit(x.shape[0], weight.shape[0] // 2, x.shape[1]) or _lies_unfit(x) or _lies_unfit(weight)


def shape_unfit(rows: int, width: int, depth: int) -> str | None:
    """Why it does not take x [rows, depth] and a weight [2 width, depth]; None where it does.

    Few rows leave much of the device idle, and are taken all the same: product and gate round twice more, and an answer
    would depend on how many are in its batch.
    """
    if width % _ROWS or depth % _DEEP or not width or not depth:
        return f"{width} columns of {depth}; multiples of {_ROWS} and {_DEEP} are served"
    if not rows or 4 * width * depth > WEIGHTS:
        return f"{rows} rows, {4 * width * depth} bytes of weights; some rows and up to {WEIGHTS} are served"
    return None


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """`reference.gated_product` in one launch: gate and up are not rounded to 16 bit in between. What is unfit is the
    caller's to know."""
    (rows, depth), width = x.shape, weight.shape[0] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    tiles = -(-rows // (_BLOCKS * _ROWS)) * (width // _ROWS)
    _kernel(x.device, bf16=x.dtype == torch.bfloat16).launch(
        _BLOCKS * min(tiles, _processors(x.device) // _BLOCKS), _THREADS,
        tensor_map(x, _ROWS, _DEEP), tensor_map(weight, _ROWS, _DEEP), out.data_ptr(), rows, width, depth,
    )  # fmt: skip
    return out


def _lies_unfit(x: Tensor) -> str | None:
    whole = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return None if whole and x.stride(0) >= x.shape[1] else "rows are not whole, or do not begin on 16 bytes"


@cache
def _kernel(device: torch.device, *, bf16: bool) -> cuda.Kernel:
    return cuda.load(SOURCE, "gated_product", device, memory=_MEMORY, arch=ARCH, BF16=int(bf16))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
