"""What a vocabulary knows of its items, as columns: ids, texts, numbers. No Python object per item."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[Any]
BLOCK = 1 << 16
"""Strings handled at a time where Python objects are needed."""
MAX_ID = 512
"""Bytes of the longest item id."""


@dataclass(frozen=True, slots=True)
class Strings:
    """n UTF-8 strings end to end: string i is text[start[i] : start[i + 1]]. text [bytes] uint8, start [n + 1]."""

    text: npt.NDArray[np.uint8]
    start: Index

    def __len__(self) -> int:
        return len(self.start) - 1

    def raw(self, i: int) -> bytes:
        """The bytes of one string."""
        return self.text[int(self.start[i]) : int(self.start[i + 1])].tobytes()

    def get(self, i: int) -> str:
        """One string."""
        return self.raw(i).decode()

    def many(self, items: npt.NDArray[np.int64]) -> list[str]:
        """Some strings, by numbers that are not below 0."""
        bounds = zip(self.start[items].tolist(), self.start[items + 1].tolist(), strict=True)
        text = self.text.data
        return [str(text[low:high], "utf-8") for low, high in bounds]

    def blocks(self) -> Iterator[list[bytes]]:
        """All strings in order, some thousands at a time."""
        for begin in range(0, len(self), BLOCK):
            bounds = self.start[begin : begin + BLOCK + 1].astype(np.int64)
            text = self.text[bounds[0] : bounds[-1]].tobytes()
            cuts = (bounds - bounds[0]).tolist()
            yield [text[low:high] for low, high in pairwise(cuts)]

    def take(self, order: Index) -> Strings:
        """The strings `order` [m], in that order."""
        length = self.start[order + 1] - self.start[order]
        start = np.zeros(len(order) + 1, np.int64)
        np.cumsum(length, out=start[1:])
        text = np.empty(int(start[-1]), np.uint8)
        for begin in range(0, len(order), BLOCK):  # in blocks: the gather needs 16 bytes of index a byte of text
            part = slice(begin, min(begin + BLOCK, len(order)))
            low, high = int(start[part.start]), int(start[part.stop])
            shift = self.start[order[part]].astype(np.int64) - start[part]
            text[low:high] = self.text[np.repeat(shift, length[part]) + np.arange(low, high)]
        return Strings(text, compact(start))

    @classmethod
    def of(cls, strings: Sequence[bytes]) -> Strings:
        """From a few Python strings."""
        start = np.zeros(len(strings) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, strings), np.int64, len(strings)), out=start[1:])
        return cls(np.frombuffer(b"".join(strings), np.uint8), compact(start))


def compact(start: npt.NDArray[np.int64]) -> Index:
    """The same ascending numbers as int32 where they fit."""
    return start.astype(np.int32) if start[-1] < 2**31 else start


_LENGTH, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
STEPS = 6
"""Places behind an edge that are looked at one by one: few searches go further."""
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)


def hash_strings(strings: Strings) -> npt.NDArray[np.int64]:
    """A 64-bit hash of every string [n]: eight bytes at a time, mixed as splitmix64 does.

    Array operations on blocks, no Python object a string: hashing a catalogue holds the interpreter for moments only.
    """
    hashes = np.empty(len(strings), np.uint64)
    for begin in range(0, len(strings), BLOCK):
        start = strings.start[begin : begin + BLOCK + 1].astype(np.int64)
        text = np.zeros(int(start[-1] - start[0]) + 8, np.uint8)
        text[:-8] = strings.text[start[0] : start[-1]]
        words = np.ndarray((len(text) - 7,), "<u8", text.data, strides=(1,))  # the eight bytes from every place on
        left = np.diff(start)
        mixed, place = left.astype(np.uint64) * _LENGTH, start[:-1] - start[0]
        rows: Index | slice = slice(None)
        while len(left):
            mixed[rows] = _mix(mixed[rows] ^ (words[place] & _MASKS[np.minimum(left, 8)]))
            more = np.flatnonzero(left > 8)
            rows = more if isinstance(rows, slice) else rows[more]
            left, place = left[more] - 8, place[more] + 8
        hashes[begin : begin + len(mixed)] = mixed
    return hashes.view(np.int64)


def _stable_order(numbers: npt.NDArray[np.int64], between: Callable[[], None]) -> npt.NDArray[np.int64]:
    """As `np.argsort(numbers, kind="stable")`, in two thirds of its time where they are spread evenly: they are sorted
    with their places in the low bits; then they are almost in order, and a stable sort has little left to do."""
    bits = max(len(numbers) - 1, 1).bit_length()
    key = numbers >> bits
    key <<= bits
    key |= np.arange(len(numbers))
    key.sort()
    key &= (1 << bits) - 1
    between()
    return key[np.argsort(numbers[key], kind="stable")]


def _mix(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    word = (word ^ (word >> np.uint64(30))) * _FIRST
    word = (word ^ (word >> np.uint64(27))) * _SECOND
    return word ^ (word >> np.uint64(31))


def _given(ids: Sequence[str]) -> Strings:
    """A request's ids. Surrogates cannot be in a UTF-8 table: encoded this way they are simply unknown."""
    together = "".join(ids)
    if not together.isascii():
        return Strings.of([name.encode("utf-8", "surrogatepass") for name in ids])
    start = np.zeros(len(ids) + 1, np.int64)  # a character is a byte
    np.cumsum(np.fromiter(map(len, ids), np.int64, len(ids)), out=start[1:])
    return Strings(np.frombuffer(together.encode("ascii"), np.uint8), start)


