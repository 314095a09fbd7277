"""The safetensors format, read with plain file reads: a mapped file that somebody truncates kills the process.

A file is an unsigned 64-bit little-endian header length, a JSON header, and the tensors' bytes. The header gives each
tensor's dtype, shape and place; places must cover the rest of the file without holes or overlaps.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from app.config import open_inside
from app.errors import Rejected, counted, unreadable

MAX_HEADER: Final = 4 << 20
"""Bytes: some 40,000 tensors. The format's own library takes 100 MB, but whoever parses holds the interpreter, seconds
for that much, and requests would wait. More tensors go into several files."""
FORMATS_OWN: Final = 100 << 20
"""Bytes of a header in the format's own library: what says more is something else, a pickle perhaps."""
MAX_DIMENSIONS: Final = 64
"""As torch has them."""
CHUNK: Final = 16 << 20
"""Bytes that are read and hashed in one go, of as many tensors as there are in them: in between, whoever loads waits
for the interpreter."""
SMALL: Final = 64 << 10
"""Bytes that are hashed sooner than a thread has been told to."""
Bytes = npt.NDArray[np.uint8]

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What weights may be stored in."""

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


class Entry(NamedTuple):
    """One tensor of a file: where its bytes lie (offset from the start of the file) and what they are."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def location(self) -> str:
        """The tensor's place as errors name it."""
        return f"{self.file.name}: {self.name}"


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a file by name, with every promise of the format checked; no tensor is read.

    Raises Rejected("bad_safetensors" | "truncated" | "unreadable") with the file.
    """
    with Reader(file) as reader:
        return reader.entries


class Reader:
    """One file, read once from front to back and hashed on the way, so that what is used is what was checked.

    entries  the tensors by name in the order of their bytes; they must be read in that order, none left out
    """

    def __init__(self, file: Path, between: Callable[[], None] = lambda: None) -> None:
        """Open a file and read its header. between: called before each `CHUNK` bytes. Raises as `read_header`."""
        self._file, self._digest, self._between = file, _Beside(), between
        self._ahead, self._left = np.empty(0, np.uint8), 0  # what is in memory already, and bytes that are not yet
        try:
            self._descriptor = open_inside(file, file.parent)
        except OSError as error:
            raise unreadable(error, "unreadable", file.name) from error
        try:
            self.entries = self._header()
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        self._digest.close()
        os.close(self._descriptor)

    def read(self, entry: Entry, rows: int) -> Iterator[tuple[int, Bytes]]:
        """A tensor's bytes, about `CHUNK` at a time: (index of the first row, bytes of whole rows of dimension 0).

        rows  how many there are (1 for a number without dimensions). The memory is used again for the next piece.
        Raises Rejected("truncated" | "unreadable") with file and tensor.
        """
        if not entry.size:  # a header may say so many rows of nothing that nobody lives to count them
            return
        width = max(entry.size // max(rows, 1), 1)
        first = 0
        while first < rows:
            count = min(rows - first, len(self._ahead) // width)
            if not count:
                self._refill(entry, first * width, width)
                continue
            piece, self._ahead = self._ahead[: count * width], self._ahead[count * width :]
            yield first, piece.copy() if piece.ctypes.data % _BYTES[entry.dtype] else piece  # whole numbers in memory
            first += count

    def _refill(self, entry: Entry, done: int, width: int) -> None:
        """`CHUNK` bytes of the file, of whatever tensors lie there, that begin with the next row, of `width`. They are
        hashed by a thread of their own, which takes as long as all the rest. done: bytes of the tensor until there."""
        self._between()
        kept = self._ahead
        block = self._digest.memory(min(max(CHUNK, width), len(kept) + self._left))
        block[: len(kept)] = kept
        try:
            found = self._fill(block[len(kept) :].data)
        except OSError as error:
            raise unreadable(error, "unreadable", entry.location) from error
        self._left -= found
        if len(kept) + found < width:
            message = f"{entry.size} bytes expected, {done + len(kept) + found} found"
            raise Rejected("truncated", message, location=entry.location)
        self._ahead = block[: len(kept) + found]
        self._digest.update(self._ahead[len(kept) :])

    def sha256(self) -> str:
        """The digest of everything that was read: the whole file's, once every tensor was."""
        return self._digest.hexdigest()

    def _fill(self, memory: memoryview) -> int:
        at = 0
        while at < len(memory) and (count := os.readv(self._descriptor, [memory[at:]])):
            at += count
        return at

    def _front(self, size: int) -> bytes:
        """The next bytes, as many as there are."""
        piece = self._digest.memory(size)
        found = piece[: self._fill(piece.data)]
        self._digest.update(found)
        return found.tobytes()

    def _header(self) -> dict[str, Entry]:
        file = self._file
        try:
            total = os.fstat(self._descriptor).st_size
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            length = int.from_bytes(self._front(8), "little")
            if total < 10:
                raise _bad(file, f"{total} bytes are no safetensors file", code="truncated")
            if length > FORMATS_OWN:
                raise _bad(file, f"not a safetensors file (header length {length})")
            if 8 + length > total:
                raise _bad(file, f"the header says {length} bytes, the file has {total}", code="truncated")
            if length > MAX_HEADER:
                raise _bad(file, f"a header of {length} bytes; {MAX_HEADER} are possible")
            text = self._front(length)
        except OSError as error:
            raise unreadable(error, "unreadable", file.name) from error
        self._left = total - 8 - length
        return {entry.name: entry for entry in _entries(file, text, total)}


