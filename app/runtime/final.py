"""The `final` phase: survivors of the last step become items (policy-language V40, V41)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from app.core import Ranked
from app.policies.plan import FinalInputs, FinalProgram
from app.runtime.columns import item_columns
from app.runtime.fields import final_fields
from app.runtime.job import Job
from app.runtime.state import Finalists
from app.vocab.vocab import Vocab

Int64s = npt.NDArray[np.int64]


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
    request_of = np.repeat(np.arange(len(start) - 1), [stop - begin for begin, stop in pairwise(start)])
    if ((np.diff(order) < 0) & (np.diff(request_of) == 0)).any():
        # rows in T0 order of each request, whatever their place in memory
        by_rank = np.lexsort((order, request_of))
        node, score, sids = node[by_rank], score[by_rank], sids[by_rank]
    first_leaf = int(vocab.trie.level_start[leaf_depth])
    ranked = []
    for request, job in enumerate(jobs):
        own = slice(start[request], start[request + 1])
        ranked.append(_one(job, node[own], score[own], sids[own], vocab, first_leaf, told))
    return ranked


def _one(
    job: Job,
    node: Int64s,
    score: npt.NDArray[np.float32],
    sids: Int64s,
    vocab: Vocab,
    first_leaf: int,
    told: Told | None,
) -> Ranked:
    live = np.flatnonzero((node >= 0) & (score > -np.inf))
    owner, items = expand(job, *vocab.leaf_range(node[live] - first_leaf))
    rows = live[owner]
    if job.plan.final is not None:
        return _finished(job, job.plan.final, items, score[rows], sids[rows], vocab, told)
    best = np.argsort(-score[rows], kind="stable")[: min(job.request.k, job.plan.limit)]  # ties stay in search order
    return Ranked(items[best], score[rows[best]], sids[rows[best]].astype(np.int32))


def expand(job: Job, low: Int64s, high: Int64s) -> tuple[Int64s, Int64s]:
    """The items that SIDs give a request: (which of the SIDs [M], item [M]), SID by SID (policy-language V40).

    low, high: the items low[i] : high[i] of SID i. Each gives the first `per_sid` that the request does not exclude, in
    the order of preference, or by the number `plan.by`: the largest first, ties by preference, those without one last.
    """
    plan, vocab = job.plan, job.snapshot.vocab
    excluded = job.excluded.items if job.excluded is not None else np.empty(0, np.int64)
    # enough items of each SID that `per_sid` are left when every excluded one is among them
    count = high - low if plan.by else np.minimum(high - low, plan.per_sid + len(excluded))
    owner = np.repeat(np.arange(len(low)), count)
    items = low[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    if len(excluded):
        kept = ~np.isin(items, excluded)
        owner, items = owner[kept], items[kept]
    if plan.by and len(items):
        value = item_columns(vocab, (plan.by,), items, job.snapshot.side)[plan.by].astype(np.float64)
        best = np.lexsort((items, np.where(np.isnan(value), np.inf, -value), owner))
        items = items[best]  # owners ascend already
    starts = np.searchsorted(owner, owner)  # first entry of the same SID
    kept = np.arange(len(owner)) - starts < plan.per_sid
    return owner[kept], items[kept]


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
    seen = job.seen.items if job.seen is not None else np.empty(0, np.int64)
    is_seen = np.isin(items, seen) if "seen" in program.uses else None
    extra = {**item_columns(vocab, program.uses, items, job.snapshot.side), **final_fields(job.fields, program.uses)}
    listen = None if told is None else lambda phase, at, scores: told(phase, items[at], scores[at])
    inputs = FinalInputs(score, items, sids.astype(np.int32), is_seen, extra, listen)
    listed = program.run(inputs, dict(zip(job.plan.structure.params, job.plan.params, strict=True)))
    best = listed.index[: job.request.k]
    return Ranked(items[best], listed.score[: job.request.k], inputs.sid[best], listed.bad)
