"""What the catalogue declares for policies to read: the items' attributes, as `item.NAME` of the `final` phase."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from app.policies.facts import Catalogue, Column
from app.vocab.items import Column as Attribute
from app.vocab.items import Texts
from app.vocab.vocab import Vocab

MAX_LABELS: Final = 1024
"""A text attribute with more values can be grouped by, and not compared with one of them."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


def catalogue_of(vocab: Vocab) -> Catalogue:
    """Distinct prefixes by depth, and the attributes whose names an expression can spell; `item.id` is the item."""
    named = {name: column for name, column in vocab.attributes.items() if _NAME.fullmatch(name) and name != "id"}
    return Catalogue(tuple(vocab.trie.prefixes[1:]), tuple(_declared(name, named[name]) for name in sorted(named)))


def _declared(name: str, attribute: Attribute) -> Column:
    if not isinstance(attribute, Texts):
        return Column("item", name)
    words = attribute.words
    few = len(words) <= MAX_LABELS
    labels = tuple(words.raw(at).decode("utf-8", "replace") for at in range(len(words))) if few else ()
    return Column("item", name, "text", labels=labels)


def item_columns(
    vocab: Vocab, uses: Iterable[str], items: npt.NDArray[np.int64]
) -> Mapping[str, npt.NDArray[np.generic]]:
    """The columns of some items [M] by `item.NAME`: numbers float32, NaN where absent; texts as numbers of their
    labels int64, -1 where absent."""
    columns: dict[str, npt.NDArray[np.generic]] = {}
    for key in uses:
        space, _, name = key.partition(".")
        if space != "item" or name == "id":
            continue
        attribute = vocab.attributes[name]
        if isinstance(attribute, Texts):
            columns[key] = attribute.codes[items].astype(np.int64)
        else:
            columns[key] = np.where(attribute.present[items], attribute.values[items], np.float32(np.nan))
    return columns
