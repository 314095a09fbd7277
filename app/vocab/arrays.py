"""Named arrays in a safetensors file, written without a copy of them and read out of verified bytes.

The format: an unsigned 64-bit little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the
arrays' bytes without holes. Its own library reads these files too; it would hold every array twice while writing or
reading, and the digest must be taken of the very bytes that are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from app.errors import Rejected

Arrays = Mapping[str, npt.NDArray[Any]]
_DTYPES = {"U8": "u1", "BOOL": "?", "I32": "<i4", "I64": "<i8", "F32": "<f4", "F64": "<f8"}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
MAX_HEADER = 100 << 20


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def to_bytes(arrays: Arrays, metadata: str) -> Iterator[bytes | memoryview]:
    """The file in pieces: the header, then each array's own memory. `metadata` lies in the header under "widebeam".

    Wide items first, so that every array is aligned to its items. Equal arrays give equal bytes.
    """
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": {"widebeam": metadata}}
    at = 0
    for name in order:
        array = arrays[name]
        entries[name] = _Entry(_NAMES[array.dtype], list(array.shape), (at, at + array.nbytes))
        at += array.nbytes
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little")
    yield header
    for name in order:
        if arrays[name].nbytes:
            yield np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data


def from_bytes(data: bytearray | memoryview, file: str) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """The arrays, as views of `data`, and the metadata.

    Raises Rejected("arrays_invalid", location = the file or "file: array") for anything that is not exactly the format.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER, len(data) - 8):
        raise _bad("no safetensors file, or a cut one", file)
    try:
        entries = msgspec.json.decode(memoryview(data)[8 : 8 + length], type=dict[str, msgspec.Raw])
        extra = msgspec.json.decode(entries.pop("__metadata__", b"{}"), type=dict[str, str])
        listed = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"the header is wrong: {error}", file) from error
    body = memoryview(data)[8 + length :]
    arrays, at = {}, 0
    for name, entry in sorted(listed.items(), key=lambda pair: pair[1].data_offsets):
        arrays[name] = _view(body, entry, at, f"{file}: {name}")
        at = entry.data_offsets[1]
    if at != len(body):
        raise _bad(f"{len(body) - at} bytes belong to no array", file)
    return arrays, extra.get("widebeam", "")


def _view(body: memoryview, entry: _Entry, at: int, place: str) -> npt.NDArray[Any]:
    begin, end = entry.data_offsets
    if entry.dtype not in _DTYPES or any(dim < 0 for dim in entry.shape):
        raise _bad(f"dtype {entry.dtype} {entry.shape} is not possible here", place)
    dtype = np.dtype(_DTYPES[entry.dtype])
    if begin != at or end > len(body) or end - begin != prod(entry.shape) * dtype.itemsize:
        raise _bad(f"bytes {begin}..{end} do not hold {entry.dtype} {entry.shape}", place)
    return np.frombuffer(body[begin:end], dtype).reshape(entry.shape)


def _bad(message: str, place: str) -> Rejected:
    return Rejected("arrays_invalid", message, location=place)
