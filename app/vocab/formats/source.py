"""What every format's reader takes and gives, and how it gets at the bytes of a file."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.json import Decoder

from app.config import SidConfig
from app.errors import Rejected

PIECE = 1 << 20
"""Bytes read at a time."""
MAX_RECORD = 64 << 20
"""Bytes of the longest line or object member; a longer one is no catalogue."""

Attribute = str | int | float | None
"""None is the same as an attribute that is not there."""
Attributes = Mapping[str, Attribute]
Place = Callable[[int], str]
"""The place in the file of value i of some values."""
T = TypeVar("T")


class Source(NamedTuple):
    """A file to import.

    sid     the deployment's [sid]
    ids     a second file with the items' ids (`npy`)
    tokens  sid_tokens.json (formats that hold token ids, where `sid` has no token_base)
    """

    path: Path
    sid: SidConfig
    ids: Path | None = None
    tokens: Path | None = None

    @property
    def steps(self) -> int:
        """L."""
        return len(self.sid.sizes)

    def refuse(self, code: str, message: str, place: str | None = None) -> Rejected:
        """The refusal of this file, at a place in it."""
        return Rejected(code, message, location=f"{self.path.name}: {place}" if place else self.path.name)


class Block(NamedTuple):
    """Some items in file order: ids [m], codes [m, L] integers (not yet checked), attributes [m] if there are any."""

    ids: Sequence[str]
    codes: npt.NDArray[Any]
    attributes: Sequence[Attributes | None] | None = None


class Format(NamedTuple):
    """A way to write a catalogue. `unit` is what its rows are called and `first` the number of the first row, so that a
    refusal can say "line 812"."""

    read: Callable[[Source], Iterator[Block]]
    unit: str
    first: int = 1

    def place(self, row: int) -> str:
        """The place of a row (0-based) as a person counts it."""
        return f"{self.unit} {row + self.first}"


def pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file, unpacked where it is gzip (by its first bytes, not its name).

    Raises Rejected for a file that cannot be read or unpacked.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
            while piece := stream.read(PIECE):
                yield piece
    except (OSError, EOFError, zlib.error) as error:
        raise Rejected("file_unreadable", f"cannot be read: {error}", location=path.name) from error


def lines(source: Source) -> Iterator[tuple[int, list[bytes]]]:
    """Some thousand lines at a time, without their ends: (number of the first, 1-based; lines).

    A line ends at a line feed; a missing one after the last line is fine.
    """
    rest, number = b"", 1
    for piece in pieces(source.path):
        head, cut, tail = piece.rpartition(b"\n")
        if not cut:
            rest += tail
            if len(rest) > MAX_RECORD:
                raise source.refuse(
                    "line_too_long", f"more than {MAX_RECORD} bytes without a line end", f"line {number}"
                )
            continue
        some = (rest + head).split(b"\n")
        yield number, some
        number, rest = number + len(some), tail
    if rest:
        yield number, [rest]


def counted(unit: str, first: int) -> Place:
    """Places by number: counted("line", 7)(0) is "line 7"."""
    return lambda i: f"{unit} {first + i}"


def keyed(unit: str, first: int, keys: Sequence[str]) -> Place:
    """Places by number and key."""
    return lambda i: f"{unit} {first + i} (key {keys[i][:80]!r})"


def decode_each(
    source: Source, raw: Sequence[bytes], of: type[T] | Any, many: Decoder[list[T]], place: Place
) -> list[T]:
    """Decode JSON values: all at once, and where that fails one by one, to find the culprit.

    of, many  the type of a value and a decoder of a list of them
    Each value must be balanced by itself (no part of an array of objects), or joining them could hide a fault.
    Raises Rejected("bad_item") with the place.
    """
    try:
        values = many.decode(b"[" + b",".join(raw) + b"]")
        if len(values) == len(raw):
            return values
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    one: Decoder[T] = Decoder(of)
    values = []
    for i, text in enumerate(raw):
        try:
            values.append(one.decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            message = str(error) or "is nested too deeply"
            raise source.refuse("bad_item", message if text.strip() else "is empty", place(i)) from error
    return values


def stack(source: Source, sids: Sequence[Sequence[int]], place: Place) -> npt.NDArray[np.int64]:
    """SIDs as an array [m, steps]. Raises Rejected("sid_length") for one with another number of codes."""
    steps = source.steps
    if set(map(len, sids)) - {steps}:
        i = next(i for i, sid in enumerate(sids) if len(sid) != steps)
        message = f"the SID has {len(sids[i])} codes; the deployment has {steps} steps"
        raise source.refuse("sid_length", message, place(i))
    flat = np.fromiter(chain.from_iterable(sids), np.int64, len(sids) * steps)
    return flat.reshape(len(sids), steps)
