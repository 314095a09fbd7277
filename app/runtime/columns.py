"""What policies may read of a catalogue: the items' attributes, and the columns that the deployment declares of them.

`item.NAME` in `final` is the items' own attribute NAME, else what `attr.NAME` is of the item alone; `blocked.NAME` and
`boosted.NAME` there say whether the item is on the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from app.policies.facts import Catalogue, Column, Space
from app.vocab.aggregates import NOTHING, Side, SideData
from app.vocab.items import Column as Attribute
from app.vocab.items import Texts
from app.vocab.vocab import Vocab

MAX_LABELS: Final = 1024
"""A text attribute with more values can be grouped by, and not compared with one of them."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_SPACES: Mapping[str, Space] = {"attr": "attr", "prior": "prior", "blocked": "blocked", "boosted": "boosted"}
_MEANING: Mapping[str, str] = {
    "any": "whether an item below is one of {count} by `{of}`",
    "all": "whether every item below is one of {count} by `{of}`",
    "share": "share of the items below that are among {count} by `{of}`",
    "same": "`{of}` of all items below, unknown where they differ",
    "log share": "log of the items' share of all `{of}`",
    "log share of the parent": "log of the items' share of the parent's `{of}`",
}


def catalogue_of(vocab: Vocab, side: SideData = NOTHING) -> Catalogue:
    """Distinct prefixes by depth, the attributes whose names an expression can spell (`item.id` is the item), and what
    is declared of prefixes."""
    named = {name: column for name, column in vocab.attributes.items() if _NAME.fullmatch(name) and name != "id"}
    columns = {f"item.{name}": _item(name, named[name]) for name in sorted(named)}
    for key, one in side.columns.items():
        columns[key] = _prefix(key, one, vocab)
        space, _, name = key.partition(".")
        if space == "attr" and name != "id":
            about = f"what {key} is of the item alone"
            own = Column("item", name, columns[key].form, labels=columns[key].labels, about=about)
            columns.setdefault(own.key, own)
    return Catalogue(tuple(vocab.trie.prefixes[1:]), tuple(columns.values()))


def _item(name: str, attribute: Attribute) -> Column:
    if isinstance(attribute, Texts):
        return Column("item", name, "text", labels=_labels(attribute), about="attribute of the items")
    return Column("item", name, about="attribute of the items")


def _labels(attribute: Texts) -> tuple[str, ...]:
    words = attribute.words
    few = len(words) <= MAX_LABELS
    return tuple(words.raw(at).decode("utf-8", "replace") for at in range(len(words))) if few else ()


def _prefix(key: str, one: Side, vocab: Vocab) -> Column:
    space, _, name = key.partition(".")
    count = 0 if one.items is None else int(np.count_nonzero(one.items))
    meaning = _MEANING.get(one.aggregate, "{aggregate} of `{of}` over the items below")
    about = meaning.format(aggregate=one.aggregate, of=one.of, count=f"{count} items")
    column = Column(_SPACES[space], name, first=one.first, aggregate=one.aggregate, about=about)
    attribute = vocab.attributes[one.of]
    if one.aggregate == "same" and isinstance(attribute, Texts):
        return column._replace(form="text", labels=_labels(attribute))
    if one.nodes.dtype == bool:
        return column._replace(form="condition")
    return column._replace(low=one.low, high=one.high)


def item_columns(
    vocab: Vocab, uses: Iterable[str], items: npt.NDArray[np.int64], side: SideData = NOTHING
) -> Mapping[str, npt.NDArray[np.generic]]:
    """What `final` reads of some items [M], by the names of `catalogue_of`: numbers float32, NaN where absent; flags
    bool; texts as numbers of their labels int64, -1 where absent."""
    columns: dict[str, npt.NDArray[np.generic]] = {}
    for key in uses:
        space, _, name = key.partition(".")
        if space in ("blocked", "boosted") or (space == "item" and name not in vocab.attributes and name != "id"):
            values = side.columns[f"attr.{name}" if space == "item" else key].items
            assert values is not None, "declared"
            columns[key] = values[items].astype(np.int64) if values.dtype == np.int32 else values[items]
        elif space == "item" and name != "id":
            columns[key] = _own(vocab.attributes[name], items)
    return columns


def _own(attribute: Attribute, items: npt.NDArray[np.int64]) -> npt.NDArray[np.generic]:
    if isinstance(attribute, Texts):
        return attribute.codes[items].astype(np.int64)
    return np.where(attribute.present[items], attribute.values[items], np.float32(np.nan))
