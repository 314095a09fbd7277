"""How an answer came about: its request is run once more, alone, through the torch path, and every phase tells who is
left (policy-language 2.1). The second run does the same as the first; where it does not, the explanation says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.core import ExplainedItem, ExplainedStep, Explanation, Ranked, Survivors
from app.policies.plan import Scored, StepInputs
from app.runtime.contexts import batch_inputs
from app.runtime.final import expand, rank_items
from app.runtime.job import Job
from app.runtime.selection import Selection
from app.runtime.state import BatchState, Transition

EVERYTHING = 1 << 40
MASKS = ("trie", "logits", "exclude", "seen", "mask", "numbers")
"""Phases that say of a candidate alone whether it may be selected; the others compare it with the rest."""


@dataclass(frozen=True)
class Watched:
    """One step of a run, on the device.

    inputs  what the policy's program was given · prefix [n, t - 1], order [n]: its rows' codes and places
    left    who is left after each phase, in their order: [n, F] bool
    rank    [n, F] float32, -inf = never ranked
    kept    [n, F] bool: the survivors
    """

    t: int
    codes: int
    inputs: StepInputs
    prefix: Tensor
    order: Tensor
    left: tuple[tuple[str, Tensor], ...]
    rank: Tensor
    kept: Tensor
    planned: int


@torch.inference_mode()
def explain(job: Job, transition: Transition, answer: Ranked) -> Explanation:
    """Run an answered job again and say what happened to its candidates and to the items that it asks about.

    transition: over state memory that nobody else uses meanwhile. Engine thread only.
    """
    seen, state = watch(job, transition)
    [again] = rank_items([job], state.finalists(), job.snapshot.vocab, len(seen))
    items = fates(job, seen, state, job.request.explain or ())
    return Explanation(tuple(map(_told, seen)), items, _mismatch(answer, again))


@torch.inference_mode()
def watch(job: Job, transition: Transition) -> tuple[list[Watched], BatchState]:
    """Run a job alone, step by step, and keep what its policy was given and did. transition: as `explain`."""
    snapshot = job.snapshot
    engine, steps = snapshot.engine, len(snapshot.contract.steps)
    state = BatchState(transition, 1, steps, engine.device)
    selection = Selection([job], snapshot.trie, snapshot.contract.sizes, engine.device)
    output = engine.encode(batch_inputs(engine.input_specs(), [job.inputs], engine.device), state.arena)
    seen: list[Watched] = []
    for t in range(1, steps + 1):
        if output is None:
            output = engine.step(t, state.rows(full=selection.needs_full(t)), state.arena)
        inputs, _ = selection.look(t, output, state)
        found = selection.select(t, output, state, [job.planned[t]])
        for error in found.failed.values():
            raise error
        survivors = found.survivors
        seen.append(_look(job, t, inputs, state, survivors))
        state.advance(t, survivors, (0, job.planned[t]))
        output = None
    return seen, state


def _look(job: Job, t: int, inputs: StepInputs, state: BatchState, survivors: Survivors) -> Watched:
    """Run the policy's step for its phases' sake."""
    program = job.plan.structure.steps[t - 1]
    told = _listen(program.run, inputs)
    rank = torch.full_like(inputs.legal, -torch.inf, dtype=torch.float32)
    left: list[tuple[str, Tensor]] = [("trie", inputs.legal)]
    for phase, who in told:
        if phase == "rank":
            rank = who
        now = who if who.dtype == torch.bool else who > -torch.inf
        if phase == "mask" and inputs.seen is not None:
            blind = _listen(program.run, inputs._replace(seen=torch.zeros_like(inputs.seen)))
            unseen = next(one for name, one in blind if name == "mask")
            left.append(("mask", left[-1][1] & (now | unseen)))
            phase = "seen"  # noqa: PLW2901  what the mask takes away only because it was seen
        left.append(("numbers" if phase == "rank" else phase, now))
    kept = torch.zeros_like(inputs.legal)
    alive = survivors.parent >= 0
    parent, code = survivors.parent[alive], survivors.code[alive]
    matches = (inputs.code[parent] == code[:, None]) & inputs.legal[parent]
    kept[parent, matches.int().argmax(dim=1)] = True
    codes = job.snapshot.contract.sizes[t - 1]
    return Watched(t, codes, inputs, state.sids, state.order, tuple(left), rank, kept, job.planned[t])


def _listen(run: Callable[[StepInputs], Scored], inputs: StepInputs) -> list[tuple[str, Tensor]]:
    told: list[tuple[str, Tensor]] = []
    run(inputs._replace(told=lambda phase, who: told.append((phase, who))))
    return told


def _told(step: Watched) -> ExplainedStep:
    parents = int((step.inputs.parent > -torch.inf).sum())
    counts = [(phase, int(who.sum())) for phase, who in step.left]
    kept = int(step.kept.sum())
    removed: dict[str, int] = {}
    before = parents * step.codes
    for phase, count in [*counts, ("width", kept)]:
        if before > count:
            removed[phase] = removed.get(phase, 0) + before - count
        before = count
    ranks = step.rank[step.kept]
    return ExplainedStep(
        step=step.t,
        parents=parents,
        candidates=parents * step.codes,
        legal=next(count for phase, count in reversed(counts) if phase in ("mask", "seen")),
        removed=removed,
        kept=kept,
        planned=step.planned,
        best=float(ranks.max()) if kept else None,
        cut=float(ranks.min()) if kept else None,
    )


def _mismatch(answer: Ranked, again: Ranked) -> str | None:
    if np.array_equal(answer.items, again.items) and np.array_equal(answer.sids, again.sids):
        return None
    here = np.setdiff1d(again.items, answer.items)
    both = min(len(answer.scores), len(again.scores))
    apart = float(np.abs(answer.scores[:both] - again.scores[:both]).max(initial=0.0))
    return (
        f"run alone, {len(here)} of {len(again.items)} items are not those of the answer; "
        f"scores of equal places differ by up to {apart:.3g}"
    )


# ---- one item ------------------------------------------------------------------------------------------------------


def fates(job: Job, steps: Sequence[Watched], state: BatchState, ids: tuple[str, ...]) -> tuple[ExplainedItem, ...]:
    """What became of items in a run that was watched; `state` as it was left."""
    if not ids:
        return ()
    vocab = job.snapshot.vocab
    request = replace(job.request, k=EVERYTHING)
    left: list[Left] = []
    [whole] = rank_items(
        [replace(job, request=request)], state.finalists(), vocab, len(steps), lambda *given: left.append(Left(*given))
    )
    found = zip(ids, vocab.find(ids), strict=True)
    return tuple(_item(job, steps, (whole, left), id_, int(item)) for id_, item in found)


class Left(NamedTuple):
    """Who was left after a phase of `final`: items and their final scores, in their order."""

    phase: str
    items: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]


Final = tuple[Ranked, Sequence[Left]]
"""The list as if all of it were asked for, and how it came about."""


def _item(job: Job, steps: Sequence[Watched], final: Final, id_: str, item: int) -> ExplainedItem:
    if item < 0:
        return ExplainedItem(id_, "unknown")
    gone, excluded = job.snapshot.gone, job.excluded
    if gone is not None and item in gone.items:
        return ExplainedItem(id_, "taken_down")
    if excluded is not None and item in excluded.items:
        return ExplainedItem(id_, "excluded")
    sid = job.snapshot.vocab.sids([item])[0].tolist()
    for step in steps:
        fate = _fate(step, id_, sid)
        if fate is not None:
            return fate
    return _final(job, final, id_, item)


def _fate(step: Watched, id_: str, sid: Sequence[int]) -> ExplainedItem | None:
    """Where the item's prefix left the step, or None where it survived."""
    before = torch.tensor(sid[: step.t - 1], device=step.prefix.device)
    rows = (step.prefix == before).all(dim=1) & (step.inputs.parent > -torch.inf)
    row = int(rows.int().argmax())  # the prefix survived the step before, so there is one
    column = (step.inputs.code[row] == sid[step.t - 1]) & step.inputs.legal[row]
    if not bool(column.any()):
        return ExplainedItem(id_, "masked", step.t, "trie")
    at = (row, int(column.int().argmax()))
    if bool(step.kept[at]):
        return None
    phase = next((name for name, who in step.left if not bool(who[at])), "width")
    if phase in MASKS:
        return ExplainedItem(id_, "masked", step.t, phase)
    ranked = bool(step.rank[at] > -torch.inf)
    kept = int(step.kept.sum())
    return ExplainedItem(
        id_,
        "cut",
        step.t,
        phase,
        float(step.rank[at]) if ranked else None,
        float(step.rank[step.kept].min()) if kept else None,
        _place(step, at) if ranked else None,
        kept,
    )


