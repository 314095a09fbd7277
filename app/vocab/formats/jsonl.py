"""The plain form, JSON lines: {"id": "318", "sid": [12, 40, 3], "attrs"?: {"genre": "Drama", "year": 1994}}.

The order of the lines is the order of preference among items of one SID.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
from msgspec import Meta

from app.vocab.formats.source import Attribute, Block, Source, counted, decode_each, lines, stack
from app.vocab.items import BLOCK, Column, Texts
from app.vocab.vocab import Vocab

Code = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One item."""

    id: str
    sid: list[Code]
    attrs: dict[str, Attribute] | None = None


_MANY = msgspec.json.Decoder(list[Line])


def read(source: Source) -> Iterator[Block]:
    """The items of a file of JSON lines."""
    for number, raw in lines(source):
        place = counted("line", number)
        items = decode_each(source, raw, Line, _MANY, place)
        attributes = [item.attrs for item in items]
        codes = stack(source, [item.sid for item in items], place)
        yield Block([item.id for item in items], codes, attributes if any(attributes) else None)


def write(vocab: Vocab, stream: BinaryIO) -> int:
    """Write a vocab in the plain form, items in item order, so that preference is kept. Returns the lines."""
    encoder = msgspec.json.Encoder()
    for begin in range(0, len(vocab), BLOCK):
        rows = range(begin, min(begin + BLOCK, len(vocab)))
        attributes = {name: values(column, rows) for name, column in vocab.attributes.items()}
        for at, (name, sid) in enumerate(zip(vocab.ids(rows), vocab.sids(rows).tolist(), strict=True)):
            attrs = {key: column[at] for key, column in attributes.items() if column[at] is not None}
            stream.write(encoder.encode(Line(name, sid, attrs or None)) + b"\n")
    return len(vocab)


def values(column: Column, rows: range) -> Sequence[Attribute]:
    """The values of some items, None where absent; numbers so that reading gives the same float32."""
    part = slice(rows.start, rows.stop)
    if isinstance(column, Texts):
        return [None if code < 0 else column.words.get(code) for code in column.codes[part].tolist()]
    present = column.present[part].tolist()
    return [_shortest(value) if there else None for value, there in zip(column.values[part], present, strict=True)]


def _shortest(value: np.float32) -> float | int:
    exact = float(value)
    if exact.is_integer() and abs(exact) < 2**53 and str(exact) != "-0.0":
        return int(exact)
    return float(str(value))
