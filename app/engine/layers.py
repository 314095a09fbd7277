"""Pieces that families share. N rows or positions, H heads, D head dim; everything is row by row."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.engine.fp8 import gated_product_for, product
from app.ops import norm
from app.ops.graph import as_node

LOGITS, ROWS = 1 << 19, 128
"""A full-vocabulary logit matrix is held for as many rows as make LOGITS elements (2 MiB in float32), but for ROWS at
least: fewer would read the whole head too often."""


class Linear(nn.Linear):
    """Without a bias: `product`, by the quickest algorithm that was found for it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
        """[n, inputs] -> [n, outputs]."""
        return product(input, self.weight)


def rotary_table(positions: int, dim: int, theta: float, factor: float = 1.0) -> Tensor:
    """[positions, 2, dim] float32: cosines, and sines with the sign that `rotate` wants.

    theta   the base; angle of pair i at position p is p / factor * theta ** (-2 i / dim)
    factor  linear position interpolation
    """
    frequency = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    angle = torch.arange(positions, dtype=torch.float32).unsqueeze(1) * (frequency / factor)
    sine = angle.sin()
    return torch.stack([torch.cat([angle.cos()] * 2, 1), torch.cat([-sine, sine], 1)], 1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions in the half-split layout: x [N, H, D], angles [N, 2, D] from `rotary_table`."""
    cosine, sine = angles.to(x.dtype).chunk(2, 1)
    return (x * cosine).addcmul_(x.roll(x.shape[2] // 2, 2), sine)


def keep(slots: Tensor, rows: Tensor) -> None:
    """slots[:n] = rows: slots [.., H, D] contiguous, rows [n, H, D], which may lie apart. On a GPU 16 bytes at a time
    where they come so: torch copies rows that lie apart element by element."""
    into = slots[: rows.shape[0]]
    if rows.device.type == "cpu":
        into.copy_(rows)
        return
    into, rows = into.flatten(1), rows.flatten(1)
    if rows.device.type == "cuda" and into.dtype == rows.dtype and _pieces(into) and _pieces(rows):
        into, rows = into.view(torch.complex128), rows.view(torch.complex128)
    into.copy_(rows)


def _pieces(x: Tensor) -> bool:
    """Whether rows are whole pieces of 16 bytes."""
    size = 16 // x.element_size()
    return x.stride(1) == 1 and not (x.shape[1] % size or x.stride(0) % size or x.storage_offset() % size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim of x; weight [..., D] broadcasts. The mean is in float32."""
    if weight.dim() == 1:
        return norm.rms_norm(x, weight, eps)
    return functional.rms_norm(x, x.shape[-1:], eps=eps) * weight


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [N, d]; gate_up [2 F, d] (gate first), down [d, F]: down(silu(gate x) * up x) [N, d]."""
    return product(gated_product_for(x, gate_up, down), down)


def _picked_shapes(hidden: Tensor, head: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    del head
    n = hidden.shape[0]
    return hidden.new_empty(n, tokens.shape[0]), hidden.new_empty(n, dtype=torch.float32)


@as_node("(Tensor hidden, Tensor head, Tensor tokens) -> (Tensor, Tensor)", _picked_shapes)
def pick_and_norm(hidden: Tensor, head: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of some tokens, and the log-sum-exp over the whole vocabulary, from one product.

    hidden [N, d], head [V, d], tokens [C] int64 -> logits [N, C] (hidden's dtype), log_norm [N] float32.
    Made in blocks of rows: no [N, V] matrix is held when it is large.
    """
    picked, norms = [], []
    for rows in torch.split(hidden, max(ROWS, LOGITS // head.shape[0])):
        logits = functional.linear(rows, head)
        picked.append(logits.index_select(1, tokens))
        norms.append(torch.logsumexp(logits.float(), 1))
    if len(picked) == 1:
        return picked[0], norms[0]
    return torch.cat(picked), torch.cat(norms)
