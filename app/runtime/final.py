"""The `final` phase: survivors of the last step become items (policy-language V40, V41)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from app.core import Ranked
from app.policies.plan import FinalInputs, FinalProgram
from app.runtime.columns import item_columns
from app.runtime.fields import final_fields
from app.runtime.job import Job
from app.runtime.snapshot import DeadNodes
from app.runtime.state import Finalists
from app.vocab.vocab import Vocab

Int64s = npt.NDArray[np.int64]
ALL: Final = 2**31
"""More items than an SID has."""

Told = Callable[[str, Int64s, npt.NDArray[np.float32]], None]
"""Who is left after a phase of `final`: the phase, items [m] and their final scores [m], in their order."""


def rank_items(
    jobs: Sequence[Job], found: Finalists, vocab: Vocab, leaf_depth: int, told: Told | None = None
) -> list[Ranked]:
    """Each request's items, best first. told: for explanations only.

    An SID gives its first `per_sid` items, in the catalogue's order of preference, that the request does not exclude.
    Survivors whose SID is no item of the catalogue (policies without the trie) give none.
    """
    start = found.row_start
    order, node, score, sids = (values.numpy() for values in found[1:])
    request_of = np.repeat(np.arange(len(jobs)), np.diff(start))
    if ((np.diff(order) < 0) & (np.diff(request_of) == 0)).any():
        # rows in T0 order of each request, whatever their place in memory
        by_rank = np.lexsort((order, request_of))
        node, score, sids = node[by_rank], score[by_rank], sids[by_rank]
    live = np.flatnonzero((node >= 0) & (score > -np.inf))
    low, high = vocab.leaf_range(node[live] - int(vocab.trie.level_start[leaf_depth]))
    own = request_of[live]
    owner, items = _spread(low, high, np.array([_most(job) for job in jobs])[own])
    ends = np.searchsorted(own[owner], np.arange(len(jobs) + 1)).tolist()
    ranked = []
    for job, (begin, end) in zip(jobs, pairwise(ends), strict=True):
        at, listed = owner[begin:end], items[begin:end]
        if _chosen(job):
            at, listed = _choice(job, at, listed)
        rows = live[at]
        ranked.append(_one(job, listed, score[rows], sids, rows, vocab, told))
    return ranked


def _one(
    job: Job,
    items: Int64s,
    score: npt.NDArray[np.float32],
    sids: Int64s,
    rows: Int64s,
    vocab: Vocab,
    told: Told | None,
) -> Ranked:
    """The best of a request's items [M]; score [M], and sids[rows]: of each."""
    if job.plan.final is not None:
        return _finished(job, job.plan.final, items, score, sids[rows], vocab, told)
    best = np.argsort(-score, kind="stable")[: min(job.request.k, job.plan.limit)]  # ties stay in search order
    return Ranked(items[best], score[best], sids[rows[best]].astype(np.int32))


def expand(job: Job, low: Int64s, high: Int64s) -> tuple[Int64s, Int64s]:
    """The items that SIDs give a request: (which of the SIDs [M], item [M]), SID by SID (policy-language V40).

    low, high: the items low[i] : high[i] of SID i. Each gives the first `per_sid` that the request does not exclude, in
    the order of preference, or by the number `plan.by`: the largest first, ties by preference, those without one last.
    """
    found = _spread(low, high, _most(job))
    return _choice(job, *found) if _chosen(job) else found


def _chosen(job: Job) -> bool:
    """Whether a request does not take the first `per_sid` items of each SID as they are."""
    return bool(job.plan.by) or job.excluded is not None


def _most(job: Job) -> int:
    """How many items of an SID a request must look at: `per_sid` are left when every excluded one is among them."""
    if job.plan.by:
        return ALL
    return job.plan.per_sid + (len(job.excluded.items) if job.excluded is not None else 0)


def _spread(low: Int64s, high: Int64s, most: Int64s | int) -> tuple[Int64s, Int64s]:
    """The first `most` items of each SID: (which of the SIDs [M], item [M]), SID by SID."""
    count = np.minimum(high - low, most)
    owner = np.repeat(np.arange(len(low)), count)
    return owner, np.arange(len(owner)) + np.repeat(low - np.cumsum(count) + count, count)


def _choice(job: Job, owner: Int64s, items: Int64s) -> tuple[Int64s, Int64s]:
    """Of a request's items [M] of SIDs `owner` [M], ascending: those that it gets, in its order of preference."""
    plan, snapshot = job.plan, job.snapshot
    if job.excluded is not None:
        kept = ~_among(items, job.excluded)
        owner, items = owner[kept], items[kept]
    if plan.by and len(items):
        value = item_columns(snapshot.vocab, (plan.by,), items, snapshot.side)[plan.by].astype(np.float64)
        items = items[np.lexsort((items, np.where(np.isnan(value), np.inf, -value), owner))]  # owners ascend already
    first = np.arange(len(owner)) - np.searchsorted(owner, owner) < plan.per_sid
    return owner[first], items[first]


def _among(items: Int64s, known: DeadNodes | None) -> npt.NDArray[np.bool_]:
    """Which of items [M] are in a set."""
    if known is None:
        return np.zeros(len(items), np.bool_)
    found: npt.NDArray[np.bool_] = known.items.take(known.items.searchsorted(items), mode="clip") == items
    return found


def _finished(
    job: Job,
    program: FinalProgram,
    items: Int64s,
    score: npt.NDArray[np.float32],
    sids: Int64s,
    vocab: Vocab,
    told: Told | None,
) -> Ranked:
    """The list of a policy whose `final` does more than expand and cut."""
    is_seen = _among(items, job.seen) if "seen" in program.uses else None
    extra = {**item_columns(vocab, program.uses, items, job.snapshot.side), **final_fields(job.fields, program.uses)}
    listen = None if told is None else lambda phase, at, scores: told(phase, items[at], scores[at])
    inputs = FinalInputs(score, items, sids.astype(np.int32), is_seen, extra, listen)
    listed = program.run(inputs, dict(zip(job.plan.structure.params, job.plan.params, strict=True)))
    best = listed.index[: job.request.k]
    return Ranked(items[best], listed.score[: job.request.k], inputs.sid[best], listed.bad)
