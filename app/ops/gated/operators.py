"""The gate of a SwiGLU as the engine calls it: one pass over the memory on an NVIDIA GPU in 16 bit (`kernel.cu`), or no
pass where the product before it gates its own sums (`product.cu`); the definition (`reference.py`) elsewhere.
Registered with `torch.library`, so that torch.export keeps each as one node."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from app.ops import cuda
from app.ops.gated import product, reference
from app.ops.library import register

_SOURCE = Path(__file__).with_name("kernel.cu")
_THREADS = 256
_PIECE = 8
"""Elements of a 16-byte piece: what a thread takes."""


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """`reference.gated`; on a GPU in 16 bit silu is not rounded before the product. Rows may lie apart."""
    out: Tensor = _CALL(gate, up)
    return out


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """`reference.gated_product`. On a GPU in 16 bit gate and up are rounded before the gate only where `product.unfit`
    says why they are a product by themselves."""
    out: Tensor = _PRODUCT_CALL(x, weight)
    return out


def gates_itself(x: Tensor, weight: Tensor) -> bool:
    """Whether `gated_product` of these is one launch. Of a tracer's tensors it is: one node."""
    return type(x) is not Tensor or product.unfit(x, weight) is None


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


def _gated_product(x: Tensor, weight: Tensor) -> Tensor:
    if product.unfit(x, weight) is None:
        return product.gated_product(x, weight)
    gate, up = linear(x, weight).chunk(2, 1)
    return _gated(gate, up)


def _shape(gate: Tensor, _up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


_CALL = register("gated(Tensor gate, Tensor up) -> Tensor", _gated, _shape, reference.gated)


def _product_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


_PRODUCT_CALL = register(
    "gated_product(Tensor x, Tensor weight) -> Tensor", _gated_product, _product_shape, reference.gated_product
)
