"""Admission: everything that a request will ever need is looked up once, here, from one snapshot."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from app.config import Deployment
from app.core import Context, History, HistoryIds, Inputs, Request
from app.errors import InvalidRequest
from app.policies.plan import Plan
from app.runtime.job import DeadNodes, Int64s, plan_rows
from app.runtime.snapshot import Snapshot
from app.vocab.vocab import Vocab


class Admitted(NamedTuple):
    """A request's own data under a snapshot; see `job.Job` for the fields."""

    inputs: Inputs
    excluded: DeadNodes | None
    seen: DeadNodes | None
    unknown_history: int
    unknown_exclude: int


@dataclass(frozen=True, slots=True)
class Admission:
    """Turns requests into jobs' data. Pure: it reads a snapshot and a request, and queues nothing."""

    deployment: Deployment

    def plan(self, request: Request, snapshot: Snapshot) -> tuple[Plan, tuple[int, ...]]:
        """The policy's plan, and the rows that it plans at each step.

        Raises InvalidRequest for an unknown policy (or one named where the deployment does not allow it) and k.
        """
        limits = snapshot.contract.limits
        if not 1 <= request.k <= limits.k:
            raise InvalidRequest(f"k is {request.k}; 1 to {limits.k} are possible", path="$.k")
        if request.policy is not None and not self.deployment.server.policy_override:
            raise InvalidRequest("this deployment does not let requests name their policy", path="$.policy")
        name = request.policy or snapshot.policies.default
        plan = snapshot.plan(name)
        if plan is None:
            raise InvalidRequest(f"there is no policy `{name}`", path="$.policy")
        return plan, plan_rows(plan, snapshot.contract, snapshot.trie.prefixes)

    def admit(self, request: Request, plan: Plan, snapshot: Snapshot) -> Admitted:
        """Map ids by the snapshot's vocab and prepare the model's inputs.

        Ids that the vocab does not know are skipped and counted. Raises InvalidRequest with the field's path.
        """
        vocab = snapshot.vocab
        excluded_items, unknown_exclude = _known(vocab, request.exclude)
        context: Context
        history_items, unknown_history = np.empty(0, np.int64), 0
        if isinstance(request.context, HistoryIds):
            history_items, unknown_history = _known(vocab, request.context.ids)
            context = History(vocab.sids(history_items))
        else:
            context = request.context
        inputs = snapshot.engine.prepare(context)
        needs_seen = any("seen" in step.uses for step in plan.structure.steps)
        seen_items = np.concatenate((excluded_items, history_items)) if needs_seen else excluded_items[:0]
        return Admitted(
            inputs, dead_nodes(vocab, excluded_items), dead_nodes(vocab, seen_items), unknown_history, unknown_exclude
        )


def _known(vocab: Vocab, ids: tuple[str, ...]) -> tuple[Int64s, int]:
    """Item numbers of the ids that the vocab knows, in their order, and how many it does not know."""
    if not ids:
        return np.empty(0, np.int64), 0
    found = vocab.find(ids)
    known = found[found >= 0]
    return known, len(found) - len(known)


def dead_nodes(vocab: Vocab, items: Int64s) -> DeadNodes | None:
    """The prefixes that a set of items exhausts; None for no items."""
    if not len(items):
        return None
    unique = np.unique(items)
    return DeadNodes(unique, vocab.dead(unique))


def default_seed(request_id: str) -> int:
    """The seed of a request that brings none: the same id gives the same answer on every replica. 0..2**53 - 1."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest()) >> 11