@dataclass(frozen=True, slots=True)
class Ids:
    """Item ids, byte for byte ("007" and "7" are two items), found through sorted 64-bit hashes.

    hashes [n] int64 ascending, by_hash [n] the items in that order. A hash only narrows the search, the bytes decide,
    so no collision can change an answer. edges [2^b, about n]: where the hashes begin whose first b bits are so large:
    a search begins there, about one place from its end, and reads three lines of memory where halving reads twenty.
    """

    strings: Strings
    hashes: npt.NDArray[np.int64]
    by_hash: Index
    edges: Index
    hash_of: Callable[[Strings], npt.NDArray[np.int64]]

    @classmethod
    def build(
        cls,
        strings: Strings,
        hash_of: Callable[[Strings], npt.NDArray[np.int64]] = hash_strings,
        between: Callable[[], None] = lambda: None,
    ) -> Ids:
        """Hash and sort; nobody else in the process waits for it. between: called between array operations."""
        hashes = np.empty(len(strings), np.int64)
        for begin in range(0, len(strings), BLOCK):
            between()
            hashes[begin : begin + BLOCK] = hash_of(Strings(strings.text, strings.start[begin : begin + BLOCK + 1]))
        between()
        by_hash = _stable_order(hashes, between)
        hashes = hashes[by_hash]
        between()
        kind = np.int32 if len(strings) < 2**31 else np.int64
        bits = max(1, len(strings).bit_length() - 1)
        low = np.arange(-(1 << bits - 1), 1 << bits - 1) << (64 - bits)
        edges = np.searchsorted(hashes, low).astype(kind)
        between()
        return cls(strings, hashes, by_hash.astype(kind), edges, hash_of)

    def duplicate(self) -> tuple[int, int] | None:
        """Two numbers of one id, lower first; None where all differ."""
        return next(self.duplicates(), None)

    def duplicates(self) -> Iterator[tuple[int, int]]:
        """Every number whose id another one has, with the lowest of these in front."""
        equal = np.flatnonzero(self.hashes[1:] == self.hashes[:-1])
        seen: dict[bytes, int] = {}
        for place in np.union1d(equal, equal + 1).tolist():
            item = int(self.by_hash[place])
            first = seen.setdefault(self.strings.raw(item), item)  # of one hash the lower number comes first
            if first != item:
                yield first, item

    def find(self, ids: Sequence[str]) -> npt.NDArray[np.int64]:
        """Item numbers [n] int64, -1 = unknown."""
        found = np.full(len(ids), -1, np.int64)
        if not len(self.hashes) or not ids:
            return found
        given = _given(ids)
        keys = self.hash_of(given)
        place = self._place(keys)
        hit = np.flatnonzero(self.hashes[np.minimum(place, len(self.hashes) - 1)] == keys)
        items = self.by_hash[place[hit]]
        same = self._same(items, given, hit)
        found[hit[same]] = items[same]
        for i in hit[~same].tolist():
            found[i] = self._after_collision(int(place[i]), int(keys[i]), given.raw(i))
        return found

    def _place(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where the first hash that is not below a key stands [m]: `searchsorted`, some steps behind an edge.

        Where hashes are not spread evenly, which only a poor `hash_of` does, the search is by halves after a few steps.
        """
        bits, last = len(self.edges).bit_length() - 1, len(self.hashes) - 1
        near = self.edges[(keys >> np.int64(64 - bits)) + (len(self.edges) >> 1)]
        place: npt.NDArray[np.int64] = near.astype(np.int64)
        left = np.flatnonzero((place <= last) & (self.hashes[np.minimum(place, last)] < keys))
        for _ in range(STEPS):
            if not len(left):
                return place
            place[left] += 1
            at = place[left]
            left = left[(at <= last) & (self.hashes[np.minimum(at, last)] < keys[left])]
        place[left] = np.searchsorted(self.hashes, keys[left])
        return place

    def _same(self, items: Index, given: Strings, hit: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether the ids of items [n] are given[hit], byte for byte."""
        own, asked = self.strings.take(items), given if len(hit) == len(given) else given.take(hit)
        if np.array_equal(own.start, asked.start) and np.array_equal(own.text, asked.text):
            return np.ones(len(hit), np.bool_)
        return np.array([own.raw(i) == asked.raw(i) for i in range(len(hit))], np.bool_)  # a hash that two ids have

    def _after_collision(self, place: int, key: int, raw: bytes) -> int:
        """Look among the other items with this hash."""
        while place < len(self.hashes) and self.hashes[place] == key:
            item = int(self.by_hash[place])
            if self.strings.raw(item) == raw:
                return item
            place += 1
        return -1


class Numbers(NamedTuple):
    """A numeric attribute: values [n] float32 (0 where absent), present [n] bool."""

    values: npt.NDArray[np.float32]
    present: npt.NDArray[np.bool_]


class Texts(NamedTuple):
    """A text attribute: codes [n] int32 into `words`, -1 = absent."""

    codes: npt.NDArray[np.int32]
    words: Strings


Column = Numbers | Texts
Columns = Mapping[str, Column]


def take_column(column: Column, order: Index) -> Column:
    """The column of the items `order`, in that order."""
    if isinstance(column, Texts):
        return Texts(column.codes[order], column.words)
    return Numbers(column.values[order], column.present[order])


class Table(NamedTuple):
    """A catalogue in any item order: ids and codes [n, L] int32 of its items, attributes by name."""

    ids: Strings
    codes: npt.NDArray[np.int32]
    columns: Columns