def _place(step: Watched, at: tuple[int, int]) -> int:
    """The candidate's place in T0 among all that were ranked, from 1."""
    number = step.order[:, None] * step.codes + step.inputs.code
    ahead = (step.rank > step.rank[at]) | ((step.rank == step.rank[at]) & (number < number[at]))
    return 1 + int((ahead & (step.rank > -torch.inf)).sum())


def _final(job: Job, final: Final, id_: str, item: int) -> ExplainedItem:
    """The item's SID survived: is it in the list, and if not, why not."""
    whole, left = final
    kept = min(job.request.k, len(whole.items))
    cut = float(whole.scores[kept - 1]) if kept else None
    [places] = np.nonzero(whole.items == item)
    if len(places):
        place = int(places[0]) + 1
        score = float(whole.scores[places[0]])
        if place <= job.request.k:
            return ExplainedItem(id_, "listed", rank=score, cut=cut, place=place, kept=kept)
        return ExplainedItem(id_, "final", phase="k", rank=score, cut=cut, place=place, kept=kept)
    if not _expanded(job, item):
        return ExplainedItem(id_, "final", phase="expand", cut=cut, kept=kept, rule=_rule(job, "expand"))
    phase, before = "limit", None
    for one in left:
        if item not in one.items:
            phase = one.phase
            break
        before = one if one.phase != "mask" else None  # what the mask leaves has no order yet
    at = None if before is None else int(np.flatnonzero(before.items == item)[0])
    rank = None if before is None or at is None else float(before.scores[at])
    met = None if at is None else at + 1
    return ExplainedItem(id_, "final", None, phase, rank, cut, met, kept, _rule(job, phase))


def _rule(job: Job, phase: str) -> str:
    """What the policy says in a phase of `final`."""
    final = job.plan.resolved["final"]
    assert isinstance(final, dict)
    if phase == "limit":
        return f"{job.plan.limit}"
    said = final["score" if phase == "numbers" else phase]
    return "; ".join(said) if isinstance(said, list) else str(said)


def _expanded(job: Job, item: int) -> bool:
    """Whether the item is among those of its SID that the request gets."""
    vocab = job.snapshot.vocab
    _, items = expand(job, *vocab.leaf_range([int(vocab.leaf_of[item])]))
    return item in items
