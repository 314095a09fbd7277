"""Candidate selection of one step over a whole batch: one launch a structure, over that structure's row segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.core import StepOutput, Survivors
from app.errors import Fault, WidebeamError
from app.ops.selection import (
    Chosen,
    Ranked,
    child_of,
    children_bits,
    count_bad,
    one_read,
    pack,
    ranked_ready,
    sanitise,
    select_logits,
    select_ranked,
    select_top,
)
from app.ops.trie import Children, children, contains, dense
from app.ops.upload import upload, upload_ints
from app.policies.plan import StepInputs, StepProgram, Structure
from app.runtime.fields import FieldTable
from app.runtime.job import Job, seed_of
from app.runtime.snapshot import DeadNodes, DeviceTrie
from app.runtime.state import BatchState, placed

BAD_SHARE = 0.01
"""A request with more than this share of bad logits in a step fails alone (policy-language 0)."""


class StepResult(NamedTuple):
    """survivors · counts [2 R + 1] int64, for `judge`: bad logits of each request, its live rows, bad scores of all.
    They stay on the device until the batch ends. failed: requests whose policy's program raised, and what; they have
    no survivors."""

    survivors: Survivors
    counts: Tensor
    failed: Mapping[int, WidebeamError]


class Verdict(NamedTuple):
    """bad_logits, bad_scores: totals of a batch · broken: requests over BAD_SHARE, and the first step of each."""

    bad_logits: int
    bad_scores: int
    broken: Mapping[int, int]


def judge(counts: Tensor, sizes: Sequence[int]) -> Verdict:
    """What the steps of a batch counted: [steps, 2 R + 1], a row each, on the host; sizes: C_1..C_L."""
    broken: dict[int, int] = {}
    bad_logits, bad_scores = 0, 0
    for t, (found, codes) in enumerate(zip(counts.tolist(), sizes, strict=True), 1):
        requests = len(found) // 2
        wrong, alive = found[:requests], found[requests:-1]
        bad_logits, bad_scores = bad_logits + sum(wrong), bad_scores + found[-1]
        for request, (w, a) in enumerate(zip(wrong, alive, strict=True)):
            if w > BAD_SHARE * codes * max(1, a):
                broken.setdefault(request, t)
    return Verdict(bad_logits, bad_scores, broken)


@dataclass(frozen=True, slots=True)
class _Segment:
    """The rows of one structure at one step: its requests (batch numbers), and their rows laid end to end.

    program  of the step · keep: planned survivors of each request
    rows     [n] int64 row numbers, or None where they are all rows of the batch in order
    """

    structure: Structure
    program: StepProgram
    requests: tuple[int, ...]
    keep: tuple[int, ...]
    row_start: tuple[int, ...]
    rows: Tensor | None


class Selection:
    """Selection for one batch. Parameter tables, widths and dead prefixes go to the device once, and only where a step
    reads them; `select` asks nothing of the host but row counts that were known before."""

    def __init__(self, jobs: Sequence[Job], trie: DeviceTrie, sizes: tuple[int, ...], device: torch.device) -> None:
        self._jobs, self._trie, self._sizes, self._device = jobs, trie, sizes, device
        self._excluded = self._dead([job.excluded for job in jobs])
        self._carry: dict[int, Tensor] = {}  # of a request's rows, where its policy hands a number on
        self._failed: dict[int, WidebeamError] = {}

    @cached_property
    def _params(self) -> dict[str, Tensor]:
        plans = [job.plan for job in self._jobs]
        return {
            structure: _table([plan.params if plan.structure.id == structure else () for plan in plans], self._device)
            for structure in _by_structure(range(len(plans)), self._jobs)
        }

    @cached_property
    def _width(self) -> Tensor:
        return _table([job.plan.widths for job in self._jobs], self._device)

    @cached_property
    def _seen(self) -> list[Tensor]:
        return self._dead([job.seen for job in self._jobs])

    @cached_property
    def _fields(self) -> FieldTable:
        return FieldTable([job.fields for job in self._jobs], self._device)

    @cached_property
    def _seed(self) -> Tensor:
        return upload_ints([seed_of(job.request) for job in self._jobs], torch.int64, self._device)

    def _dead(self, sets: Sequence[DeadNodes | None]) -> list[Tensor]:
        """The dead prefixes of each step."""
        return [_dead_keys(sets, t, self._trie.nodes, self._device) for t in range(len(self._sizes))]

    def needs_full(self, t: int) -> bool:
        """Whether some policy of the batch normalises step t over everything the model can emit."""
        return any(job.plan.structure.steps[t - 1].normalize == "full" for job in self._jobs)

    def select(self, t: int, output: StepOutput, state: BatchState, keep: Sequence[int]) -> StepResult:
        """The exact top keep[r] candidates of each request under its own policy, order T0.

        keep [R] host integers: planned rows of the next step; 0 for a request that has left.
        """
        parts: list[tuple[_Segment, Survivors]] = []
        bad: Tensor | None = None
        broken: list[Tensor] = []
        ranked: list[_Segment] = []
        for segment in self._segments(t, state, keep):
            if _takes_logits(segment, output):
                survivors, wrong = self._from_logits(t, segment, output, state)
            elif _takes_expressions(segment, output):
                survivors, wrong, scores = self._from_expressions(t, segment, output, state)
                broken.append(scores)
            else:
                ranked.append(segment)
                continue
            parts.append((segment, survivors))
            if segment.rows is not None:
                every = wrong.new_zeros(len(output.logits)) if bad is None else bad
                wrong = every.index_copy(0, segment.rows, wrong)
            bad = wrong
        if ranked:
            logits, bad = sanitise(output.logits)
        before = dict(self._failed)
        for segment in ranked:
            try:
                survivors, wrong = self._from_ranks(t, segment, logits, output, state)
            except Exception as error:  # noqa: BLE001  an operator of another package, say: whose policy it is, fails
                self._failed |= dict.fromkeys(segment.requests, Fault.of(error))
                continue
            parts.append((segment, survivors))
            broken.append(wrong)
        failed = {request: error for request, error in self._failed.items() if request not in before}
        counts = count_bad(bad, broken, state.score, state.start)
        return StepResult(self._together(parts, keep), counts, failed)

    def _from_logits(
        self, t: int, segment: _Segment, output: StepOutput, state: BatchState
    ) -> tuple[Survivors, Tensor]:
        """Survivors of a step whose program follows the logits, and how many of each row's are bad [n]."""
        best = select_logits(
            *_operands(segment, output, state),
            normalize=_over(segment, output),
            mask=self._mask(t, segment, output, state),
            norm=_norm(segment, output),
        )
        return self._chosen(t, segment, best, output, state), best.bad

    def _from_expressions(
        self, t: int, segment: _Segment, output: StepOutput, state: BatchState
    ) -> tuple[Survivors, Tensor, Tensor]:
        """Survivors of a step whose program the kernels compute, and how many logits and scores of each row are bad
        [n]."""
        program, own = segment.program, segment.program.generated
        assert own is not None, "asked before"
        whole = bool(own.columns) or program.masked or not program.children
        inputs = self._inputs(t, segment, output.logits, output, state, whole=whole)[0]
        values, columns = own.table(inputs, segment.structure.params), own.dense(inputs, children=program.children)
        best, broken, rank = select_ranked(
            *_operands(segment, output, state),
            normalize=_over(segment, output),
            ranked=Ranked(own.definitions, values, columns, own.noise(inputs), own.carries),
            mask=self._mask(t, segment, output, state, inputs if whole else None),
            norm=_norm(segment, output),
        )
        if own.carries:
            self._carry.update(zip(segment.requests, torch.split(rank, list(segment.keep)), strict=True))
        return self._chosen(t, segment, best, output, state), best.bad, broken

    def _chosen(self, t: int, segment: _Segment, best: Chosen, output: StepOutput, state: BatchState) -> Survivors:
        """What the kernels chose and prune leaves, with its trie nodes."""
        rows, trie = segment.rows, self._trie
        if segment.program.after is not None:
            best = self._pruned(t, segment, best, output, state)
        parent = best.parent
        if rows is not None:
            parent = rows[parent.clamp(min=0)].masked_fill_(parent < 0, -1)
        node = child_of(trie.first, trie.code, state.node, parent, best.code, trie.widest[t - 1])
        return Survivors(parent, best.code, best.order, best.score, node, best.n_valid)

    def _pruned(self, t: int, segment: _Segment, best: Chosen, output: StepOutput, state: BatchState) -> Chosen:
        """What prune leaves, tombstones for the rest: the end of each request."""
        after = segment.program.after
        assert after is not None, "asked before"
        inputs = self._inputs(t, segment, output.logits, output, state, whole=False)[0]
        number, _, first = placed(_starts(segment.keep), self._device)
        leading = best.score[first.index_select(0, number)]
        stay = after(inputs, best.score, leading, best.parent.clamp(min=0)) & (best.parent >= 0)
        n_valid = torch.zeros_like(best.n_valid).scatter_add_(0, number, stay.to(torch.int64))
        return best._replace(
            parent=torch.where(stay, best.parent, -1),
            code=torch.where(stay, best.code, -1),
            score=torch.where(stay, best.score, -torch.inf),
            n_valid=n_valid,
        )

    def _from_ranks(
        self, t: int, segment: _Segment, logits: Tensor, output: StepOutput, state: BatchState
    ) -> tuple[Survivors, Tensor]:
        """Survivors of a step by the ranks of its program, and how many scores of each row are bad [n]. logits: all
        finite or -inf."""
        inputs, child = self._inputs(t, segment, logits, output, state)
        scored = segment.program.run(inputs)
        order = _take(state.order, segment.rows)
        best = select_top(scored.rank, inputs.code, order, self._sizes[t - 1], segment.row_start, segment.keep)
        at, column = best.parent, best.column
        full = self._device.type == "cpu" and best.n_valid.tolist() == list(segment.keep)  # elsewhere it would wait
        if not full:
            at, column = at.clamp(min=0), column.clamp(min=0)
        if scored.carry is not None:
            carried = torch.split(scored.carry[at, column], list(segment.keep))
            self._carry.update(zip(segment.requests, carried, strict=True))
        survivors = Survivors(
            parent=at if segment.rows is None else segment.rows[at],
            code=inputs.code[at, column],
            order=best.order,
            score=scored.score[at, column],
            node=child[at, column],
            n_valid=best.n_valid,
        )
        if not full:
            dead = best.parent < 0
            for values in (survivors.parent, survivors.code, survivors.node):
                values.masked_fill_(dead, -1)
            survivors.score.masked_fill_(dead, -torch.inf)
        return survivors, scored.bad

    def _mask(
        self, t: int, segment: _Segment, output: StepOutput, state: BatchState, inputs: StepInputs | None = None
    ) -> Tensor | None:
        """What may be selected, a bit for each code; None = everything. inputs: where they were made before."""
        program, rows, trie = segment.program, segment.rows, self._trie
        dead = self._excluded[t - 1]
        if not program.masked and program.children:  # then nobody needs the children one by one
            node, request = _take(state.node, rows), _take(state.request, rows)
            widest, size = trie.widest[t - 1], self._sizes[t - 1]
            return children_bits(
                trie.first, trie.code, node, widest, size, dead=dead, request=request, nodes=trie.nodes
            )
        if not program.masked and not len(dead):
            return None
        inputs = inputs or self._inputs(t, segment, output.logits, output, state)[0]
        legal = None if program.legal is None else program.legal(inputs)
        return None if legal is None else pack(inputs.code if program.children else None, legal, self._sizes[t - 1])

    def look(self, t: int, output: StepOutput, state: BatchState) -> tuple[StepInputs, Tensor]:
        """What `select` would give the program of a batch of one request, and each candidate's trie node [n, F]."""
        [segment] = self._segments(t, state, keep=(0,))  # which nothing is taken of
        return self._inputs(t, segment, sanitise(output.logits)[0], output, state)

    def _together(self, parts: list[tuple[_Segment, Survivors]], keep: Sequence[int]) -> Survivors:
        """The survivors of all segments, flat over the requests of the batch."""
        if len(parts) == 1 and len(parts[0][0].requests) == len(keep):
            return parts[0][1]
        out_start, device = _starts(keep), self._device
        parent = torch.full((out_start[-1],), -1, dtype=torch.int64, device=device)
        code, node, order = torch.full_like(parent, -1), torch.full_like(parent, -1), torch.zeros_like(parent)
        score = torch.full((out_start[-1],), -torch.inf, device=device)
        n_valid = torch.zeros(len(keep), dtype=torch.int64, device=device)
        whole = Survivors(parent, code, order, score, node, n_valid)
        for segment, part in parts:
            into = _spread(segment, out_start, device)
            for mine, values in zip(whole[:-1], part[:-1], strict=True):
                mine[into] = values
            n_valid[upload_ints(segment.requests, torch.int64, device)] = part.n_valid
        return whole

    def _segments(self, t: int, state: BatchState, keep: Sequence[int]) -> list[_Segment]:
        """Requests by structure, in batch order; requests without rows are in none, nor are those that have failed."""
        present = [r for r in range(len(self._jobs)) if state.row_start[r + 1] > state.row_start[r]]
        present = [r for r in present if r not in self._failed]
        return [self._segment(t, requests, state, keep) for requests in _by_structure(present, self._jobs).values()]

    def _segment(self, t: int, requests: Sequence[int], state: BatchState, keep: Sequence[int]) -> _Segment:
        counts = [state.row_start[request + 1] - state.row_start[request] for request in requests]
        rows: Tensor | None = None
        if sum(counts) != state.row_start[-1]:
            ranges = [np.arange(state.row_start[request], state.row_start[request + 1]) for request in requests]
            rows = upload(torch.from_numpy(np.concatenate(ranges)), self._device)
        structure, kept = self._jobs[requests[0]].plan.structure, tuple(keep[request] for request in requests)
        return _Segment(structure, structure.steps[t - 1], tuple(requests), kept, _starts(counts), rows)

    def _inputs(
        self, t: int, segment: _Segment, logits: Tensor, output: StepOutput, state: BatchState, *, whole: bool = True
    ) -> tuple[StepInputs, Tensor]:
        """A program's inputs, and the trie node of each candidate [n, F]; F = 0 where not the `whole` is asked for."""
        program, rows = segment.program, segment.rows
        node, request = _take(state.node, rows), _take(state.request, rows)
        parent, log_norm, uses = _take(state.score, rows), output.log_norm, program.uses
        grouped = "request" in uses
        found = self._candidates(t, program, node) if whole else _no_children(node)
        # a tombstone has node -1 and so no children; with all codes as candidates it must be masked
        legal = found.legal if program.children else found.legal & (parent > -torch.inf).unsqueeze(1)
        inputs = StepInputs(
            logits=_take(logits, rows),
            log_norm=None if log_norm is None else _take(log_norm, rows),
            code=found.code,
            legal=legal,
            trie=found.node >= 0 if "trie" in uses else None,
            seen=self._in_set(self._seen[t - 1], found.node, request) if "seen" in uses else None,
            excluded=self._in_set(self._excluded[t - 1], found.node, request) if len(self._excluded[t - 1]) else None,
            parent=parent,
            params=self._params[segment.structure.id].index_select(0, request),
            step=t,
            width=self._width[:, t - 1].index_select(0, request),
            request=placed(segment.row_start, self._device).number if grouped else None,
            order=_take(state.order, rows) if grouped else None,
            widths=tuple(self._jobs[one].plan.widths[t - 1] for one in segment.requests) if grouped else (),
            rows=tuple(np.diff(segment.row_start).tolist()) if grouped else (),
            prefix=_take(state.sids, rows) if "prefix" in uses else None,
            seed=self._seed.index_select(0, request) if "seed" in uses else None,
            carry=self._handed(t, segment) if "carry" in uses else None,
            extra={
                **{name: _take(output.heads[name[5:]], rows) for name in uses if name.startswith("head.")},
                **self._fields.columns(uses, request),
                **{
                    name: self._column(column, found.node)
                    for name, column in self._trie.columns.items()
                    if name in uses
                },
            },
        )
        return inputs, found.node

    def _handed(self, t: int, segment: _Segment) -> Tensor | None:
        """What the step before handed on to a segment's rows [n]; None where it hands nothing on."""
        if t == 1 or not segment.structure.steps[t - 2].carries:
            return None
        return torch.cat([self._carry[one] for one in segment.requests])

    def _candidates(self, t: int, program: StepProgram, node: Tensor) -> Children:
        first, code, widest = self._trie.first, self._trie.code, self._trie.widest[t - 1]
        if program.children:
            return children(first, code, node, widest)
        return dense(first, code, node, widest, self._sizes[t - 1])

    def _column(self, column: Tensor, node: Tensor) -> Tensor:
        """What is declared of candidates [n, F]; node -1 is the column's last entry."""
        found = column[node]
        return found.to(torch.int64) if found.dtype == torch.int32 else found

    def _in_set(self, keys: Tensor, node: Tensor, request: Tensor) -> Tensor:
        return contains(keys, node, request, self._trie.nodes)


