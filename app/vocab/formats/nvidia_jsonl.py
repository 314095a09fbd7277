"""The catalog of NVIDIA's sid-gr-inference, JSON lines:
{"item_id": 7, "token_ids": [151670, 159863, 168060], "metadata"?: {"cat": "toy"}}, token ids of the model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from app.vocab.formats.jsonl import Code
from app.vocab.formats.source import Attribute, Block, Source, counted, decode_each, lines, stack
from app.vocab.formats.tokens import TokenMap


class Record(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One item. A numeric id becomes its decimal text."""

    item_id: int | str
    token_ids: list[Code]
    metadata: dict[str, Attribute] | None = None


_MANY = msgspec.json.Decoder(list[Record])


def read(source: Source) -> Iterator[Block]:
    """The items of a catalog."""
    tokens = TokenMap(source)
    for number, raw in lines(source):
        place = counted("line", number)
        items = decode_each(source, raw, Record, _MANY, place)
        sids = stack(source, [item.token_ids for item in items], place)
        metadata = [item.metadata for item in items]
        codes = tokens.codes(sids, place)
        yield Block([str(item.item_id) for item in items], codes, metadata if any(metadata) else None)
