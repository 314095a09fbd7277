"""A vocabulary ready to serve: the trie of a catalogue and its items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from app.errors import Rejected
from app.vocab.findings import MOST, some
from app.vocab.items import Columns, Ids, Table, take_column
from app.vocab.recent import Recent
from app.vocab.trie import Trie, build_trie

Numbers64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Vocab:
    """One immutable version of a catalogue. It owns its memory and never maps the artifact: a file that is overwritten
    or cut cannot reach it.

    Items are numbers 0..n-1 in SID order, preference inside one SID first to last.

    codes       [n, L] int32, the SID of each item
    leaf_items  [leaves + 1]: leaf l holds the items leaf_items[l] : leaf_items[l + 1]
    leaf_of     [n], the leaf of each item
    parent      [nodes], the node above each node; 0 for the root
    attributes  columns over item numbers by name
    recent      what was asked lately of `names`
    """

    version: str
    digest: str
    sizes: tuple[int, ...]
    trie: Trie
    codes: npt.NDArray[np.int32]
    leaf_items: npt.NDArray[Any]
    leaf_of: npt.NDArray[Any]
    parent: npt.NDArray[Any]
    names: Ids
    attributes: Columns
    recent: Recent

    def __len__(self) -> int:
        return len(self.codes)

    def find(self, ids: Sequence[str]) -> Numbers64:
        """Item numbers [n] int64 of ids, byte for byte; -1 = unknown."""
        return self.names.find(ids)

    def known(self, ids: Sequence[str]) -> tuple[Numbers64, int]:
        """Item numbers [m] int64 of those of a request's ids that are items, in their order, and how many are not."""
        found = self.recent.find(ids)
        unknown = found.count(-1)
        return np.array([item for item in found if item >= 0] if unknown else found, np.int64), unknown

    def sids(self, items: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """The SIDs [n, L] int32 of items. Raises IndexError for a number that is no item (-1 included)."""
        numbers = np.asarray(items, np.int64)
        if len(numbers) and numbers.min() < 0:
            raise IndexError(f"{numbers.min()} is no item number")
        return self.codes.take(numbers, axis=0)

    def id(self, item: int) -> str:
        """The id of one item."""
        if not 0 <= item < len(self):
            raise IndexError(f"{item} is no item number")
        return self.names.strings.get(item)

    def ids(self, items: npt.ArrayLike) -> list[str]:
        """The ids of items. Raises IndexError for a number that is no item."""
        numbers = np.asarray(items, np.int64).tolist()
        if min(numbers, default=0) < 0:
            raise IndexError(f"{min(numbers)} is no item number")
        return self.names.strings.many(numbers)

    def leaf_range(self, leaves: npt.ArrayLike) -> tuple[Numbers64, Numbers64]:
        """The items of leaves (numbers 0..leaves-1 = node - level_start[L]) as ranges (low [n], high [n]) int64."""
        leaf = np.asarray(leaves, np.int64)
        return self.leaf_items[leaf].astype(np.int64), self.leaf_items[leaf + 1].astype(np.int64)

    def items_below(self, nodes: npt.ArrayLike) -> tuple[Numbers64, Numbers64]:
        """The items below trie nodes of any depth as ranges (low [n], high [n]) int64."""
        low, high = self.trie.leaves_below(nodes)
        return self.leaf_items[low].astype(np.int64), self.leaf_items[high].astype(np.int64)

    def step(self, nodes: npt.ArrayLike, codes: npt.ArrayLike) -> Numbers64:
        """The child nodes [n] int64 of nodes under codes; -1 = no prefix of the catalogue."""
        return self.trie.step(nodes, codes)

    def dead(self, items: npt.ArrayLike) -> tuple[Numbers64, ...]:
        """What excluding a set of items kills (policy-language V24, prefix exhaustion).

        items [m] item numbers in any order, repeats and -1 allowed. Returns L ascending int64 arrays: element t - 1 has
        the nodes of depth t all of whose items are in the set.
        """
        # gathers through two arrays of parents: on 10 M items, searching the ranges instead takes three times as long
        chosen = np.sort(np.asarray(items, np.int64).ravel())
        chosen = _distinct(chosen[np.searchsorted(chosen, 0) :])[0]
        leaf_start = self.trie.level_start[-2]
        leaves, count = _distinct(self.leaf_of[chosen])
        nodes = leaves[count == self.leaf_items[leaves + 1] - self.leaf_items[leaves]] + leaf_start
        levels = [nodes]
        while len(levels) < self.trie.steps:
            if len(nodes):  # nothing dead below, nothing dead above
                parents, count = _distinct(self.parent[nodes])
                nodes = parents[count == self.trie.first[parents + 1] - self.trie.first[parents]].astype(np.int64)
            levels.append(nodes)
        return tuple(reversed(levels))


def _distinct(ordered: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Numbers64]:
    """The different values of a sorted array and how often each occurs."""
    begin = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(ordered)])
    return ordered[begin], np.diff(begin, append=len(ordered))


def _ranges(start: npt.NDArray[Any], total: int) -> npt.NDArray[Any]:
    """Which range each of the places 0..total-1 lies in: range i begins at start[i], and none is empty.

    As `np.repeat` over the ranges' lengths, which would hold the interpreter for as long as it takes.
    """
    found = np.zeros(total, start.dtype)
    if total:
        found[start[1:]] = 1
        np.cumsum(found, dtype=found.dtype, out=found)  # casting, it would hold the interpreter as well
    return found


def arrange(table: Table, sizes: Sequence[int]) -> Table:
    """The table in item order: by SID, its own order as preference inside one SID.

    Raises Rejected with the row for codes that are out of range.
    """
    _, order, _ = build_trie(table.codes, sizes)
    columns = {name: take_column(column, order) for name, column in table.columns.items()}
    return Table(table.ids.take(order), table.codes[order], columns)


def make_vocab(
    table: Table,
    sizes: Sequence[int],
    *,
    version: str = "",
    digest: str = "",
    between: Callable[[], None] = lambda: None,
) -> Vocab:
    """A vocabulary from a table in item order (see `arrange`). between: called between array operations.

    Raises Rejected for codes out of range, SIDs out of order and ids given twice: a finding an item, with its number
    as its row.
    """
    trie, order, leaf_items = build_trie(table.codes, sizes, between)
    between()
    names = Ids.build(table.ids, between=between)
    found = [*_out_of_order(order), *duplicates(names)]
    if found:
        raise Rejected.together(found)
    between()
    leaf_of = _ranges(leaf_items[:-1], len(table.codes))
    between()
    parent = np.zeros(trie.nodes, leaf_items.dtype)
    parent[1:] = _ranges(trie.first[: trie.level_start[-2]], len(trie.code))
    return Vocab(
        version, digest, tuple(sizes), trie, table.codes, leaf_items, leaf_of, parent, names, dict(table.columns),
        Recent(names.find),
    )  # fmt: skip


def _out_of_order(order: npt.NDArray[Any]) -> list[Rejected]:
    """Rows that another one should stand in the place of."""
    wrong = np.flatnonzero(order != np.arange(len(order)))
    return some(wrong, lambda row: Rejected("not_in_sid_order", "items are not in SID order", location=f"row {row}"))


def duplicates(names: Ids) -> list[Rejected]:
    """What to say of ids that are given twice."""

    def say(pair: tuple[int, int]) -> Rejected:
        first, second = pair
        message = f"id {names.strings.get(first)!r} is also in row {first}"
        return Rejected("duplicate_id", message, location=f"row {second}")

    return some(sorted(islice(names.duplicates(), MOST + 1), key=itemgetter(1)), say)