def _takes_logits(segment: _Segment, output: StepOutput) -> bool:
    """Whether the survivors of a segment come from one read of the logits."""
    follows = segment.program.legal is not None and segment.program.generated is None
    return follows and one_read(output.logits, segment.row_start, segment.keep)


def _takes_expressions(segment: _Segment, output: StepOutput) -> bool:
    """Whether the kernels compute the ranks of a segment's program, and have been compiled for it."""
    own = segment.program.generated
    return own is not None and ranked_ready(
        output.logits, segment.row_start, segment.keep, normalize=_over(segment, output), definitions=own.definitions
    )


def _operands(
    segment: _Segment, output: StepOutput, state: BatchState
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...], tuple[int, ...]]:
    """What the kernels take of a segment's rows: logits, parent, order, row_start, keep."""
    logits, parent, order = (_take(one, segment.rows) for one in (output.logits, state.score, state.order))
    return logits, parent, order, segment.row_start, segment.keep


def _over(segment: _Segment, output: StepOutput) -> str:
    """What log-probabilities are normalised over, as the kernels have it."""
    if segment.program.normalize != "full":
        return segment.program.normalize
    return "step" if output.log_norm is None else "given"


def _norm(segment: _Segment, output: StepOutput) -> Tensor | None:
    """The log-sum-exp of each row, where `_over` is "given"."""
    given = output.log_norm if segment.program.normalize == "full" else None
    return None if given is None else _take(given, segment.rows)


