"""Admission: everything that a request will ever need is looked up once, here, from one snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from app.config import Deployment
from app.core import Context, History, HistoryIds, Inputs, Level, Request
from app.errors import InvalidRequest
from app.policies.assign import Assignment, Facts, Traffic, assign
from app.policies.plan import Plan
from app.runtime.fields import Fields, fields_of
from app.runtime.job import plan_rows
from app.runtime.snapshot import DeadNodes, Snapshot
from app.runtime.status import utc_seconds

ARM_PATH: Final = "header x-widebeam-arm"


class Choice(NamedTuple):
    """What serves a request: its plan, the rows that this plans at each step (`job.plan_rows`), and why.

    load  the level that the plan is of; None where its policy is the same at all levels · level: of its admission
    """

    plan: Plan
    planned: tuple[int, ...]
    assignment: Assignment
    load: Level | None
    level: Level


class Admitted(NamedTuple):
    """A request's own data under a snapshot; see `job.Job` for its members. assignment, load, level: see
    `Choice`."""

    inputs: Inputs
    excluded: DeadNodes | None
    seen: DeadNodes | None
    unknown_history: int
    unknown_exclude: int
    assignment: Assignment
    fields: Fields
    load: Level | None
    level: Level


@dataclass(frozen=True, slots=True)
class Admission:
    """Turns requests into jobs' data. Pure: it reads a snapshot and a request, and queues nothing."""

    deployment: Deployment
    wall: Callable[[], float] = utc_seconds
    """Unix seconds: ramps of experiments are moments in time."""

    def choose(self, request: Request, snapshot: Snapshot, level: Level = "normal") -> Choice:
        """The plan of the request's arms, or of the policy that it names, at a load level: the request's own, where it
        is one that is asked again.

        Raises InvalidRequest for k, for an unknown policy or arm, and for naming one where the deployment does not
        allow it.
        """
        limits = snapshot.contract.limits
        if not 1 <= request.k <= limits.k:
            raise InvalidRequest(f"k is {request.k}; 1 to {limits.k} are possible (limits.k)", path="$.k")
        assignment = self._named(request, snapshot) if request.policy is not None else self._assigned(request, snapshot)
        plan = assignment.plan
        if plan is None:
            name = request.policy or snapshot.policies.default
            raise InvalidRequest(f"there is no policy `{name}`", path="$.policy")
        level = request.load or level
        own, load = plan.at(level), level if plan.levels else None
        return Choice(own, plan_rows(own, snapshot.contract, snapshot.trie.prefixes), assignment, load, level)

    def _named(self, request: Request, snapshot: Snapshot) -> Assignment:
        """A request that names its policy is in no experiment."""
        if not self.deployment.server.policy_override:
            raise InvalidRequest("this deployment does not let requests name their policy", path="$.policy")
        if request.arms:
            raise InvalidRequest("give a policy or an arm, not both", path=ARM_PATH)
        return Assignment(snapshot.plan(request.policy or ""))

    def _assigned(self, request: Request, snapshot: Snapshot) -> Assignment:
        traffic = snapshot.policies.traffic
        if request.arms:
            self._check_arms(request.arms, traffic)
        if not traffic.layers and traffic.holdout is None:
            return Assignment(traffic.default)
        facts = Facts(request.user_id, request.request_id, request.ctx, request.user)
        return assign(traffic, facts, self.wall(), snapshot.killed, request.arms)

    def _check_arms(self, arms: Mapping[str, str], traffic: Traffic) -> None:
        if not self.deployment.server.arm_override:
            raise InvalidRequest("this deployment does not let requests choose an arm", path=ARM_PATH)
        known = traffic.experiments
        for name, arm in arms.items():
            if name not in known:
                raise InvalidRequest(f"there is no experiment `{name}`", path=ARM_PATH)
            if known[name].arm(arm) is None:
                raise InvalidRequest(f"experiment `{name}` has no arm `{arm}`", path=ARM_PATH)

    def admit(self, request: Request, choice: Choice, snapshot: Snapshot) -> Admitted:
        """Map ids by the snapshot's vocab and prepare the model's inputs.

        Ids that the vocab does not know are skipped and counted. Raises InvalidRequest with the field's path.
        """
        vocab, plan = snapshot.vocab, choice.plan
        fields = fields_of(request, plan.policy, plan.asks, snapshot.contract.request)
        excluded_items, unknown_exclude = vocab.known(request.exclude)
        context: Context
        history_items, unknown_history = np.empty(0, np.int64), 0
        if isinstance(request.context, HistoryIds):
            history_items, unknown_history = vocab.known(request.context.ids)
            context = History(vocab.codes.take(history_items, axis=0))
        else:
            context = request.context
        try:
            inputs = snapshot.engine.prepare(context)
        except InvalidRequest as error:
            if unknown_history and not len(history_items):  # what the model misses, the catalogue does not know
                message = f"{error.message}; no item of the history is in the catalogue"
                raise InvalidRequest(message, path="$.context.history") from None
            raise
        needs_seen = plan.seen
        seen_items = np.concatenate((excluded_items, history_items)) if needs_seen else excluded_items[:0]
        return Admitted(
            inputs=inputs,
            excluded=snapshot.excluding(excluded_items),
            seen=snapshot.excluding(seen_items) if needs_seen else None,
            unknown_history=unknown_history,
            unknown_exclude=unknown_exclude,
            assignment=choice.assignment,
            fields=fields,
            load=choice.load,
            level=choice.level,
        )
