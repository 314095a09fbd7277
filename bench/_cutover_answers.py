"""Whether answers of `bench cutover` are those of the versions that they name.

Items are told exactly, by clients: an id says its SID and the content of its vocab (`_cutover_client.wrong_items`).
So are snapshots: one that answers name with two sets of versions is counted here. Weights are told by scores, which are
numbers with noise in 16 bit: an answer is counted when it lies nearer to what another content answers than to what its
own does. Where contents were exchanged altogether, every answer would be near its neighbours; that is seen by how far
the scores of an answer lie apart, which grows with the contents' scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench._cutover_names import LETTERS, content_of

Floats = npt.NDArray[np.float64]
Row = dict[str, Any]
FEWEST = 5
"""Answers of a content to a request below which nobody knows what it answers."""


class Cell(NamedTuple):
    """One request (number in `bodies`) under one content of weights and one of vocab."""

    body: int
    weights: str
    vocab: str


def mixed(parts: Sequence[Row]) -> Row:
    """Answers that do not fit the versions that they name, and how sure that is.

    wrong_items      answers with an item of another vocab, under another's SID, or with too few
    snapshots        names of snapshots · ambiguous: of these, how many came with two sets of versions
    policies         policies and contracts named, together; 1 where nobody changed them
    judged, nearer   answers whose scores were compared, and those nearer to another content of weights
    margin           how much nearer to their own content the others are: the least, and what 1 in 1000 is below
    spread, apart    the largest distance of an answer from its content's middle; the least between two middles
    out_of_order     requests whose scores do not lie further apart under a content of larger scale
    """
    clients = [client for part in parts for client in part["clients"]]
    found = _judged(_cells(clients))  # parts of one setting have the same contents
    return {
        "wrong_items": sum(sum(map(bool, client["columns"].get("mixed", []))) for client in clients),
        **_named([one for part in parts for one in _snapshots(part["clients"])]),
        "judged": len(found.margins),
        "nearer": int((found.margins < 0).sum()),
        "margin": [float(found.margins.min()), float(np.quantile(found.margins, 0.001))] if len(found.margins) else [],
        "spread": found.spread,
        "apart": found.apart if len(found.margins) else None,
        "ordered": found.ordered,
        "out_of_order": found.out_of_order,
    }


class Judged(NamedTuple):
    """What scores say. margins: distance from the nearest other content's middle less that from the own one's."""

    margins: Floats
    spread: float
    apart: float
    ordered: int
    out_of_order: int


def _cells(clients: Iterable[Row]) -> dict[Cell, Floats]:
    """Scores [answers, 2] of each cell: of the best and the last item."""
    rows = defaultdict[Cell, list[tuple[float, float]]](list)
    for client in clients:
        c = client["columns"]
        if not c:
            continue
        columns = (c["body"], c["weights"], c["vocab"], c["score"], c["last"], c["status"])
        for body, weights, vocab, score, last, status in zip(*columns, strict=True):
            if status == 200:
                rows[Cell(body, content_of(weights), content_of(vocab))].append((score, last))
    return {cell: np.array(scores) for cell, scores in rows.items() if len(scores) >= FEWEST}


def _judged(cells: Mapping[Cell, Floats]) -> Judged:
    """Each answer against the middles of the contents of weights that were asked the same under the same vocab."""
    middles = {cell: np.median(scores, axis=0) for cell, scores in cells.items()}
    beside = defaultdict[tuple[int, str], dict[str, Floats]](dict)
    for (body, weights, vocab), middle in middles.items():
        beside[body, vocab][weights] = middle
    margins, spread, apart = [np.empty(0)], 0.0, np.inf
    for (body, weights, vocab), scores in cells.items():
        others = [middle for letter, middle in beside[body, vocab].items() if letter != weights]
        if not others:
            continue
        middle = middles[Cell(body, weights, vocab)]
        own = np.abs(scores - middle).max(axis=1)
        elsewhere = np.min([np.abs(scores - other).max(axis=1) for other in others], axis=0)
        margins.append(elsewhere - own)
        spread = max(spread, float(own.max()))
        apart = min(apart, *(float(np.abs(middle - other).max()) for other in others))
    orders = [_in_order(one) for one in beside.values() if len(one) > 1]
    return Judged(np.concatenate(margins), spread, apart, len(orders), orders.count(False))


def _in_order(middles: Mapping[str, Floats]) -> bool:
    """Whether best and last score lie further apart under each content than under the ones of smaller scale."""
    widths = [middles[letter][0] - middles[letter][1] for letter in LETTERS if letter in middles]
    return all(a < b for a, b in pairwise(widths))


def _snapshots(clients: Iterable[Row]) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Of one server: name, what it serves, and what made its rules; each once."""
    found = {
        (one["snapshot"], (one["weights"], one["vocab"]), (one["policy"], one["policy_id"], one["contract"]))
        for client in clients
        for one in client["named"]
    }
    return sorted(found)


def _named(found: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]]) -> Row:
    """A snapshot is named by its content, so two servers may share one; the versions' names may then differ only if
    their contents do not."""
    meanings = defaultdict[str, set[tuple[str, ...]]](set)
    for snapshot, served, rules in found:
        meanings[snapshot].add((*map(content_of, served), *rules))
    return {
        "snapshots": len(meanings),
        "ambiguous": sum(len(one) > 1 for one in meanings.values()),
        "policies": len({rules for _, _, rules in found}),
    }
