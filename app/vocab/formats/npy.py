"""A NumPy array [items, steps] of codes. Ids come from a second file, or are the row numbers "0", "1", ...

The second file: one id a line (byte for byte, so a carriage return is refused), a JSON array of strings (*.json), or an
array of integers (*.npy).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from app.errors import Rejected, counted
from app.vocab.formats.source import Block, Source, pieces

BLOCK = 1 << 16
_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?(?:[iu][1248]|f[248]))', 'fortran_order': (True|False), "
    rb"'shape': \(([0-9, ]{0,200})\),? ?\}\s*"
)


def read(source: Source) -> Iterator[Block]:
    """The items of an array."""
    codes = load_array(source.path)
    if codes.ndim != 2 or codes.dtype.kind not in "iu" or codes.shape[1] != source.steps:
        message = f"expected integers [items, {source.steps}], the file has {codes.dtype} {list(codes.shape)}"
        raise source.refuse("codes_shape", message)
    ids = read_ids(source.ids) if source.ids else None
    if ids is not None and len(ids) != len(codes):
        raise source.refuse(
            "ids_count",
            f"{counted(len(ids), 'id')} in {source.ids and source.ids.name} for {counted(len(codes), 'row')}",
        )
    for begin in range(0, len(codes), BLOCK):
        part = codes[begin : begin + BLOCK]
        yield Block(ids[begin : begin + BLOCK] if ids else [str(begin + i) for i in range(len(part))], part)


def load_array(path: Path) -> npt.NDArray[Any]:
    """The numbers in an .npy file, in memory of their own.

    The header is read by its one regular form, not evaluated: NumPy's own reader tries several parsers on a broken one.
    Raises Rejected for everything that is not such a file to its last byte (Python objects included).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Rejected("file_unreadable", f"cannot be read: {error.strerror}", location=path.name) from error
    wide = data[6:7] in {b"\2", b"\3"}
    begin = 12 if wide else 10
    end = begin + int.from_bytes(data[8:begin], "little")
    match = _HEADER.fullmatch(data[begin:end])
    if data[:6] != b"\x93NUMPY" or data[6:7] not in {b"\1", b"\2", b"\3"} or not match:
        raise Rejected("bad_npy", "no NumPy array of numbers", location=path.name)
    dtype = np.dtype(match[1].decode())
    shape = tuple(int(size) for size in match[3].decode().split(",") if size.strip())
    if prod(shape) * dtype.itemsize != len(data) - end:
        message = f"{dtype} {list(shape)} does not take {len(data) - end} bytes"
        raise Rejected("bad_npy", message, location=path.name)
    array = np.frombuffer(data, dtype, offset=end)
    return array.reshape(shape[::-1]).T if match[2] == b"True" else array.reshape(shape)


def read_ids(path: Path) -> list[str]:
    """Item ids in row order. Raises Rejected with the line."""
    if path.suffix == ".npy":
        array = load_array(path)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise Rejected("bad_ids", f"expected integers [items], got {array.dtype} {array.shape}", location=path.name)
        return list(map(str, array.tolist()))
    text = b"".join(pieces(path))
    if path.suffix == ".json":
        try:
            return msgspec.json.decode(text, type=list[str])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Rejected("bad_ids", str(error), location=path.name) from error
    raw = text.split(b"\n")
    if raw[-1] == b"":
        raw.pop()
    return [_id(line, f"{path.name}: line {number}") for number, line in enumerate(raw, 1)]


def _id(line: bytes, place: str) -> str:
    if line.endswith(b"\r"):
        message = "ends in a carriage return, which would belong to the id: use plain line feeds, or JSON"
        raise Rejected("bad_ids", message, location=place)
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise Rejected("bad_ids", "is not UTF-8", location=place) from error
