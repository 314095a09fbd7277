"""What was chosen in this process: for a shape's outputs and inputs one algorithm, which serves every number of rows
from some on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch

from app.ops.product.lt import Algorithm

LEAST: Final = 1024
"""Products of fewer rows stay torch's: they are short, and take another algorithm than long ones."""


class Key(NamedTuple):
    """Products that share an algorithm: by a matrix [m, k], both operands of `dtype`. onto: added to what is there."""

    device: int
    dtype: torch.dtype
    m: int
    k: int
    onto: bool


class Chosen(NamedTuple):
    """An algorithm, and the rows from which on it is the quicker one. None: torch's stay."""

    algorithm: Algorithm | None
    rows: int = LEAST


class Table:
    """Written while nothing is served, read by whoever multiplies."""

    def __init__(self) -> None:
        self._chosen: dict[Key, Chosen] = {}
        self._wanted: dict[Key, int] | None = None

    def find(self, key: Key, rows: int) -> Algorithm | None:
        """The algorithm for a product of some rows; None where torch multiplies."""
        chosen = self._chosen.get(key)
        if chosen is None:
            wanted = self._wanted  # whoever notes may end meanwhile
            if wanted is not None and rows >= LEAST:
                wanted[key] = max(rows, wanted.get(key, 0))
            return None
        return chosen.algorithm if rows >= chosen.rows else None

    def put(self, key: Key, chosen: Chosen) -> None:
        """From now on it is this one."""
        self._chosen[key] = chosen

    @contextmanager
    def noting(self) -> Iterator[dict[Key, int]]:
        """What is multiplied meanwhile without having been chosen for, with the most rows of each."""
        wanted = self._wanted = {}
        try:
            yield wanted
        finally:
            self._wanted = None


TABLE: Final = Table()
"""This process's."""
