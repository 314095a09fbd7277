"""Where the bytes of a source tensor go while they are read: rows of parameters, picked, turned, cast or in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from app.ops.fp8 import quantise_rows


class Target(NamedTuple):
    """Where a source tensor goes: rows of a parameter, taken from these rows of the source (None = all; -1 = zeros).

    scale      of each row of a parameter in 8 bits, whose source is quantised row by row
    transpose  a row of the source is a column here
    times      it goes here so often: `parameter` is [rows, times, ..]
    """

    parameter: Tensor
    first: int
    rows: Tensor | None
    scale: Tensor | None = None
    transpose: bool = False
    times: int = 1

    @property
    def whole(self) -> bool:
        """Whether pieces of the source do not do: the scale of a row is made from all of it."""
        return self.transpose and self.scale is not None


def clear(targets: Iterable[Target]) -> None:
    """Zeros, where rows are picked: not all of them need be in the source."""
    for target in targets:
        if target.rows is not None:
            own = slice(target.first, target.first + len(target.rows))
            target.parameter[own].zero_()
            if target.scale is not None:
                target.scale[own].zero_()


def place(target: Target, first: int, piece: Tensor) -> None:
    """Rows first, first + 1, .. of a source."""
    if target.transpose:
        columns, size = piece.t(), piece.shape[1] if target.rows is None else len(target.rows)
        own = target.parameter[target.first : target.first + size, first : first + len(piece)]
        place(Target(own, 0, target.rows), 0, columns)
        return
    parts = [(target.parameter, piece)]
    if target.scale is not None:
        data, scale = quantise_rows(piece.to(target.parameter.device))
        parts = [(target.parameter.view(torch.uint8), data.view(torch.uint8)), (target.scale, scale)]
    for memory, values in parts:
        if target.rows is None:
            own = memory.narrow(0, target.first + first, values.shape[0])
            own.copy_(values if target.times == 1 else values.unsqueeze(1), non_blocking=True)
            continue
        mine = torch.nonzero((target.rows >= first) & (target.rows < first + len(values))).flatten()
        if len(mine):
            here, there = (mine + target.first).to(memory.device), target.rows[mine] - first
            memory[here] = values[there.to(values.device)].to(memory)
