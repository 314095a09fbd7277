"""Mixtures of experts as the engine calls them, registered with `torch.library`. On an NVIDIA GPU of compute capability
9.0 in bfloat16 one `torch._grouped_mm` multiplies the rows of all experts, and kernels of ours (`kernel.cu`) choose,
spread and sum; nothing is read on the host. On a CPU a product an expert, over the rows that it has."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from app.ops import cuda
from app.ops.grouped import reference
from app.ops.library import register

_SOURCE = Path(__file__).with_name("kernel.cu")
_PIECE = 8
"""Elements of 16 bytes, of which rows and matrices consist where torch multiplies by groups."""
_THREADS, _WARPS, _ROWS, _EXPERTS, _MOST = 256, 8, 128, 512, 32
"""Threads and warps of a block; rows of one that spreads; the most experts, and the most of them for a row."""


class Dispatched(NamedTuple):
    """Rows by expert. x [M, d]; place [N, k] int32, where a row's copies are; ends [E] int32, behind each expert's."""

    x: Tensor
    place: Tensor
    ends: Tensor


def choose(
    logits: Tensor, bias: Tensor | None, k: int, *, sigmoid: bool, normalise: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """`reference.choose`."""
    expert, weight = torch.ops.widebeam.choose_experts(logits, bias, k, sigmoid, normalise, factor)
    return expert, weight


def dispatch(x: Tensor, expert: Tensor, experts: int) -> Dispatched:
    """The rows x [N, d] of each expert together (`reference.arrange`)."""
    return Dispatched(*torch.ops.widebeam.dispatch_experts(x, expert, experts))


def product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`reference.product` up to the order of its sums."""
    out: Tensor = torch.ops.widebeam.grouped_product(x, weight, ends)
    return out


