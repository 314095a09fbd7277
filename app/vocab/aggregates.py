"""What a deployment declares of prefixes, made from the items below them: attributes, priors, lists.

Everything is of one vocab version and is made once, off the path, bottom-up over the trie's levels: a few passes over
flat arrays, no Python per node. Sums are made in float64 and rounded to float32 at the end. Items that are taken down
or excluded still count: a request's masks know of those, an aggregate does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from app.config import Attribute, Deployment, Items, Prior
from app.errors import Rejected
from app.vocab.items import Columns, Numbers, Texts
from app.vocab.vocab import Vocab

Values = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Space = Literal["attr", "prior", "blocked", "boosted"]


class Side(NamedTuple):
    """One column of the prefixes.

    nodes      [nodes + 1], by trie node; the last is that of a prefix that the catalogue has not
    items      [n], of each item alone; None where an item has none (priors)
               both: numbers float32 (NaN = none), flags bool, categories int32 (-1 = unknown)
    aggregate  the word of `as`; "log share" or "log share of the parent" of a prior, "all" and "any" of a list
    of         the items' attribute
    first      the first step at which policies may read it
    """

    nodes: Values
    items: Values | None
    aggregate: str
    of: str
    first: int = 1

    @property
    def low(self) -> float:
        """The lowest number of a prefix of the catalogue."""
        return float(self.nodes[1:-1].min()) if len(self.nodes) > 2 else -np.inf

    @property
    def high(self) -> float:
        """The highest."""
        return float(self.nodes[1:-1].max()) if len(self.nodes) > 2 else np.inf


@dataclass(frozen=True, slots=True)
class SideData:
    """The declared columns of a vocab by `space.name`. declared: the tables that they were made for."""

    columns: Mapping[str, Side] = field(default_factory=dict)
    declared: tuple[Mapping[str, Items | Prior], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all columns together."""
        return sum(one.nodes.nbytes + (0 if one.items is None else one.items.nbytes) for one in self.columns.values())


NOTHING = SideData()


def tables(deployment: Deployment) -> tuple[Mapping[str, Items | Prior], ...]:
    """What side data depend on, beside the vocab."""
    return deployment.attributes, deployment.priors, deployment.lists


def sizes(deployment: Deployment, items: int, nodes: int) -> tuple[int, int]:
    """Bytes of the declared columns of a catalogue, before it is read: all of them, and of those by node alone.

    items: how many there are · nodes: of its trie
    """
    small = {"any": 1}
    widths = [small.get(one.as_, 4) for one in deployment.attributes.values()]
    by_node = sum(widths) + 4 * len(deployment.priors) + 2 * len(deployment.lists)
    return nodes * by_node + items * (sum(widths) + len(deployment.lists)), nodes * by_node


def side_data(vocab: Vocab, deployment: Deployment, between: Callable[[], None] = lambda: None) -> SideData:
    """The declared columns of a vocab; what it costs is in bench/results/vocab.json. between: called after each of
    them.

    Raises Rejected, all findings together, with the places in deployment.toml: where the catalogue has no such
    attribute, or one of another type, or where items have no value and nothing says what then.
    """
    columns: dict[str, Side] = {}
    wrong: list[Rejected] = []
    for table, given in zip(("attributes", "priors", "lists"), tables(deployment), strict=True):
        for name, declared in given.items():
            try:
                columns |= _columns(vocab, name, declared, f"{table}.{name}")
            except Rejected as error:
                wrong.append(error)
            between()
    if wrong:
        raise Rejected.together(wrong)
    return SideData(columns, tables(deployment))


def _columns(vocab: Vocab, name: str, declared: Items | Prior, place: str) -> dict[str, Side]:
    """The columns of one line of a table."""
    if isinstance(declared, Attribute):
        return {f"attr.{name}": _attribute(vocab, declared, place)}
    if isinstance(declared, Prior):
        return {f"prior.{name}": _prior(vocab, declared, place)}
    has = _holders(vocab.attributes, declared, place)
    whole, some = below(vocab, has, np.minimum), below(vocab, has, np.maximum)
    return {
        f"blocked.{name}": Side(_with(whole, False), has, "all", declared.of),
        f"boosted.{name}": Side(_with(some, False), has, "any", declared.of),
    }


def below(vocab: Vocab, values: Values, join: np.ufunc) -> Values:
    """The values of the items below each node, joined: [nodes], of the dtype of `values` [n].

    join: np.minimum, np.maximum or np.add. A catalogue without items gives zeros.
    """
    trie = vocab.trie
    out = np.zeros(trie.nodes, values.dtype)
    if not len(values):
        return out
    start = trie.level_start
    out[start[trie.steps] :] = join.reduceat(values, vocab.leaf_items[:-1])
    for depth in reversed(range(trie.steps)):
        level, children = slice(start[depth], start[depth + 1]), slice(start[depth + 1], start[depth + 2])
        out[level] = join.reduceat(out[children], trie.first[level] + 1 - start[depth + 1])
    return out


def _with(nodes: Values, outside: object) -> Values:
    return np.append(nodes, np.asarray(outside, nodes.dtype))


# ---- attributes ----------------------------------------------------------------------------------------------------


