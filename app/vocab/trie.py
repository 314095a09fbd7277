"""The prefix tree of a catalogue in three flat arrays, children as ranges.

Nodes are numbered breadth-first: node 0 is the root, the nodes of depth t are contiguous and in lexicographic order of
their prefix. Edges are in the order of their parents, so edge e leads to node e + 1 and no array of children exists:

    children of node v:  edges first[v] : first[v + 1], codes code[first[v] : first[v + 1]] ascending,
                         nodes first[v] + 1 : first[v + 1] + 1
    root to leaf:        leaf l (in SID order) is node level_start[L] + l

Items are numbered in SID order, with the order of their lines as preference inside one SID, so the items below any node
are a contiguous range of item numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from app.errors import Rejected
from app.vocab.findings import some

Codes = npt.NDArray[np.int32]
Index = npt.NDArray[Any]
"""int32 numbers of nodes, edges or items; int64 only where int32 cannot hold them."""


@dataclass(frozen=True)
class Trie:
    """first [nodes + 1] int32 · code [edges] int32 · level_start [L + 2] int64: the nodes of depth t = 0..L are
    level_start[t] : level_start[t + 1]. nodes = edges + 1. The arrays are shared, never written."""

    first: Index
    code: Codes
    level_start: npt.NDArray[np.int64]

    @property
    def steps(self) -> int:
        """L."""
        return len(self.level_start) - 2

    @property
    def nodes(self) -> int:
        """All prefixes, the empty one included."""
        return len(self.first) - 1

    @cached_property
    def prefixes(self) -> tuple[int, ...]:
        """Nodes of depth 0..L."""
        return tuple(int(count) for count in np.diff(self.level_start))

    @cached_property
    def max_children(self) -> tuple[int, ...]:
        """For each step t = 1..L, the largest number of codes that a prefix of depth t - 1 can be continued with."""
        start = self.level_start
        return tuple(int(np.diff(self.first[start[t] : start[t + 1] + 1]).max(initial=0)) for t in range(self.steps))

    def leaves_below(self, nodes: npt.ArrayLike) -> tuple[Index, Index]:
        """The leaves (0..leaves) under each node, as ranges: (low [n], high [n]) int64. Any depth, root to leaf."""
        low = np.asarray(nodes, np.int64)
        high = low + 1
        leaf = int(self.level_start[self.steps])
        for _ in range(self.steps):
            inner = low < leaf
            if not inner.any():
                break
            low, high = np.where(inner, self.first[low] + 1, low), np.where(inner, self.first[high] + 1, high)
        return low - leaf, high - leaf

    def step(self, nodes: npt.ArrayLike, codes: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The child of each node under each code, -1 where there is none (or the node is -1). int64 [n]."""
        node, want = np.broadcast_arrays(np.asarray(nodes, np.int64), np.asarray(codes, np.int64))
        if not len(self.code):
            return np.full(node.shape, -1, np.int64)
        known, last = np.maximum(node, 0), len(self.code) - 1
        low, end = self.first[known].astype(np.int64), self.first[known + 1].astype(np.int64)
        high = end
        for _ in range(int((high - low).max(initial=0)).bit_length()):
            middle = (low + high) >> 1
            below = (self.code[np.minimum(middle, last)] < want) & (low < high)
            low, high = np.where(below, middle + 1, low), np.where(below, high, middle)
        found = (node >= 0) & (low < end) & (self.code[np.minimum(low, last)] == want)
        return np.where(found, low + 1, -1)


def build_trie(
    codes: npt.ArrayLike, sizes: Sequence[int], between: Callable[[], None] = lambda: None
) -> tuple[Trie, Index, Index]:
    """Sort the SIDs of a catalogue and lay out their tree.

    codes  [n, L] integers; the row order is the order of preference among items of one SID
    sizes  C_1..C_L · between: called between array operations
    Returns the trie, order [n] (item number -> row) and leaf_items [leaves + 1]: leaf l holds the items
    leaf_items[l] : leaf_items[l + 1]. Both int32 unless they cannot fit. O(n log n) time, no object per item.
    Raises Rejected with the row for a wrong number of steps or a code that its step does not have.
    """
    table = np.asarray(codes)
    check_codes(table, sizes)
    between()
    order = sid_order(table, sizes)
    ordered = table if order is None else table[order]
    rows = len(table)
    index = np.dtype(np.int32) if rows * len(sizes) + 1 < 2**31 else np.dtype(np.int64)
    trie, leaf_items = _layout(ordered, index, between)
    return trie, (np.arange(rows, dtype=index) if order is None else order.astype(index, copy=False)), leaf_items


