"""What a vocabulary knows of its items, as columns: ids, texts, numbers. No Python object per item."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

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

    def many(self, items: Iterable[int]) -> list[str]:
        """Some strings, by numbers that are not below 0."""
        text, start = self.text.data, self.start.data
        return [str(text[start[i] : start[i + 1]], "utf-8") for i in items]

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


def _crc_tables() -> npt.NDArray[np.uint32]:
    """tables [8, 256]: what a byte makes of a CRC-32 that is otherwise 0, with so many more bytes behind it."""
    tables = np.zeros((8, 256), np.uint32)
    tables[0] = np.arange(256)
    for _ in range(8):
        tables[0] = tables[0] >> 1 ^ 0xEDB88320 * (tables[0] & 1)
    for more in range(1, 8):
        tables[more] = tables[more - 1] >> 8 ^ tables[0][tables[more - 1] & 255]
    return tables


def _crc_starts(table: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """starts [8]: from which so many zero bytes lead to the state that a CRC-32 begins with."""
    starts = [0xFFFFFFFF]
    undone = {int(word) >> 24: byte for byte, word in enumerate(table)}
    for _ in range(7):
        byte = undone[starts[-1] >> 24]
        starts.append((starts[-1] ^ int(table[byte])) << 8 | byte)
    return np.array(starts, np.uint32)


_TABLES = _crc_tables()
_STARTS = _crc_starts(_TABLES[0])
_KEPT = np.array([(1 << 64) - (1 << 8 * zeros) for zeros in range(8)], np.uint64)


def hash_strings(strings: Strings) -> npt.NDArray[np.uint32]:
    """The CRC-32 of every string [n], as `zlib.crc32` gives it of one: eight bytes at a time, zeros in front of the
    first ones.

    Array operations on blocks, no Python object a string: hashing a catalogue holds the interpreter for moments only.
    """
    hashes = np.empty(len(strings), np.uint32)
    for begin in range(0, len(strings), BLOCK):
        start = strings.start[begin : begin + BLOCK + 1].astype(np.int64)
        text = np.zeros(8 + int(start[-1] - start[0]), np.uint8)
        text[8:] = strings.text[start[0] : start[-1]]
        words = np.ndarray((len(text) - 7,), "<u8", text.data, strides=(1,))  # the eight bytes from every place on
        length = np.diff(start)
        zeros = -length & 7
        place, end = start[:-1] - start[0] + 8 - zeros, start[1:] - start[0] + 8
        state, rows = _STARTS[zeros], np.flatnonzero(length)
        word = words[place[rows]] & _KEPT[zeros[rows]]
        while len(rows):
            state[rows] = _crc_of(word ^ state[rows])
            place[rows] += 8
            rows = rows[place[rows] < end[rows]]
            word = words[place[rows]]
        hashes[begin : begin + len(state)] = ~state
    return hashes


def _crc_of(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """The state after eight bytes [n], their first four with the state before them."""
    byte = word.view(np.uint8).reshape(-1, 8)
    state: npt.NDArray[np.uint32] = _TABLES[7][byte[:, 0]]
    for place in range(1, 8):
        state ^= _TABLES[7 - place][byte[:, place]]
    return state


WINDOW = 8
"""Places from an edge on that are looked at together: hardly any search goes further."""
_BEHIND = np.arange(WINDOW, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Ids:
    """Item ids, byte for byte ("007" and "7" are two items), found through their sorted hashes.

    hashes [n] uint32 ascending, by_hash [n] the items in that order, `WINDOW` more of both behind them. A hash only
    narrows the search, the bytes decide, so no collision can change an answer. edges [2^b, about n]: where the hashes
    begin whose first b bits are so large; a search begins there, and most of them end there.
    """

    strings: Strings
    hashes: npt.NDArray[np.uint32]
    by_hash: Index
    edges: Index

    @classmethod
    def build(cls, strings: Strings, between: Callable[[], None] = lambda: None) -> Ids:
        """Hash and sort less than 2^32 ids; nobody else in the process waits for it. between: called between array
        operations."""
        count = len(strings)
        key = np.empty(count, np.uint64)
        for begin in range(0, count, BLOCK):
            between()
            key[begin : begin + BLOCK] = hash_strings(Strings(strings.text, strings.start[begin : begin + BLOCK + 1]))
        between()
        key <<= 32
        key |= np.arange(count, dtype=np.uint64)
        between()
        key.sort()  # of one hash the lower number comes first
        between()
        hashes = np.zeros(count + WINDOW, np.uint32)
        hashes[:count] = key >> 32
        by_hash = np.zeros(count + WINDOW, np.int32 if count < 2**31 else np.int64)
        by_hash[:count] = key & 0xFFFFFFFF
        between()
        bits = max(1, count.bit_length() - 1)
        low = np.arange(1 << bits, dtype=np.uint32) << (32 - bits)
        edges = np.searchsorted(hashes[:count], low).astype(by_hash.dtype)
        between()
        return cls(strings, hashes, by_hash, edges)

    def duplicate(self) -> tuple[int, int] | None:
        """Two numbers of one id, lower first; None where all differ."""
        return next(self.duplicates(), None)

    def duplicates(self) -> Iterator[tuple[int, int]]:
        """Every number whose id another one has, with the lowest of these in front."""
        hashes = self.hashes[: len(self.strings)]
        equal = np.flatnonzero(hashes[1:] == hashes[:-1])
        seen: dict[bytes, int] = {}
        for place in np.union1d(equal, equal + 1).tolist():
            item = int(self.by_hash[place])
            first = seen.setdefault(self.strings.raw(item), item)  # of one hash the lower number comes first
            if first != item:
                yield first, item

    def find(self, ids: Sequence[str]) -> npt.NDArray[np.int64]:
        """Item numbers [n] int64, -1 = unknown."""
        if not len(self.strings) or not ids:
            return np.full(len(ids), -1, np.int64)
        # surrogates cannot be in a UTF-8 table: encoded this way they are simply unknown
        raw = [name.encode("utf-8", "surrogatepass") for name in ids]
        hashes = np.array([crc32(one) for one in raw], np.uint32)
        edge = self.edges.take(hashes >> (33 - len(self.edges).bit_length()))
        behind = (self.hashes.take(edge[:, None] + _BEHIND) == hashes[:, None]).argmax(1)
        items: npt.NDArray[np.int64] = self.by_hash.take(edge + behind).astype(np.int64)
        start, text = self.strings.start, self.strings.text.data
        given = zip(start.take(items).tolist(), start.take(items + 1).tolist(), raw, strict=True)
        for i in [i for i, (low, high, one) in enumerate(given) if text[low:high] != one]:
            items[i] = self._search(int(edge[i]), int(hashes[i]), raw[i])
        return items

    def _search(self, place: int, hash_: int, raw: bytes) -> int:
        """The item of an id among those with its hash, which begin at a place or behind it; -1 = unknown."""
        while place < len(self.strings) and self.hashes[place] <= hash_:
            item = int(self.by_hash[place])
            if self.hashes[place] == hash_ and self.strings.raw(item) == raw:
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