def _attribute(vocab: Vocab, given: Attribute, place: str) -> Side:
    as_ = given.as_
    if as_ == "same":
        codes = _texts(vocab.attributes, given.of, as_, place).codes
        least, most = below(vocab, codes, np.minimum), below(vocab, codes, np.maximum)
        return Side(_with(np.where(least == most, least, -1), -1), codes, as_, given.of, given.from_)
    if as_ in ("any", "share"):
        has = _holders(vocab.attributes, given, place)
        if as_ == "any":
            return Side(_with(below(vocab, has, np.maximum), False), has, as_, given.of, given.from_)
        mean = below(vocab, has.astype(np.float64), np.add) / _counts(vocab)
        items: Values = has.astype(np.float32)
        return Side(_with(mean.astype(np.float32), np.nan), items, as_, given.of, given.from_)
    return _number(vocab, given, _numbers(vocab.attributes, given.of, as_, place), place)


def _number(vocab: Vocab, given: Attribute, numbers: Numbers, place: str) -> Side:
    """max, min, mean or sum over the items that have a value, or over all with the default."""
    present, values = numbers.present, numbers.values.astype(np.float64)
    if given.default is not None:
        present, values = np.ones_like(present), np.where(present, values, given.default)
    counts = below(vocab, present.astype(np.int64), np.add) if given.as_ == "mean" or not present.all() else None
    if len(present) and counts is not None and not counts.all():
        leaf = int(np.argmin(counts[vocab.trie.level_start[vocab.trie.steps] :]))
        item = int(vocab.leaf_items[leaf])
        message = (
            f"item {vocab.id(item)!r} has no `{given.of}`, nor has another of its SID: say what then, `default = 0`"
        )
        raise _bad("attribute_absent", message, place)
    join, missing = {"max": (np.maximum, -np.inf), "min": (np.minimum, np.inf)}.get(given.as_, (np.add, 0.0))
    nodes = below(vocab, np.where(present, values, missing), join)
    if given.as_ == "mean" and counts is not None:
        nodes = nodes / np.maximum(counts, 1)
    with np.errstate(over="ignore"):
        rounded = nodes.astype(np.float32)
    if not np.isfinite(rounded).all():
        raise _bad("attribute_range", f"the {given.as_} of `{given.of}` is beyond what a float32 holds", place)
    items: Values = np.where(present, values, np.nan).astype(np.float32)
    return Side(_with(rounded, np.nan), items, given.as_, given.of, given.from_)


def _counts(vocab: Vocab) -> npt.NDArray[np.int64]:
    """How many items are below each node; 1 for an empty catalogue's root."""
    return np.maximum(below(vocab, np.ones(len(vocab), np.int64), np.add), 1)


# ---- priors --------------------------------------------------------------------------------------------------------


def _prior(vocab: Vocab, given: Prior, place: str) -> Side:
    """log(share) with share at least 1 / (10 N), of the whole weight or of the parent's (policy-language V17)."""
    numbers = _numbers(vocab.attributes, given.of, "prior", place)
    weights = np.where(numbers.present, numbers.values, 0).astype(np.float64)
    if len(weights) and weights.min() < 0:
        item = vocab.id(int(np.argmin(weights)))
        raise _bad("attribute_range", f"item {item!r} has a `{given.of}` below 0, which is no weight", place)
    total = below(vocab, weights, np.add)
    if len(weights) and total[0] <= 0:
        raise _bad("attribute_range", f"no item has a `{given.of}` above 0: there is nothing to have a share of", place)
    whole = total[vocab.parent] if given.per == "edge" else total[:1]
    share = np.divide(total, whole, out=np.zeros_like(total), where=whole > 0)
    lowest = 1 / (10 * max(len(weights), 1))
    logs = np.log(np.maximum(share, lowest)).astype(np.float32)
    aggregate = "log share of the parent" if given.per == "edge" else "log share"
    return Side(_with(logs, np.log(lowest)), None, aggregate, given.of)


# ---- the items' attributes -----------------------------------------------------------------------------------------


def _holders(attributes: Columns, given: Items, place: str) -> Bools:
    """Which items the declaration describes [n]."""
    column = _column(attributes, given.of, place)
    if isinstance(column, Texts):
        if given.least is not None or given.most is not None:
            raise _bad("attribute_type", f"`{given.of}` is a text: `least` and `most` are for numbers", place)
        if given.is_ is None:
            return column.codes >= 0
        labels = {one.encode() for one in ((given.is_,) if isinstance(given.is_, str) else given.is_)}
        words = [word in labels for block in column.words.blocks() for word in block]
        return np.append(np.array(words, bool), False)[column.codes]  # -1, absent, is the last
    if given.is_ is not None:
        raise _bad("attribute_type", f"`{given.of}` is a number: `is` is for texts", place)
    has = column.present.copy()
    if given.least is None and given.most is None:
        has &= column.values != 0
    if given.least is not None:
        has &= column.values >= given.least
    if given.most is not None:
        has &= column.values <= given.most
    return has


def _numbers(attributes: Columns, name: str, as_: str, place: str) -> Numbers:
    column = _column(attributes, name, place)
    if isinstance(column, Texts):
        raise _bad("attribute_type", f"`{name}` is a text; {as_} is of numbers", place)
    return column


def _texts(attributes: Columns, name: str, as_: str, place: str) -> Texts:
    column = _column(attributes, name, place)
    if not isinstance(column, Texts):
        raise _bad("attribute_type", f"`{name}` is a number; {as_} is of texts", place)
    return column


def _column(attributes: Columns, name: str, place: str) -> Numbers | Texts:
    if name not in attributes:
        near = get_close_matches(name, attributes, 1)
        hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(sorted(attributes)) or 'none'}"
        raise _bad("no_such_attribute", f"the catalogue has no attribute `{name}`; {hint}", place)
    return attributes[name]


def _bad(code: str, message: str, place: str) -> Rejected:
    return Rejected(code, message, location=f"deployment.toml: {place}")
