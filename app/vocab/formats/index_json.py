"""`index.json` of LETTER, LC-Rec and MiniOneRec: {"0": ["<a_236>", "<b_231>", "<c_226>"], ...}, item id to token names.

Also with OneRec's names, <s_a_236>, and with <|sid_begin|> and <|sid_end|> around them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from app.vocab.formats.members import members
from app.vocab.formats.source import Block, Place, Source, decode_each, keyed, stack

_TOKEN = re.compile(r"<(s_)?([a-p])_(0|[1-9]\d{0,8})>")
_MANY = msgspec.json.Decoder(list[list[str]])


def read(source: Source) -> Iterator[Block]:
    """The items of an index.json."""
    known: dict[str, tuple[int, int]] = {}
    for number, keys, raw in members(source):
        place = keyed("item", number, keys)
        named = decode_each(source, raw, list[str], _MANY, place)
        sids = [_codes(source, names, known, place, i) for i, names in enumerate(named)]
        yield Block(keys, stack(source, sids, place))


def _codes(source: Source, names: list[str], known: dict[str, tuple[int, int]], place: Place, i: int) -> list[int]:
    if len(names) >= 2 and names[0] == "<|sid_begin|>" and names[-1] == "<|sid_end|>":
        names = names[1:-1]
    codes = []
    for step, name in enumerate(names):
        token = known.get(name)
        if token is None:
            match = _TOKEN.fullmatch(name)
            if not match:
                raise source.refuse("bad_token", f"{name!r} is no SID token such as <a_12> or <s_a_12>", place(i))
            token = known[name] = (ord(match[2]) - ord("a"), int(match[3]))
        if token[0] != step:
            letter = chr(ord("a") + step)
            raise source.refuse(
                "bad_token", f"{name!r} stands at step {step + 1}, where `{letter}` is expected", place(i)
            )
        codes.append(token[1])
    return codes