def combine(y: Tensor, place: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
    """`reference.combine`."""
    out: Tensor = torch.ops.widebeam.combine_experts(y, place, weight, onto)
    return out


def unfit(device: torch.device, dtype: torch.dtype, inputs: int, outputs: int) -> str | None:
    """Why a GPU cannot multiply the rows of all experts at once, so that every expert computes every row; None where it
    can, and for a CPU."""
    if device.type == "cpu":
        return None
    if not cuda.nvidia(device) or torch.cuda.get_device_capability(device)[0] not in {9, 10}:
        return f"grouped products need an NVIDIA GPU of compute capability 9 or 10, {device} is none"
    if dtype != torch.bfloat16:
        return f"{dtype}; grouped products are in bfloat16"
    return None if inputs % _PIECE == outputs % _PIECE == 0 else f"[{outputs}, {inputs}] is not in pieces of 16 bytes"


def _kernel(x: Tensor, name: str, experts: int, k: int) -> cuda.Kernel | None:
    """The kernel, where it takes such rows."""
    if x.dtype not in {torch.bfloat16, torch.float16} or cuda.unfit(x.device) is not None:
        return None
    if experts > _EXPERTS or k > _MOST or x.stride(-1) != 1:
        return None
    return cuda.load(_SOURCE, name, x.device, BF16=int(x.dtype == torch.bfloat16))


def _pieces(*operands: Tensor) -> bool:
    """Whether rows are whole pieces of 16 bytes."""
    return all(
        x.shape[1] % _PIECE == 0 and x.stride(1) == 1 and x.stride(0) % _PIECE == 0 and x.data_ptr() % 16 == 0
        for x in operands
    )


def _choose(
    logits: Tensor, bias: Tensor | None, k: int, sigmoid: bool, normalise: bool, factor: float
) -> tuple[Tensor, Tensor]:
    n, experts = logits.shape
    kernel = _kernel(logits, "choose", experts, k)
    if kernel is None or (bias is not None and bias.dtype != logits.dtype):
        return reference.choose(logits, bias, k, sigmoid=sigmoid, normalise=normalise, factor=factor)
    expert = torch.empty((n, k), dtype=torch.int32, device=logits.device)
    weight = torch.empty((n, k), dtype=torch.float32, device=logits.device)
    if n:
        kernel.launch(
            -(-n // _WARPS), _THREADS, logits.data_ptr(), logits.stride(0), 0 if bias is None else bias.data_ptr(),
            expert.data_ptr(), weight.data_ptr(), n, experts, k, int(sigmoid), int(normalise), np.float32(factor),
        )  # fmt: skip
    return expert, weight


def _dispatch(x: Tensor, expert: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    (n, k), d = expert.shape, x.shape[1]
    count = _kernel(x, "count", experts, k) if _pieces(x) else None
    arrange, spread = (_kernel(x, name, experts, k) for name in ("arrange", "spread"))
    if count is None or arrange is None or spread is None or not n:
        row, place, ends = reference.arrange(expert, experts)
        return x[row], place, ends
    blocks = -(-n // _ROWS)
    counts = torch.empty((blocks, experts), dtype=torch.int32, device=x.device)
    place, ends = torch.empty_like(expert), torch.empty(experts, dtype=torch.int32, device=x.device)
    out = torch.empty((n * k, d), dtype=x.dtype, device=x.device)
    count.launch(blocks, _THREADS, expert.data_ptr(), counts.data_ptr(), n * k, experts, k)
    arrange.launch(
        blocks, _THREADS, expert.data_ptr(), counts.data_ptr(), place.data_ptr(), ends.data_ptr(), n, experts, k
    )
    pieces = d // _PIECE
    spread.launch(
        -(-n * pieces // _THREADS), _THREADS, x.data_ptr(), x.stride(0), place.data_ptr(), out.data_ptr(), n, k, pieces
    )
    return out, place, ends


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return _by_segment(x, weight, ends)
    if unfit(x.device, x.dtype, weight.shape[2], weight.shape[1]) is not None:
        return reference.product(x, weight, ends)
    return torch._grouped_mm(x, weight.transpose(1, 2), ends)  # noqa: SLF001  torch has no public name for it yet


def _by_segment(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out, first = x.new_empty(x.shape[0], weight.shape[1]), 0
    for matrix, last in zip(weight, ends.tolist(), strict=True):
        if last > first:
            out[first:last] = linear(x[first:last], matrix)
        first = last
    return out


def _combine(y: Tensor, place: Tensor, weight: Tensor, onto: Tensor | None) -> Tensor:
    (n, k), d = place.shape, y.shape[1]
    operands = (y,) if onto is None else (y, onto)
    kernel = _kernel(y, "combine", 1, k) if y.is_contiguous() and _pieces(*operands) else None
    if kernel is None or any(x.dtype != y.dtype for x in operands):
        return reference.combine(y, place, weight, onto)
    out = torch.empty((n, d), dtype=y.dtype, device=y.device)
    if out.numel():
        pieces = d // _PIECE
        added, row = (0, 0) if onto is None else (onto.data_ptr(), onto.stride(0))
        kernel.launch(
            -(-n * pieces // _THREADS), _THREADS, y.data_ptr(), place.data_ptr(), weight.data_ptr(), added, row,
            out.data_ptr(), n, k, pieces,
        )  # fmt: skip
    return out


def _choose_shapes(logits: Tensor, _bias: object, k: int, *_how: object) -> tuple[Tensor, Tensor]:
    n = logits.shape[0]
    return logits.new_empty(n, k, dtype=torch.int32), logits.new_empty(n, k, dtype=torch.float32)


def _dispatch_shapes(x: Tensor, expert: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    many = expert.shape[0] * expert.shape[1]
    return x.new_empty(many, x.shape[1]), torch.empty_like(expert), expert.new_empty(experts)


def _product_shapes(x: Tensor, weight: Tensor, _ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _combine_shapes(y: Tensor, place: Tensor, _weight: Tensor, _onto: Tensor | None) -> Tensor:
    return y.new_empty(place.shape[0], y.shape[1])


register(
    "choose_experts(Tensor x, Tensor? bias, int k, bool sigmoid, bool normalise, float factor) -> (Tensor, Tensor)",
    _choose, _choose_shapes,
)  # fmt: skip
register(
    "dispatch_experts(Tensor x, Tensor expert, int experts) -> (Tensor, Tensor, Tensor)", _dispatch, _dispatch_shapes
)
register("grouped_product(Tensor x, Tensor weight, Tensor ends) -> Tensor", _product, _product_shapes)
register("combine_experts(Tensor y, Tensor place, Tensor weight, Tensor? onto) -> Tensor", _combine, _combine_shapes)
