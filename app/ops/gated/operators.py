"""The gate of a SwiGLU as the engine calls it: one pass over the memory on an NVIDIA GPU in 16 bit (`kernel.cu`), the
definition (`reference.py`) elsewhere. Registered with `torch.library`, so that torch.export keeps it as one node."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from app.ops import cuda
from app.ops.gated import reference
from app.ops.library import register

_SOURCE = Path(__file__).with_name("kernel.cu")
_THREADS = 256
_PIECE = 8
"""Elements of a 16-byte piece: what a thread takes."""


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """`reference.gated`; on a GPU in 16 bit silu is not rounded before the product. Rows may lie apart."""
    out: Tensor = _CALL(gate, up)
    return out


def unfit(gate: Tensor, up: Tensor) -> str | None:
    """Why the kernel cannot take these; None where it can."""
    reason = cuda.unfit(gate.device)
    if reason is not None:
        return reason
    if gate.dtype not in {torch.bfloat16, torch.float16} or up.dtype != gate.dtype:
        return f"{gate.dtype} and {up.dtype}; one of bfloat16 and float16 is served"
    whole = all(x.stride(1) == 1 and x.stride(0) % _PIECE == 0 and x.data_ptr() % 16 == 0 for x in (gate, up))
    return None if whole and gate.shape[1] % _PIECE == 0 else "rows are not whole pieces of 16 bytes"


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    if unfit(gate, up) is not None:
        return reference.gated(gate, up)
    n, width = gate.shape
    out = torch.empty((n, width), dtype=gate.dtype, device=gate.device)
    if out.numel():
        kernel = cuda.load(_SOURCE, "gated", gate.device, BF16=int(gate.dtype == torch.bfloat16))
        pieces = width // _PIECE
        kernel.launch(
            -(-n * pieces // _THREADS), _THREADS, gate.data_ptr(), up.data_ptr(), out.data_ptr(), n * pieces, pieces,
            gate.stride(0), up.stride(0),
        )  # fmt: skip
    return out


def _shape(gate: Tensor, _up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


_CALL = register("gated(Tensor gate, Tensor up) -> Tensor", _gated, _shape, reference.gated)
