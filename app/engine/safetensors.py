"""The safetensors format, read with plain file reads: a mapped file that somebody truncates kills the process.

A file is an unsigned 64-bit little-endian header length, a JSON header, and the tensors' bytes. The header gives each
tensor's dtype, shape and place; places must cover the rest of the file without holes or overlaps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.errors import Rejected

MAX_HEADER = 100 << 20
"""Bytes; the limit of the format's own library."""

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
    try:
        total = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if total < 10:
                raise _bad(file, f"{total} bytes are no safetensors file", code="truncated")
            if length > MAX_HEADER:
                raise _bad(file, f"not a safetensors file (header length {length})")
            if 8 + length > total:
                raise _bad(file, f"the header says {length} bytes, the file has {total}", code="truncated")
            header = json.loads(stream.read(length).decode("utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise Rejected("unreadable", f"cannot be read: {error.strerror}", location=file.name) from error
    except (ValueError, RecursionError) as error:
        raise _bad(file, f"the header is no JSON object ({error})") from error
    if not isinstance(header, dict):
        raise _bad(file, "the header is no JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(file, name, value, 8 + length) for name, value in header.items()}
    _check_places(file, entries, 8 + length, total)
    return entries


def read_tensor(entry: Entry) -> Tensor:
    """The tensor in its stored dtype, in host memory of its own.

    Raises Rejected("bad_dtype" | "truncated" | "unreadable") with file and tensor.
    """
    if entry.dtype not in DTYPES:
        wanted = ", ".join(DTYPES)
        raise Rejected("bad_dtype", f"stored as {entry.dtype}; {wanted} can be served", location=entry.location)
    try:
        with entry.file.open("rb") as stream:
            stream.seek(entry.offset)
            data = np.fromfile(stream, dtype=np.uint8, count=entry.size)
    except OSError as error:
        raise Rejected("unreadable", f"cannot be read: {error.strerror}", location=entry.location) from error
    if data.size != entry.size:
        raise Rejected("truncated", f"{entry.size} bytes expected, {data.size} found", location=entry.location)
    if not data.size:
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    return torch.from_numpy(data).view(DTYPES[entry.dtype]).view(entry.shape)


def _bad(file: Path, message: str, *, code: str = "bad_safetensors") -> Rejected:
    return Rejected(code, message, location=file.name)


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"`{next(name for name in names if names.count(name) > 1)}` is named twice")
    return table


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(file: Path, name: str, value: object, data: int) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if (
            all(map(_natural, shape)) and _natural(begin) and _natural(end)
        ):
            pass
        case _:
            raise _bad(file, f"`{name}` has no dtype, shape and data_offsets")
    if dtype not in _BYTES:
        raise _bad(file, f"`{name}` has the unknown dtype {dtype}")
    if end - begin != prod(shape) * _BYTES[dtype]:
        raise _bad(file, f"`{name}` {dtype} {shape} does not take the {end - begin} bytes that it is given")
    return Entry(file, name, dtype, tuple(shape), data + begin, end - begin)


def _check_places(file: Path, entries: dict[str, Entry], data: int, total: int) -> None:
    place = data
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.size)):
        if entry.offset != place:
            raise _bad(file, f"`{entry.name}` begins at byte {entry.offset}, not at {place}: a hole or an overlap")
        place += entry.size
    if place > total:
        raise _bad(file, f"the tensors end at byte {place}, the file at {total}", code="truncated")
    if place < total:
        raise _bad(file, f"{total - place} bytes follow the last tensor")
