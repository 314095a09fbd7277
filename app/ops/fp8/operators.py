"""8-bit products as the engine calls them: `torch._scaled_mm` on an NVIDIA GPU of compute capability 9.0, with rows
quantised in the pass that makes them (`kernel.cu`); the definition (`reference.py`) elsewhere.

Registered with `torch.library`, so that torch.export and torch.compile see one node each; the engine's own tensors go
to the function at once, as torch's way to an operator of its own takes longer than a launch.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.ops import cuda
from app.ops.fp8 import reference
from app.ops.library import register, traced

_SOURCE = Path(__file__).with_name("kernel.cu")
_PIECE, _PIECES, _WARP, _THREADS, _ROWS = 8, 4, 32, 1024, 4
"""Elements of a 16-byte piece; pieces of a row that a thread keeps; threads of a warp, and of a block at most; rows of
a block, where a warp is enough for one."""


class EightBits(NamedTuple):
    """Rows in 8 bits: q [n, K] float8_e4m3fn, scale [n] float32."""

    q: Tensor
    scale: Tensor


def unfit(device: torch.device) -> str | None:
    """Why a device cannot compute in 8 bits; None where it can. A CPU emulates them."""
    if device.type == "cpu":
        return None
    if not cuda.nvidia(device) or torch.cuda.get_device_capability(device) < (9, 0):
        return f"fp8 needs an NVIDIA GPU of compute capability 9.0, {device} is none"
    return None


def quantise_rows(x: Tensor) -> EightBits:
    """`reference.quantise_rows`, bit by bit."""
    return EightBits(*torch.ops.widebeam.fp8_rows(x)) if traced(x) else _rows(x)


def quantise_gated(gate: Tensor, up: Tensor) -> EightBits:
    """`reference.quantise_gated`, by `ops.gated`'s arithmetic: silu is not rounded before the product on a GPU."""
    return EightBits(*torch.ops.widebeam.fp8_gated(gate, up)) if traced(gate) else _gated(gate, up)


