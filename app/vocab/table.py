"""From a catalogue file to a table, in blocks: the items of a block are Python objects, those of the table are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from app.config import SidConfig
from app.errors import Rejected
from app.vocab.formats import FORMATS
from app.vocab.formats.source import Attribute, Attributes, Block, Format, Source
from app.vocab.items import MAX_ID, Column, Ids, Numbers, Strings, Table, Texts, compact
from app.vocab.trie import code_out_of_range
from app.vocab.vocab import arrange

EXACT = 2**24
"""Integers up to here are float32 values."""
MAX_ATTRIBUTES = 256
"""Columns are dense; more names than this are a mistake."""
TOO_LARGE = (2 - 2**-24) * 2.0**127
"""From here on, rounding to float32 gives infinity."""


def read_table(name: str, source: Source) -> Table:
    """Read a catalogue in the format `name` of FORMATS; the table comes in item order.

    Raises Rejected (location "file: line 812") for whatever is wrong with the file: see the formats, and here codes out
    of range, ids of no or more than 512 bytes or given twice (with both places), attributes of changing type, no items.
    """
    growing = _Growing(source, FORMATS[name])
    for block in FORMATS[name].read(source):
        growing.add(block)
    return arrange(growing.table(), source.sid.sizes)


def table_of(ids: Sequence[str], codes: npt.NDArray[np.int32], path: Path, sizes: Sequence[int]) -> Table:
    """A table in item order from ids and their SIDs [n, L]; `path` names the file of row i in refusals (see above)."""
    source = Source(path, SidConfig(sizes=tuple(sizes)))
    growing = _Growing(source, FORMATS["npy"])
    growing.add(Block(ids, codes))
    return arrange(growing.table(), sizes)


class _Part(NamedTuple):
    """The values of one attribute for some rows from `row` on."""

    row: int
    values: npt.NDArray[np.float32] | npt.NDArray[np.int32]
    present: npt.NDArray[np.bool_]


class _GrowingColumn:
    """One attribute; its first value decides whether it is text or number."""

    def __init__(self, kind: Literal["text", "number"]) -> None:
        self.kind = kind
        self._parts: list[_Part] = []
        self._words: dict[str, int] = {}

    def add(self, row: int, count: int, rows: Sequence[int], values: Sequence[Attribute]) -> None:
        present = np.zeros(count, bool)
        present[rows] = True
        if self.kind == "text":
            codes = np.full(count, -1, np.int32)
            words = self._words
            codes[rows] = [words.setdefault(value, len(words)) for value in cast(Sequence[str], values)]
            self._parts.append(_Part(row, codes, present))
        else:
            numbers = np.zeros(count, np.float32)
            numbers[rows] = values
            self._parts.append(_Part(row, numbers, present))

    def column(self, items: int) -> Column:
        codes, numbers, present = np.full(items, -1, np.int32), np.zeros(items, np.float32), np.zeros(items, bool)
        for part in self._parts:
            rows = slice(part.row, part.row + len(part.values))
            (codes if self.kind == "text" else numbers)[rows] = part.values
            present[rows] = part.present
        if self.kind == "number":
            return Numbers(numbers, present)
        return Texts(codes, Strings.of([word.encode() for word in self._words]))


class _Growing:
    """The table so far."""

    def __init__(self, source: Source, format_: Format) -> None:
        self._source, self._format = source, format_
        self._text: list[bytes] = []
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._codes: list[npt.NDArray[np.int32]] = []
        self._columns: dict[str, _GrowingColumn] = {}
        self._rows = 0

    def add(self, block: Block) -> None:
        self._add_codes(block)
        self._add_ids(block.ids)
        if block.attributes is not None:
            self._add_attributes(block.attributes)
        self._rows += len(block.ids)

    def table(self) -> Table:
        if not self._rows:
            raise self._source.refuse("no_items", "the file holds no items")
        start = np.zeros(self._rows + 1, np.int64)
        np.cumsum(np.concatenate(self._lengths), out=start[1:])
        ids = Strings(np.frombuffer(b"".join(self._text), np.uint8), compact(start))
        self._text.clear()
        twice = Ids.build(ids).duplicate()
        if twice:
            first, second = (self._format.place(row) for row in twice)
            raise self._source.refuse("duplicate_id", f"id {ids.get(twice[0])!r} is also that of {first}", second)
        columns = {name: self._columns[name].column(self._rows) for name in sorted(self._columns)}
        return Table(ids, np.concatenate(self._codes), columns)

    def _refuse(self, code: str, message: str, row: int) -> Rejected:
        return self._source.refuse(code, message, self._format.place(self._rows + row))

    def _add_codes(self, block: Block) -> None:
        for step, size in enumerate(self._source.sid.sizes):
            column = block.codes[:, step]
            wrong = (column < 0) | (column >= size)
            if wrong.any():
                row = int(np.argmax(wrong))
                place = f"{self._source.path.name}: {self._format.place(self._rows + row)}"
                raise code_out_of_range(int(column[row]), step, size, place)
        self._codes.append(block.codes.astype(np.int32))

    def _add_ids(self, ids: Sequence[str]) -> None:
        raw = [name.encode() for name in ids]  # no reader lets half of a surrogate pair through
        lengths = np.fromiter(map(len, raw), np.int32, len(raw))
        wrong = (lengths < 1) | (lengths > MAX_ID)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise self._refuse("bad_id", f"the id has {lengths[row]} bytes; 1 to {MAX_ID} are possible", row)
        self._text.append(b"".join(raw))
        self._lengths.append(lengths)

    def _add_attributes(self, attributes: Sequence[Attributes | None]) -> None:
        given = [attrs or {} for attrs in attributes]
        for name in sorted(set().union(*given)):
            all_values = [attrs.get(name) for attrs in given]
            rows = [row for row, value in enumerate(all_values) if value is not None]
            if not rows:
                continue
            values = [all_values[row] for row in rows]
            kind: Literal["text", "number"] = "text" if isinstance(values[0], str) else "number"
            column = self._columns.setdefault(name, _GrowingColumn(kind))
            if len(self._columns) > MAX_ATTRIBUTES:
                raise self._refuse("too_many_attributes", f"more than {MAX_ATTRIBUTES} different attributes", rows[0])
            if not _all_good(column.kind, values):
                self._check_values(name, column.kind, rows, values)
            column.add(self._rows, len(given), rows, values)

    def _check_values(self, name: str, kind: str, rows: Sequence[int], values: Sequence[Attribute]) -> None:
        """Raise Rejected for the first value that cannot be kept."""
        for row, value in zip(rows, values, strict=True):
            if isinstance(value, str) != (kind == "text"):
                found = "text" if isinstance(value, str) else "a number"
                raise self._refuse("attribute_type", f"attribute {name!r} is {found}; above it is a {kind}", row)
            if isinstance(value, int | float) and not _is_float32(value):
                shown = f"{value:.17g}" if isinstance(value, float) else str(value)[:40]
                message = f"attribute {name!r} = {shown} is no 32-bit float: scale it, or write it as text"
                raise self._refuse("bad_attribute", message, row)


def _all_good(kind: str, values: Sequence[Attribute]) -> bool:
    """Whether all values can be kept, quickly; False also where a closer look is needed."""
    types = set(map(type, values))
    if kind == "text":
        return types == {str}
    numbers = cast(Sequence[float], values)
    return types <= {int, float} and max(numbers) <= EXACT and min(numbers) >= -EXACT


def _is_float32(value: float) -> bool:
    """Whether a number can be kept: an integer exactly (it may be a key), a fraction within float32's range."""
    if isinstance(value, int) and -EXACT <= value <= EXACT:
        return True
    if not -TOO_LARGE < value < TOO_LARGE:
        return False
    return not isinstance(value, int) or int(np.float32(value)) == value
