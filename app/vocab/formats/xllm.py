"""xLLM's binary vocabulary, little endian, no header: records of int64 item id and L int32 token ids.

The extended layout puts two texts between them: int64 id, u32 length, did, u32 length, type, L int32 (texts of at most
1 MiB, kept as the attributes `did` and `type`). Nothing in a file says which layout it has, so a file must read as
exactly one of them, to the last byte and with every token a code of its step.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from app.errors import Rejected
from app.vocab.formats.source import Attributes, Block, Source, counted
from app.vocab.formats.tokens import TokenMap

BLOCK = 1 << 16
MAX_TEXT = 1 << 20


class _Records(NamedTuple):
    ids: npt.NDArray[np.int64]
    codes: npt.NDArray[np.int64]
    attributes: list[Attributes] | None


def read(source: Source) -> Iterator[Block]:
    """The items of a file in one of the two layouts."""
    tokens = TokenMap(source)
    try:
        data = source.path.read_bytes()
    except OSError as error:
        raise source.refuse("file_unreadable", f"cannot be read: {error.strerror}") from error
    if not data:
        return
    read_as: dict[str, _Records] = {}
    refused: dict[str, Rejected] = {}
    for name, layout in (("plain", _plain), ("extended", _extended)):
        try:
            read_as[name] = layout(source, data, tokens)
        except Rejected as error:
            refused[name] = error
    if len(read_as) == 2:
        raise source.refuse("ambiguous", "the file reads as the plain layout and as the extended one")
    if not read_as:
        reasons = "; ".join(f"as {name}: {error}" for name, error in refused.items())
        raise source.refuse("bad_record", f"neither layout fits ({reasons})")
    (records,) = read_as.values()
    for begin in range(0, len(records.ids), BLOCK):
        part = slice(begin, begin + BLOCK)
        attributes = records.attributes[part] if records.attributes else None
        yield Block(list(map(str, records.ids[part].tolist())), records.codes[part], attributes)


def _plain(source: Source, data: bytes, tokens: TokenMap) -> _Records:
    record = np.dtype([("id", "<i8"), ("tokens", "<i4", (source.steps,))])
    if len(data) % record.itemsize:
        whole = len(data) // record.itemsize
        message = f"{len(data) % record.itemsize} bytes follow {whole} records of {record.itemsize}"
        raise Rejected("trailing_bytes", message, location=f"record {whole + 1}")
    records = np.frombuffer(data, record)
    return _Records(records["id"], tokens.codes(records["tokens"], counted("record", 1)), None)


def _extended(source: Source, data: bytes, tokens: TokenMap) -> _Records:
    tail = struct.Struct(f"<{source.steps}i")
    ids: list[int] = []
    rows: list[tuple[int, ...]] = []
    attributes: list[Attributes] = []
    at = 0
    while at < len(data):
        place = f"record {len(ids) + 1}"
        try:
            (item,) = struct.unpack_from("<q", data, at)
            did, at = _text(data, at + 8, place)
            kind, at = _text(data, at, place)
            rows.append(tail.unpack_from(data, at))
        except struct.error as error:
            raise Rejected("trailing_bytes", "the file ends inside a record", location=place) from error
        at += tail.size
        ids.append(item)
        attributes.append({"did": did, "type": kind})
    table = np.array(rows, np.int64).reshape(len(rows), source.steps)
    return _Records(np.array(ids, np.int64), tokens.codes(table, counted("record", 1)), attributes)


def _text(data: bytes, at: int, place: str) -> tuple[str, int]:
    (length,) = struct.unpack_from("<I", data, at)
    if length > MAX_TEXT or at + 4 + length > len(data):
        raise Rejected("bad_record", f"a text of {length} bytes", location=place)
    try:
        return data[at + 4 : at + 4 + length].decode(), at + 4 + length
    except UnicodeDecodeError as error:
        raise Rejected("bad_record", "a text that is not UTF-8", location=place) from error
