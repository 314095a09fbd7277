"""FlashRec's --sid-vocab-file, in its three forms. None of them holds ids: an item's id is its SID's text, "12,40,3".

{"0,4,6,1": 1, "0,4,51,1": 1}     keys; a fourth number that is 1 everywhere is the end token
[[0, 4, 6], [0, 4, 51]]
0 4 6  or  0,4,6                  lines; # begins a comment
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import msgspec

from app.vocab.formats.jsonl import Code
from app.vocab.formats.members import elements, first_byte, members
from app.vocab.formats.source import Block, Place, Source, counted, decode_each, keyed, lines, stack

_KEY = re.compile(r"\d{1,9}(?:,\d{1,9})*", re.ASCII)
_LINE = re.compile(rb"\d{1,9}(?:(?:\s*,\s*|\s+)\d{1,9})*")
_MANY = msgspec.json.Decoder(list[list[Code]])


def read(source: Source) -> Iterator[Block]:
    """The SIDs of a FlashRec vocabulary, in whichever of the three forms it is."""
    forms = {b"{": _object, b"[": _array}
    ended: bool | None = None
    for place, sids in forms.get(first_byte(source), _text)(source):
        for i, sid in enumerate(sids):
            has_end = _has_end(source, sid, place, i)
            if ended is not None and ended != has_end:
                raise source.refuse("sid_length", "SIDs with and without an end token in one file", place(i))
            ended = has_end
        codes = stack(source, [sid[: source.steps] for sid in sids], place)
        yield Block([",".join(map(str, sid)) for sid in codes.tolist()], codes)


def _has_end(source: Source, sid: list[int], place: Place, i: int) -> bool:
    """Whether the SID has an end token. Raises Rejected for another number of codes."""
    if len(sid) == source.steps:
        return False
    if len(sid) != source.steps + 1 or sid[-1] != 1:
        message = f"{len(sid)} numbers; an SID has {source.steps} codes, or {source.steps + 1} with an end token 1"
        raise source.refuse("sid_length", message, place(i))
    return True


def _object(source: Source) -> Iterator[tuple[Place, list[list[int]]]]:
    for number, keys, _ in members(source):
        place = keyed("item", number, keys)
        for i, key in enumerate(keys):
            if not _KEY.fullmatch(key):
                raise source.refuse("bad_key", f"{key[:40]!r} is no SID such as '12,40,3'", place(i))
        yield place, [list(map(int, key.split(","))) for key in keys]


def _array(source: Source) -> Iterator[tuple[Place, list[list[int]]]]:
    for number, raw in elements(source):
        place = counted("item", number)
        yield place, decode_each(source, raw, list[Code], _MANY, place)


def _text(source: Source) -> Iterator[tuple[Place, list[list[int]]]]:
    for number, some in lines(source):
        numbers, sids = [], []
        for i, line in enumerate(some):
            text = line.partition(b"#")[0].strip()
            if text and not _LINE.fullmatch(text):
                raise source.refuse(
                    "bad_line",
                    f"`{text[:40].decode(errors='replace')}` is no SID such as `12 40 3`",
                    f"line {number + i}",
                )
            if text:
                numbers.append(number + i)
                sids.append(list(map(int, re.split(rb"[\s,]+", text))))
        yield partial(_line, numbers), sids


def _line(numbers: list[int], i: int) -> str:
    return f"line {numbers[i]}"