def quantise_normed(x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> EightBits:
    """`reference.quantise_normed` up to the order of its sum."""
    if not traced(x):
        return _normed(x, weight, eps, added)
    if added is None:
        return EightBits(*torch.ops.widebeam.fp8_normed(x, weight, eps))
    return EightBits(*torch.ops.widebeam.fp8_summed(x, weight, eps, added))


def _rows(x: Tensor) -> EightBits:
    if _kernelless(x):
        return EightBits(*reference.quantise_rows(x))
    x, out = _aligned(x), _empty(x)
    _launch("quantise", out, x.data_ptr(), x.stride(0))
    return out


def _gated(gate: Tensor, up: Tensor) -> EightBits:
    if _kernelless(gate, up):
        return EightBits(*reference.quantise_gated(gate, up))
    gate, up, out = _aligned(gate), _aligned(up), _empty(gate)
    _launch("gated", out, gate.data_ptr(), up.data_ptr(), gate.stride(0), up.stride(0))
    return out


def _normed(x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> EightBits:
    operands = (x, weight.unsqueeze(0)) if added is None else (x, weight.unsqueeze(0), added)
    if _kernelless(*operands) or not all(_whole(one) for one in operands):
        return EightBits(*reference.quantise_normed(x, weight, eps, added))
    out, other = _empty(x), () if added is None else (added.data_ptr(), added.stride(0))
    name = "normed" if added is None else "summed"
    _launch(name, out, x.data_ptr(), x.stride(0), *other, weight.data_ptr(), np.float32(eps))
    return out


def _kernelless(*operands: Tensor) -> bool:
    """Whether no kernel takes these."""
    first = operands[0]
    if any(x.dtype != torch.bfloat16 for x in operands) or cuda.unfit(first.device) is not None:
        return True
    return bool(first.shape[1] % _PIECE or first.shape[1] > _PIECE * _PIECES * _THREADS)


def _whole(x: Tensor) -> bool:
    """Whether rows are on 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) % _PIECE == 0 and x.data_ptr() % 16 == 0


def _aligned(x: Tensor) -> Tensor:
    """The same rows, on 16 bytes."""
    return x if _whole(x) else x.clone(memory_format=torch.contiguous_format)


def _empty(x: Tensor) -> EightBits:
    n, width = x.shape
    q = torch.empty((n, width), dtype=reference.FP8, device=x.device)
    return EightBits(q, torch.empty(n, dtype=torch.float32, device=x.device))


def _launch(name: str, out: EightBits, *arguments: object) -> None:
    n, width = out.q.shape
    if n and width:
        pieces = width // _PIECE
        team = -(-pieces // (_PIECES * _WARP)) * _WARP
        rows = _ROWS if team == _WARP else 1  # of a block
        kernel = cuda.load(_SOURCE, name, out.q.device)
        where = (out.q.data_ptr(), out.scale.data_ptr(), n, pieces, team)
        kernel.launch(-(-n // rows), rows * team, *arguments, *where)


def linear(x: Tensor | EightBits, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`reference.linear` up to the order of its sums, in x's dtype: of rows that are in 8 bits already, in bfloat16. K
    and M must be multiples of 16; on a GPU x is bfloat16."""
    rows, dtype = (x, torch.bfloat16) if isinstance(x, EightBits) else (quantise_rows(x), x.dtype)
    if traced(rows.q):
        out: Tensor = torch.ops.widebeam.fp8_linear(*rows, weight, scale, bias, dtype)
        return out
    return _linear(*rows, weight, scale, bias, dtype)


def linear_into(out: Tensor, x: Tensor | EightBits, weight: Tensor, scale: Tensor) -> None:
    """`linear` in the place of out [n, M], whose rows may lie apart."""
    rows = x if isinstance(x, EightBits) else quantise_rows(x)
    (torch.ops.widebeam.fp8_linear_into if traced(out) else _linear_into)(out, *rows, weight, scale)


def grouped_linear(rows: EightBits, weight: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """`reference.grouped_linear` up to the order of its sums; on a GPU nothing is read on the host. Where torch has no
    such product (compute capability 9.0 has it) every matrix multiplies every row."""
    if traced(rows.q):
        out: Tensor = torch.ops.widebeam.fp8_grouped_linear(*rows, weight, scale, ends)
        return out
    return _grouped_linear(*rows, weight, scale, ends)


def _linear(q: Tensor, own: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if q.device.type != "cuda":
        return reference.linear(q, own, weight, scale, bias, dtype)
    if not len(q):
        return weight.new_empty((0, len(weight)), dtype=dtype)
    return torch._scaled_mm(  # noqa: SLF001  torch has no public name for it yet
        q, weight.t(), scale_a=own.unsqueeze(1), scale_b=scale.unsqueeze(0), bias=bias, out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip


def _linear_into(out: Tensor, q: Tensor, own: Tensor, weight: Tensor, scale: Tensor) -> None:
    if q.device.type != "cuda":
        out.copy_(reference.linear(q, own, weight, scale, None, out.dtype))
    elif len(q):
        torch._scaled_mm(  # noqa: SLF001  torch has no public name for it yet
            q, weight.t(), scale_a=own.unsqueeze(1), scale_b=scale.unsqueeze(0), out_dtype=out.dtype,
            use_fast_accum=True, out=out,
        )  # fmt: skip


def _grouped_linear(q: Tensor, own: Tensor, weight: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    if q.device.type != "cuda":
        return reference.grouped_linear(q, own, weight, scale, ends)
    if torch.cuda.get_device_capability(q.device) == (9, 0):
        return torch._scaled_grouped_mm(  # noqa: SLF001  torch has no public name for it yet
            q, weight.transpose(1, 2), own, scale, ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    out = weight.new_zeros((len(q), weight.shape[1]), dtype=torch.bfloat16)
    at, first = torch.arange(len(q), device=ends.device), torch.zeros_like(ends[0])
    for matrix, factor, last in zip(weight, scale, ends, strict=True):
        every = _linear(q, own, matrix, factor, None, out.dtype)
        out, first = torch.where(((at >= first) & (at < last)).unsqueeze(1), every, out), last
    return out


# ---- as torch's graphs have them: rows in 8 bits are contiguous ----------------------------------------------------


def _of(rows: EightBits) -> tuple[Tensor, Tensor]:
    return rows.q.contiguous(), rows.scale


def _rows_shapes(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=reference.FP8), x.new_empty(x.shape[0], dtype=torch.float32)


def _linear_shape(
    q: Tensor, _own: Tensor, weight: Tensor, _scale: Tensor, _bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return q.new_empty(q.shape[0], weight.shape[0], dtype=dtype)


def _grouped_shape(q: Tensor, _own: Tensor, weight: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[0], weight.shape[1], dtype=torch.bfloat16)


_NORM, _PRODUCT = "Tensor weight, float eps", "Tensor q, Tensor own, Tensor weight, Tensor scale"
register("fp8_rows(Tensor x) -> (Tensor, Tensor)", lambda x: _of(_rows(x)), _rows_shapes)
register("fp8_gated(Tensor gate, Tensor up) -> (Tensor, Tensor)", lambda *both: _of(_gated(*both)), _rows_shapes)
register(f"fp8_normed(Tensor x, {_NORM}) -> (Tensor, Tensor)", lambda *given: _of(_normed(*given)), _rows_shapes)
register(
    f"fp8_summed(Tensor(a!) x, {_NORM}, Tensor added) -> (Tensor, Tensor)",
    lambda *given: _of(_normed(*given)),
    _rows_shapes,
)
register(f"fp8_linear({_PRODUCT}, Tensor? bias, ScalarType dtype) -> Tensor", _linear, _linear_shape)
register(f"fp8_linear_into(Tensor(a!) out, {_PRODUCT}) -> ()", _linear_into, lambda *_: None)
register(f"fp8_grouped_linear({_PRODUCT}, Tensor ends) -> Tensor", _grouped_linear, _grouped_shape)
