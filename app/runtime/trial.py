"""One request on a deployment, alone, with every step held against the oracle: what a policy's tests ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from app.config import Deployment
from app.core import ExplainedItem, Request
from app.errors import counted
from app.policies.cases import RequestCase
from app.policies.diagnostics import Span
from app.policies.plan import Plan
from app.policies.reference import Grid, score_step, top
from app.policies.reference_select import select_step
from app.policies.selfcheck import near
from app.policies.testing import drawn
from app.runtime.admission import Admission
from app.runtime.canary import Present
from app.runtime.explain import Watched, fates, watch
from app.runtime.final import rank_items
from app.runtime.job import Job, seed_of
from app.runtime.snapshot import Snapshot
from app.runtime.state import TRANSITIONS, BatchState, Transition

SMALL: Final = 4096
"""Most candidates of a step whose prune, quota and ways to select the oracle's loops go through."""


class Tried(NamedTuple):
    """The list of a request, best first, and how its steps stand to the oracle.

    differs    what the compiled plan and the oracle do not agree about; () = nothing
    unchecked  steps whose scores agree and whose selection was too large for the oracle
    """

    ids: tuple[str, ...]
    status: str
    differs: tuple[str, ...]
    unchecked: tuple[int, ...]


class Trial:
    """A deployment that answers one request at a time. Its state memory is its own."""

    def __init__(self, snapshot: Snapshot, deployment: Deployment) -> None:
        """deployment: one that lets requests name their policy."""
        self._snapshot, self._admission = snapshot, Admission(deployment)
        arena = snapshot.engine.new_arena(snapshot.contract.limits)
        self._transition: Transition = TRANSITIONS["ancestry"](arena, snapshot.contract.states)

    def ask(self, request: Request) -> tuple[Tried, Job, list[Watched], BatchState]:
        """The answer, and the run that gave it. Raises InvalidRequest."""
        choice = self._admission.choose(request, self._snapshot)
        own = self._admission.admit(request, choice, self._snapshot)
        job = Job(
            request, Present(), self._snapshot, choice.plan, own.inputs, choice.planned, own.excluded, own.seen, 0.0,
            own.fields,
        )  # fmt: skip
        steps, state = watch(job, self._transition)
        [ranked] = rank_items([job], state.finalists(), self._snapshot.vocab, len(steps))
        found = len(ranked.items)
        status = "no_candidates" if not found else "underfilled" if found < request.k else "ok"
        apart, unchecked = [], []
        for step in steps:
            problem = _differs(choice.plan, step, seed_of(request))
            if problem == "":
                unchecked.append(step.t)
            elif problem is not None:
                apart.append(f"step {step.t}: {problem}")
        ids = tuple(self._snapshot.vocab.ids(ranked.items))
        return Tried(ids, status, tuple(apart), tuple(unchecked)), job, steps, state

    def problems(self, case: RequestCase, request: Request) -> tuple[list[tuple[Span, str, str]], tuple[int, ...]]:
        """What a case expects and does not get: (place, message, help); and the steps that the oracle did not select.

        Raises InvalidRequest.
        """
        tried, job, steps, state = self.ask(request)
        missing = [one for given in (case.items, case.first, case.present) if given for one in given.value]
        known = tuple(dict.fromkeys(one for one in missing if one not in tried.ids))
        told = {one.id: _fate(one) for one in fates(job, steps, state, known)}
        found = list(_unmet(case, tried, told))
        hint = "this is a bug of Widebeam, not of the policy: please report it with this test"
        found += [(case.span, f"the compiled plan and the reference differ at {one}", hint) for one in tried.differs]
        return found, tried.unchecked


def _unmet(case: RequestCase, tried: Tried, told: Mapping[str, str]) -> Iterator[tuple[Span, str, str]]:
    """What a case expects of the list and does not get."""
    have = tried.ids
    if case.items is not None and have != case.items.value:
        yield case.items.span, *_apart(have, case.items.value, told)
    if case.first is not None and have[: len(case.first.value)] != case.first.value:
        yield case.first.span, *_apart(have[: len(case.first.value)], case.first.value, told)
    if case.present is not None:
        for one in case.present.value:
            if one not in have:
                yield case.present.span, f"{one} is not in the list", told[one]
    if case.absent is not None:
        for one in case.absent.value:
            if one in have:
                yield case.absent.span, f"{one} is at place {have.index(one) + 1}", ""
    if case.least is not None and len(have) < case.least.value:
        yield (
            case.least.span,
            f"the list has {counted(len(have), 'item')}, at least {case.least.value} are expected",
            "",
        )
    if case.status is not None and case.status.value != tried.status:
        yield case.status.span, f"the status is {tried.status}, expected {case.status.value}", ""


