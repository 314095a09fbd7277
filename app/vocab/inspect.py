"""What a catalogue looks like: how its SIDs are used, where items collide, how far prefixes fan out."""

from __future__ import annotations

import msgspec
import numpy as np

from app.vocab.items import Column, Numbers
from app.vocab.vocab import Vocab


class Step(msgspec.Struct, frozen=True):
    """Step t: codes in use of those there are, prefixes of this depth, codes that a prefix before it can go on with."""

    step: int
    codes: int
    codes_used: int
    prefixes: int
    fan_out_mean: float
    fan_out_max: int


class Prefix(msgspec.Struct, frozen=True):
    """The prefix of one depth that has the most items below it."""

    sid: list[int]
    items: int


class Attribute(msgspec.Struct, frozen=True):
    """A column: items that have it; different texts where it is text."""

    name: str
    type: str
    items: int
    texts: int | None = None


class Report(msgspec.Struct, frozen=True):
    """items_sharing: items whose SID is not theirs alone; most_items: of one SID; largest: per depth 1..L."""

    version: str
    digest: str
    sizes: list[int]
    items: int
    sids: int
    items_sharing: int
    most_items: int
    steps: list[Step]
    largest: list[Prefix]
    attributes: list[Attribute]
    warnings: list[str]


def inspect(vocab: Vocab) -> Report:
    """Describe a vocab. Touches every item a few times: about a second for 10 M."""
    per_leaf = np.diff(vocab.leaf_items)
    sharing = int(per_leaf[per_leaf > 1].sum())
    steps = [_step(vocab, t) for t in range(1, len(vocab.sizes) + 1)]
    return Report(
        vocab.version,
        vocab.digest,
        list(vocab.sizes),
        len(vocab),
        len(per_leaf),
        sharing,
        int(per_leaf.max(initial=0)),
        steps,
        [_largest(vocab, depth) for depth in range(1, len(vocab.sizes) + 1)] if len(vocab) else [],
        [_attribute(name, column) for name, column in vocab.attributes.items()],
        _warnings(len(vocab), sharing, steps),
    )


def _step(vocab: Vocab, t: int) -> Step:
    trie, size = vocab.trie, vocab.sizes[t - 1]
    used = int(np.count_nonzero(np.bincount(vocab.codes[:, t - 1], minlength=size)))
    mean = round(trie.prefixes[t] / max(trie.prefixes[t - 1], 1), 3)
    return Step(t, size, used, trie.prefixes[t], mean, trie.max_children[t - 1])


def _largest(vocab: Vocab, depth: int) -> Prefix:
    start = vocab.trie.level_start
    low, high = vocab.items_below(np.arange(start[depth], start[depth + 1]))
    most = int(np.argmax(high - low))
    return Prefix(vocab.codes[low[most], :depth].tolist(), int(high[most] - low[most]))


def _attribute(name: str, column: Column) -> Attribute:
    if isinstance(column, Numbers):
        return Attribute(name, "number", int(column.present.sum()))
    return Attribute(name, "text", int((column.codes >= 0).sum()), len(column.words))


def _warnings(items: int, sharing: int, steps: list[Step]) -> list[str]:
    found = []
    if sharing > items / 2:
        found.append(f"{sharing} of {items} items share their SID: the model cannot tell them apart")
    found += [
        f"step {step.step} uses one of its {step.codes} codes: it tells nothing about an item"
        for step in steps
        if items > 1 and step.codes_used == 1 and step.codes > 1
    ]
    return found
