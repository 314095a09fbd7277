"""What was asked lately of one catalogue: most ids of most requests have been asked for before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

MOST = 1 << 16
"""Ids that are kept; then it begins anew."""
LONGEST = 128
"""Characters of the longest id that is kept."""


class Recent:
    """Ids with their item numbers, -1 = unknown: those that were asked for since it last began, `MOST` and one
    request's at most: 8 MB of ids of twelve characters, some 45 at worst.

    In any thread: an id has one number, whoever looks it up.
    """

    def __init__(self, look_up: Callable[[Sequence[str]], npt.NDArray[np.int64]]) -> None:
        """look_up: item numbers [n] of ids, always the same ones"""
        self._look_up = look_up
        self._known: dict[str, int] = {}

    def __len__(self) -> int:
        """How many ids it keeps."""
        return len(self._known)

    def find(self, ids: Sequence[str]) -> list[int]:
        """Item numbers, -1 = unknown."""
        found = list(map(self._known.get, ids))
        if None in found:
            missing = [i for i, item in enumerate(found) if item is None]
            asked = [ids[i] for i in missing]
            items = self._look_up(asked).tolist()
            for i, item in zip(missing, items, strict=True):
                found[i] = item
            self._keep(asked, items)
        return cast(list[int], found)

    def _keep(self, ids: Sequence[str], items: Sequence[int]) -> None:
        if len(self._known) >= MOST:
            self._known = {}
        if max(map(len, ids)) > LONGEST:
            items = [item for name, item in zip(ids, items, strict=True) if len(name) <= LONGEST]
            ids = [name for name in ids if len(name) <= LONGEST]
        self._known.update(zip(ids, items, strict=True))