def _apart(have: Sequence[str], want: Sequence[str], told: Mapping[str, str]) -> tuple[str, str]:
    """The first place at which two lists differ, and what became of the item that should be there."""
    same = 0
    while same < min(len(have), len(want)) and have[same] == want[same]:
        same += 1
    got, wanted = (side[same] if same < len(side) else "nothing" for side in (have, want))
    return f"place {same + 1} is {got}, expected {wanted}; the list is {_ids(have)}", told.get(wanted, "")


def _ids(ids: Sequence[str]) -> str:
    return "[" + ", ".join(ids[:10]) + (", ..." if len(ids) > 10 else "") + "]"


def _fate(one: ExplainedItem) -> str:
    """An item's way out of the search, in words."""
    if one.result == "cut" and one.rank is not None and one.cut is not None:
        return (
            f"{one.id} was cut at step {one.step} by `{one.phase}`: its rank {one.rank:.4g} is at place {one.place}, "
            f"{one.kept} were kept down to {one.cut:.4g}"
        )
    if one.step is not None:
        return f"{one.id} was removed at step {one.step} by `{one.phase}`"
    words = {"unknown": "is not in the catalogue", "taken_down": "is taken down", "excluded": "is excluded"}
    rule = f" ({one.rule})" if one.rule else ""
    return f"{one.id} {words.get(one.result, f'was left out of the list by `{one.phase}`{rule}')}"


# ---- against the oracle --------------------------------------------------------------------------------------------


def _differs(plan: Plan, step: Watched, seed: int) -> str | None:
    """What differs in a step; "" where the selection was not compared, None where nothing differs."""
    steps = plan.resolved["steps"]
    assert isinstance(steps, list)
    phases = steps[step.t - 1]
    scored = plan.structure.steps[step.t - 1].run(step.inputs)
    live = (step.inputs.parent > -torch.inf).cpu().numpy()
    grid = _grid(plan, step, seed, live)
    score, rank, kept = (one.cpu().numpy()[live] for one in (scored.score, scored.rank, step.kept))
    ranks = score_step(phases, grid, plan.operators)
    if not near(score, ranks.score):
        return "scores"
    assert grid.order is not None
    if str(phases["select"]) == "top()" and not phases["quota"] and not phases["prune"]:
        if not near(rank, ranks.rank):
            return "ranks"
        best = top(rank, grid.order, grid.code, step.codes, step.planned)
        return None if set(best.tolist()) == set(np.flatnonzero(kept.ravel()).tolist()) else "survivors"
    if kept.size > SMALL:
        return ""
    want = set(select_step(phases, grid, plan.operators, ranks).survivors[: step.planned])
    got = set(zip(*(at.tolist() for at in np.nonzero(kept)), strict=True))
    if got == want:
        return None
    close = len(got) == len(want) and near(
        *(np.sort(np.array([ranks.rank[at] for at in one], np.float32)) for one in (got, want))
    )
    return None if close else "survivors"


def _grid(plan: Plan, step: Watched, seed: int, live: npt.NDArray[np.bool_]) -> Grid:
    """A step's inputs for the oracle, without tombstones."""
    inputs, program = step.inputs, plan.structure.steps[step.t - 1]

    code, legal, prefix = (one.cpu().numpy()[live] for one in (inputs.code, inputs.legal, step.prefix))
    none = np.zeros_like(legal)
    extra = {}
    for name, value in inputs.extra.items():
        column = value.cpu().numpy()[live]
        if column.ndim == 1:
            column = np.broadcast_to(column[:, None], code.shape)
        elif column.shape != code.shape or name.startswith("head."):
            column = np.take_along_axis(column, code, axis=1)
        extra[name] = column
    return Grid(
        logits=inputs.logits.float().cpu().numpy()[live],
        code=code,
        legal=legal,
        trie=legal if inputs.trie is None else inputs.trie.cpu().numpy()[live],
        seen=none if inputs.seen is None else inputs.seen.cpu().numpy()[live],
        excluded=none if inputs.excluded is None else inputs.excluded.cpu().numpy()[live],
        parent=inputs.parent.cpu().numpy()[live],
        log_norm=None if inputs.log_norm is None else inputs.log_norm.float().cpu().numpy()[live],
        params=dict(zip(plan.structure.params, plan.params, strict=True)),
        step=step.t,
        width=plan.widths[step.t - 1],
        order=step.order.cpu().numpy()[live],
        prefix=prefix,
        carry=None if inputs.carry is None else inputs.carry.cpu().numpy()[live],
        noise=drawn(program, prefix, code, step.t, seed),
        extra=extra,
        vocab=step.codes,
    )
