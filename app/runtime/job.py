"""A request between admission and answer, and the batches that it travels in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from app.core import Contract, Inputs, Ranked, Request
from app.errors import WidebeamError
from app.policies.plan import Plan
from app.runtime.fields import Fields
from app.runtime.snapshot import DeadNodes, Snapshot


class Leaving(Protocol):
    """What the engine thread may ask a ticket: whether its request should leave the batch, and why."""

    def gone(self, now: float) -> WidebeamError | None:
        """Expired or Cancelled, else None. Safe to call from any thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """An admitted request with everything pinned; nothing below looks at "current" anything again.

    planned   rows of its decode batches: planned[t - 1] rows enter step t, planned[L] survive the last one
    excluded  from `exclude`: always applied · seen: `exclude` and history, for policies that say `not seen`
    admitted  monotonic seconds
    fields    what the plan asks of the request's own fields (`plan.asks`)
    """

    request: Request
    ticket: Leaving
    snapshot: Snapshot
    plan: Plan
    inputs: Inputs
    planned: tuple[int, ...]
    excluded: DeadNodes | None
    seen: DeadNodes | None
    admitted: float
    fields: Fields = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The most rows that it brings into one decode step: its share of the row budget."""
        return max(self.planned[:-1])


def plan_rows(plan: Plan, contract: Contract, prefixes: tuple[int, ...]) -> tuple[int, ...]:
    """w(1) = 1; w(t + 1) = min(K_t, w(t) * C_t, and under the trie the catalogue's prefixes of depth t).

    prefixes [L]: prefixes of depth 1..L. Known on the host before anything runs, so no step asks the device.
    """
    rows = [1]
    for shape, width, program, depth in zip(contract.steps, plan.widths, plan.structure.steps, prefixes, strict=True):
        most = min(width, rows[-1] * shape.codes)
        rows.append(min(most, depth) if program.children else most)
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class Batch:
    """Jobs that decode together: all of one batch key (weights slot, vocab version)."""

    jobs: tuple[Job, ...]

    @property
    def snapshot(self) -> Snapshot:
        """Any of the jobs' snapshots: they share engine and vocab, and differ in policies at most."""
        return self.jobs[0].snapshot


class Served(NamedTuple):
    """One job's end as the engine thread reports it.

    began  monotonic seconds when its batch started · rows: of the batch's widest step · timings in milliseconds
    """

    job: Job
    result: Ranked | WidebeamError
    began: float
    context_ms: float
    decode_ms: float
    rows: int


def seed_of(request: Request) -> int:
    """The seed of a request: its own, or one made of its id."""
    return request.seed if request.seed is not None else default_seed(request.request_id)


def default_seed(request_id: str) -> int:
    """The seed of a request that brings none: the same id gives the same answer on every replica. 0..2**53 - 1."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest()) >> 11