def check_codes(table: npt.NDArray[Any], sizes: Sequence[int]) -> None:
    """Raise Rejected, with a finding a row and step, where rows are no SIDs of these sizes."""
    if table.ndim != 2 or table.dtype.kind not in "iu":
        raise Rejected("codes_shape", f"SIDs must be integers [items, {len(sizes)}], got {table.dtype} {table.shape}")
    if table.shape[1] != len(sizes):
        raise Rejected("sid_length", f"{table.shape[1]} codes an SID; the deployment has {len(sizes)} steps")
    found: list[Rejected] = []
    for step, size in enumerate(sizes):
        column = table[:, step]
        if len(column) and (column.min() < 0 or column.max() >= size):
            found += some(np.flatnonzero((column < 0) | (column >= size)), partial(_out_of_range, column, step, size))
    if found:
        raise Rejected.together(found)


def _out_of_range(column: npt.NDArray[Any], step: int, size: int, row: int) -> Rejected:
    return code_out_of_range(int(column[row]), step, size, f"row {row}")


def code_out_of_range(code: int, step: int, size: int, place: str) -> Rejected:
    """The refusal of a code; `step` counts from 0, the message from 1 (as everywhere else)."""
    return Rejected(
        "code_out_of_range",
        f"sid[{step}] = {code}, but step {step + 1} has {size} codes (0..{size - 1}, counted from 0 inside each step)",
        location=place,
    )


def sid_order(table: npt.NDArray[Any], sizes: Sequence[int]) -> npt.NDArray[np.int64] | None:
    """The stable order that sorts the rows by SID, None where they are sorted already."""
    widths = [max(size - 1, 1).bit_length() for size in sizes]
    if sum(widths) > 63:
        order = np.lexsort(tuple(table[:, step] for step in reversed(range(len(sizes)))))
        return None if (np.diff(order) == 1).all() else order
    key = np.zeros(len(table), np.int64)
    for step, width in enumerate(widths):
        key <<= width
        key |= table[:, step]
    if not (key[1:] < key[:-1]).any():
        return None
    bits = max(len(table) - 1, 1).bit_length()
    if sum(widths) + bits > 63:
        return np.argsort(key, kind="stable")
    # SID and row in one number: sorting numbers in place needs no index array and is stable by construction
    key <<= bits
    key |= np.arange(len(table))
    key.sort()
    key &= (1 << bits) - 1
    return key


def _layout(ordered: npt.NDArray[Any], index: np.dtype[Any], between: Callable[[], None]) -> tuple[Trie, Index]:
    """Nodes level by level from sorted SIDs: a row starts a node of depth t where one of its first t codes is new."""
    rows, steps = ordered.shape
    if rows == 0:
        empty = Trie(np.zeros(2, index), np.zeros(0, np.int32), np.array([0] + [1] * (steps + 1), np.int64))
        return empty, np.zeros(1, index)
    new = np.zeros(rows, bool)
    new[0] = True
    starts = np.zeros(1, np.int64)
    first: list[Index] = []
    code: list[Codes] = []
    level_start = [0, 1]
    for step in range(steps):
        between()
        deeper = new.copy()
        deeper[1:] |= ordered[1:, step] != ordered[:-1, step]
        below = np.flatnonzero(deeper)
        edges = level_start[-1] - 1
        begins = np.flatnonzero(new[below])  # the first child of every node of depth `step`
        first.append((begins + edges).astype(index))
        code.append(ordered[below, step].astype(np.int32))
        level_start.append(level_start[-1] + len(below))
        new, starts = deeper, below
    between()
    leaves, edges = len(starts), level_start[-1] - 1
    first.append(np.full(leaves + 1, edges, index))
    leaf_items = np.append(starts, rows).astype(index)
    trie = Trie(np.concatenate(first), np.concatenate(code), np.array(level_start, np.int64))
    return trie, leaf_items
