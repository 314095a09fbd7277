"""What changed between two catalogues."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from app.vocab.items import BLOCK, Numbers, Texts
from app.vocab.vocab import Vocab

ABSENT = -np.inf
"""Stands for an attribute that an item does not have; values are finite."""


class Moved(msgspec.Struct, frozen=True):
    """An item whose SID changed."""

    id: str
    old: list[int]
    new: list[int]


class Difference(msgspec.Struct, frozen=True):
    """Counts, and the first of each. `changed`: items of both, attribute values of which differ."""

    old: str
    new: str
    items_old: int
    items_new: int
    added: int
    removed: int
    moved: int
    changed: int
    first_added: list[str]
    first_removed: list[str]
    first_moved: list[Moved]
    first_changed: list[str]


def diff(old: Vocab, new: Vocab, limit: int = 20) -> Difference:
    """Compare two vocabs by item id; `limit` bounds the lists of examples."""
    place = np.concatenate([np.zeros(0, np.int64), *_places(old, new)])
    kept = np.flatnonzero(place >= 0)
    there = place[kept]
    removed = np.flatnonzero(place < 0)
    is_added = np.ones(len(new), bool)
    is_added[there] = False
    added = np.flatnonzero(is_added)
    same_steps = len(old.sizes) == len(new.sizes)
    differs = (old.codes[kept] != new.codes[there]).any(axis=1) if same_steps else np.ones(len(kept), bool)
    moved = kept[differs]
    changed = kept[_attributes_differ(old, new, kept, there)]
    examples = moved[:limit]
    return Difference(
        old.version,
        new.version,
        len(old),
        len(new),
        len(added),
        len(removed),
        len(moved),
        len(changed),
        new.ids(added[:limit]),
        old.ids(removed[:limit]),
        [Moved(old.id(item), old.codes[item].tolist(), new.codes[place[item]].tolist()) for item in examples.tolist()],
        old.ids(changed[:limit]),
    )


def _places(old: Vocab, new: Vocab) -> Iterator[npt.NDArray[np.int64]]:
    """The number in `new` of every item of `old`, -1 = gone."""
    for begin in range(0, len(old), BLOCK):
        yield new.find(old.ids(range(begin, min(begin + BLOCK, len(old)))))


def _attributes_differ(
    old: Vocab, new: Vocab, kept: npt.NDArray[np.int64], there: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    differs = np.zeros(len(kept), bool)
    for name in {*old.attributes, *new.attributes}:
        before, after = _key(old, name, kept, new), _key(new, name, there, new)
        kinds = {type(vocab.attributes[name]) for vocab in (old, new) if name in vocab.attributes}
        differs |= before != after if len(kinds) == 1 else (before != ABSENT) | (after != ABSENT)
    return differs


def _key(vocab: Vocab, name: str, items: npt.NDArray[np.int64], judge: Vocab) -> npt.NDArray[np.float64]:
    """A number an item that is equal where the attribute's values are: its value, or its text's place in `judge`."""
    column, base = vocab.attributes.get(name), judge.attributes.get(name)
    if column is None:
        return np.full(len(items), ABSENT)
    if isinstance(column, Numbers):
        return np.where(column.present[items], column.values[items].astype(np.float64), ABSENT)
    words = {base.words.get(i): i for i in range(len(base.words))} if isinstance(base, Texts) else {}
    # texts that the judge does not have get places beyond all of its own
    place = [words.get(column.words.get(i), len(words) + i) for i in range(len(column.words))]
    return np.array([*place, ABSENT])[column.codes[items]]
