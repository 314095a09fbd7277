"""A mixture of experts in the place of a SwiGLU: routed experts, a few of which each row goes to, and shared ones.

The matrices of all experts lie in one parameter, expert behind expert, so that one product multiplies the rows of all.
A checkpoint holds them one by one: the binding concatenates them, and the gate checks each by its own name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.engine.fp8 import UNIT, dispatched_for, gated_for, gated_product_for, grouped_for, product, product_onto
from app.ops import grouped


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts there are, and how a row finds its own.

    experts, top, hidden  E routed experts of a SwiGLU with F hidden channels, k of them a row
    shared                hidden channels of the experts that every row goes through, together; 0: none
    shared_gate           a row weighs what these give by a sigmoid of its own
    sigmoid, normalise, factor, bias   see `ops.grouped.choose`
    """

    experts: int
    top: int
    hidden: int
    shared: int = 0
    shared_gate: bool = False
    sigmoid: bool = False
    normalise: bool = True
    factor: float = 1.0
    bias: bool = False


class Piece(NamedTuple):
    """A parameter of `Mixture`, and one of the matrices [rows, columns] (or vectors [rows]) that it is made of.

    expert  whose it is, -1: not of one
    part    "gate", "up" or "down" of an expert or of the shared ones; "router", "bias", "shared_weight"
    rows    see `Binding.rows`
    """

    parameter: str
    expert: int
    part: str
    shape: tuple[int, ...]
    rows: Tensor | None = None

    @property
    def height(self) -> int:
        """Rows of the parameter."""
        return self.shape[0] if self.rows is None else len(self.rows)


def pieces(of: Routing, width: int) -> Iterator[Piece]:
    """Everything that a mixture over `width` channels is made of, in the order in which it lies in the parameters."""
    # rows of zeros behind the router's: a product whose rows are no multiple of 8 takes another, slow kernel
    padded = torch.full((-of.experts % 8,), -1)
    rows = torch.cat([torch.arange(of.experts), padded]) if len(padded) else None
    yield Piece("router", -1, "router", (of.experts, width), rows)
    if of.bias:
        yield Piece("bias", -1, "bias", (of.experts,))
    for expert in range(of.experts):
        yield Piece("gate_up", expert, "gate", (of.hidden, width))
        yield Piece("gate_up", expert, "up", (of.hidden, width))
        yield Piece("down", expert, "down", (width, of.hidden))
    if of.shared:
        yield Piece("shared_gate_up", -1, "gate", (of.shared, width))
        yield Piece("shared_gate_up", -1, "up", (of.shared, width))
        yield Piece("shared_down", -1, "down", (width, of.shared))
    if of.shared_gate:
        yield Piece("shared_weight", -1, "shared_weight", (1, width))


class Mixture(nn.Module):
    """The parameters of a mixture over d channels: router [E or a little more, d] and bias [E]; gate_up [E * 2 F, d],
    an expert's gate before its up, and down [E * d, F]; shared_gate_up, shared_down, shared_weight [1, d] of the shared
    experts."""

    router: nn.Parameter
    bias: nn.Parameter | None
    gate_up: nn.Parameter
    down: nn.Parameter
    shared_gate_up: nn.Parameter
    shared_down: nn.Parameter
    shared_weight: nn.Parameter

    def __init__(self, of: Routing, width: int) -> None:
        super().__init__()
        self.of = of
        found: dict[str, list[Piece]] = {}
        for piece in pieces(of, width):
            found.setdefault(piece.parameter, []).append(piece)
        for name in ("router", "bias", "gate_up", "down", "shared_gate_up", "shared_down", "shared_weight"):
            own = found.get(name)
            whole = None if own is None else torch.empty(sum(piece.height for piece in own), *own[0].shape[1:])
            self.register_parameter(name, None if whole is None else nn.Parameter(whole))

    def projections(self) -> tuple[str, ...]:
        """See `Family.projections`: of the shared experts, and of the others where each one's sizes are whole units."""
        shared = ("shared_gate_up", "shared_down") if self.of.shared else ()
        whole = self.of.hidden % UNIT == 0 and self.router.shape[1] % UNIT == 0
        return (*(("gate_up", "down") if whole else ()), *shared)

    def forward(self, x: Tensor, onto: Tensor) -> Tensor:
        """x, onto [N, d] -> onto plus what the experts give for x [N, d]; onto's memory is written. The number of rows
        alone decides the shapes; nothing is read on the host."""
        of = self.of
        logits = functional.linear(x, self.router)[:, : of.experts]
        expert, weight = grouped.choose(
            logits, self.bias, of.top, sigmoid=of.sigmoid, normalise=of.normalise, factor=of.factor
        )
        rows = dispatched_for(x, expert, of.experts, self.gate_up)
        gate, up = grouped_for(rows.x, self.gate_up, rows.ends).chunk(2, 1)
        y = grouped_for(gated_for(gate, up, self.down), self.down, rows.ends)
        return grouped.combine(y, rows.place, weight, self._shared(x, onto))

    def _shared(self, x: Tensor, onto: Tensor) -> Tensor:
        if not self.of.shared:
            return onto
        hidden, down = gated_product_for(x, self.shared_gate_up, self.shared_down), self.shared_down
        if not self.of.shared_gate:
            return product_onto(onto, hidden, down)
        return onto.addcmul_(product(hidden, down), functional.linear(x, self.shared_weight).sigmoid_())