def _no_children(node: Tensor) -> Children:
    """No candidates: what there is of rows alone."""
    none = node.new_empty(len(node), 0)
    return Children(none, none, none.bool())


def _by_structure(requests: Iterable[int], jobs: Sequence[Job]) -> dict[str, list[int]]:
    """Requests by the structure of their plan, in batch order."""
    groups: dict[str, list[int]] = {}
    for request in requests:
        groups.setdefault(jobs[request].plan.structure.id, []).append(request)
    return groups


def _table(values: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """[R, columns] float32, short rows filled with 0."""
    table = np.zeros((len(values), max(map(len, values))), np.float32)
    for row, given in zip(table, values, strict=True):
        row[: len(given)] = given
    return upload(torch.from_numpy(table), device)


def _take(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values.index_select(0, rows)


def _starts(counts: Sequence[int]) -> tuple[int, ...]:
    return (0, *accumulate(counts))


def _spread(segment: _Segment, out_start: Sequence[int], device: torch.device) -> Tensor:
    """Where a segment's survivors go in the flat batch: [sum of its keep] int64."""
    ranges = [np.arange(out_start[request], out_start[request + 1]) for request in segment.requests]
    return upload(torch.from_numpy(np.concatenate(ranges)), device)


def _dead_keys(sets: Sequence[DeadNodes | None], step: int, nodes: int, device: torch.device) -> Tensor:
    """The dead prefixes of a step of all requests as sorted keys request * nodes + node."""
    parts = [request * nodes + dead.nodes[step] for request, dead in enumerate(sets) if dead is not None]
    return upload(torch.from_numpy(np.concatenate(parts)), device) if parts else _no_keys(device)


@lru_cache(maxsize=16)
def _no_keys(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=device)