class _Beside:
    """A digest, made by a thread of its own: while one of two pieces of memory is hashed, the other is filled."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "widebeam-digest")  # it begins with its first piece
        self._memory = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._hashed: list[Future[None] | None] = [None, None]

    def memory(self, size: int) -> Bytes:
        """Memory for the next piece: that of the piece before the last, once it has been hashed."""
        self._memory.reverse()
        self._hashed.reverse()
        hashed, self._hashed[0] = self._hashed[0], None
        if hashed is not None:
            hashed.result()
        if len(self._memory[0]) < size:
            self._memory[0] = np.empty(size, np.uint8)
        return self._memory[0][:size]

    def update(self, piece: Bytes) -> None:
        """Hash what lies in the memory that was given last, behind everything before."""
        if len(piece) < SMALL and all(one is None or one.done() for one in self._hashed):
            self._digest.update(piece.data)
        else:
            self._hashed[0] = self._thread.submit(self._digest.update, piece.data)

    def hexdigest(self) -> str:
        """Of everything so far."""
        for hashed in self._hashed:
            if hashed is not None:
                hashed.result()
        return self._digest.hexdigest()

    def close(self) -> None:
        """End the thread; what it has begun is waited for."""
        self._thread.shutdown(cancel_futures=True)


@lru_cache(maxsize=8)  # a load reads a header three times: room, names, tensors
def _entries(file: Path, text: bytes, total: int) -> tuple[Entry, ...]:
    """The tensors that a header describes, in the order of their bytes. total: bytes of the file"""
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _bad(file, f"the header is no JSON object ({error})") from error
    if not isinstance(header, dict):
        raise _bad(file, "the header is no JSON object")
    header.pop("__metadata__", None)
    entries = [_entry(file, name, value, 8 + len(text)) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.size))
    _check_places(file, entries, 8 + len(text), total)
    return tuple(entries)


def _bad(file: Path, message: str, *, code: str = "bad_safetensors") -> Rejected:
    return Rejected(code, message, location=file.name)


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"`{next(name for name, count in counts.items() if count > 1)}` is named twice")
    return table


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _entry(file: Path, name: str, value: object, data: int) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if (
            len(shape) <= MAX_DIMENSIONS and all(map(_natural, shape)) and _natural(begin) and _natural(end)
        ):
            pass
        case _:
            raise _bad(file, f"`{name}` has no dtype, shape and data_offsets")
    if dtype not in _BYTES:
        raise _bad(file, f"`{name}` has the unknown dtype {dtype}")
    if end - begin != prod(shape) * _BYTES[dtype]:
        raise _bad(file, f"`{name}` {dtype} {shape} does not take the {end - begin} bytes that it is given")
    return Entry(file, name, dtype, tuple(shape), data + begin, end - begin)


def _check_places(file: Path, entries: Sequence[Entry], data: int, total: int) -> None:
    place = data
    for entry in entries:
        if entry.offset != place:
            raise _bad(file, f"`{entry.name}` begins at byte {entry.offset}, not at {place}: a hole or an overlap")
        place += entry.size
    if place > total:
        raise _bad(file, f"the tensors end at byte {place}, the file at {total}", code="truncated")
    if place < total:
        raise _bad(file, f"the last tensor is followed by {counted(total - place, 'byte')}")
