"""OpenOneRec's sid2pid.json and sid2iid.json: {"22870808035": [{"pid": 17, "count": 4, ...}, ...]}.

The key packs the SID: a * 8192^2 + b * 8192 + c, whatever the number of codes in use; a deployment whose steps have
more codes than that cannot be written so. Items of one SID are preferred by count, largest first.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from app.vocab.formats.members import members
from app.vocab.formats.source import Block, Source, decode_each, keyed

RADIX = 8192


class Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One item of an SID: `pid` or `iid`."""

    count: int
    pid: int | str | None = None
    iid: int | str | None = None
    count_after_downsample: int | None = None


_MANY = msgspec.json.Decoder(list[list[Entry]])


def read(source: Source) -> Iterator[Block]:
    """The items of a sid2pid.json or sid2iid.json."""
    for number, keys, raw in members(source):
        place = keyed("entry", number, keys)
        lists = decode_each(source, raw, list[Entry], _MANY, place)
        ids, codes = [], []
        for i, (key, entries) in enumerate(zip(keys, lists, strict=True)):
            sid = _unpack(source, key, place(i))
            for entry in sorted(entries, key=lambda entry: -entry.count):
                if (entry.pid is None) == (entry.iid is None):
                    raise source.refuse("bad_item", "an item has either `pid` or `iid`", place(i))
                ids.append(str(entry.pid if entry.iid is None else entry.iid))
                codes.append(sid)
        yield Block(ids, np.array(codes, np.int64).reshape(len(codes), source.steps))


def _unpack(source: Source, key: str, place: str) -> list[int]:
    steps, widest = source.steps, max(source.sid.sizes)
    if widest > RADIX:
        raise source.refuse("bad_format", f"its keys hold codes below {RADIX}; [sid] sizes go up to {widest}", place)
    most = RADIX**steps
    plain = key.isascii() and key.isdigit() and len(key) <= len(str(most)) and key == str(int(key))
    if not plain or int(key) >= most:
        message = f"{key[:40]!r} is no packed SID: a decimal number below {RADIX}^{steps}"
        raise source.refuse("bad_key", message, place)
    return [int(key) // RADIX**below % RADIX for below in reversed(range(steps))]
