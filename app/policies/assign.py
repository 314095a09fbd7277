"""Who gets which arm: a pure function of the traffic, a request's fields, the wall clock and the kill list.

No state, no randomness: every replica with the same files gives the same answer (policy-language 3.8). Slots share a
layer among experiments, points share an experiment among arms; the two are hashed with different salts. An arm owns a
fixed home range of points and a ramp covers the first part of it, so raising coverage only adds people.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from app.policies.expr import number_text
from app.policies.identity import policy_id
from app.policies.plan import Plan

SLOTS = 10_000
POINTS = 1_000_000
DEFAULT_ARM = "default"
CONTROL = "control"
EVERYTHING = "*"
HOLDOUT = "holdout"

State = Literal["draft", "running", "paused", "stopped"]
Reason = Literal["assigned", "forced", "killed", "holdout", "not_covered", "where", "paused", "params"]
"""assigned, forced: the arm is served · killed: something else is served instead · the rest: the default is served,
since the unit is held out, not covered yet, not eligible, paused, or under a policy without the parameters."""


def u64(salt: str, unit: str) -> int:
    """The first 8 bytes, big-endian, of SHA-256("widebeam-bucket/1" 0x1F salt 0x1F unit)."""
    text = b"widebeam-bucket/1\x1f" + salt.encode() + b"\x1f" + unit.encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8])


def slot(salt: str, unit: str) -> int:
    """0..9999: a unit's place in a layer, or in the holdout."""
    return u64(salt, unit) * SLOTS >> 64


def point(salt: str, unit: str) -> int:
    """0..999999: a unit's place among the arms of an experiment."""
    return u64(salt, unit) * POINTS >> 64


class Facts(NamedTuple):
    """What assignment may read of a request."""

    user_id: str | None
    request_id: str
    ctx: Mapping[str, str]
    user: Mapping[str, float]

    def unit(self, name: str) -> str | None:
        """The value of a unit field: `user_id`, `request_id`, `device_id` (of `ctx`) or `ctx.NAME`."""
        if name == "user_id":
            return self.user_id
        return self.request_id if name == "request_id" else self.ctx.get(name.removeprefix("ctx.")) or None


@dataclass(frozen=True, slots=True)
class Condition:
    """A compiled `where`: its canonical text, its truth for a request, and the fields that it reads, ctx and user."""

    text: str
    test: Callable[[Facts], bool]
    fields: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Arm:
    """home [first, end) points · plan: the policy with the arm's parameters; None where the layer only sets these."""

    name: str
    weight: int
    home: tuple[int, int]
    plan: Plan | None
    params: Mapping[str, float]

    def covers(self, at: int, coverage: int) -> bool:
        """Whether point `at` lies in the covered first part of the home range; coverage in millionths."""
        first, end = self.home
        return first <= at < first + (end - first) * coverage // POINTS


class RampStep(NamedTuple):
    """From `since` (unix seconds) on, `coverage` millionths of each arm's home range."""

    since: float
    coverage: int


class Guard(NamedTuple):
    """An alert while `metric` of an arm has been above `above` for `seconds`."""

    metric: Literal["underfill_rate", "p99_ms"]
    above: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment of a layer, with everything bound. slots [first, end) of the layer's 10,000."""

    name: str
    layer: str
    slots: tuple[int, int]
    state: State
    salt: str
    where: Condition | None
    arms: tuple[Arm, ...]
    ramp: tuple[RampStep, ...] = ()
    guards: tuple[Guard, ...] = ()

    def coverage(self, now: float) -> int:
        """Millionths of each home range that are enrolled at wall-clock `now`; everything where there is no ramp."""
        if not self.ramp:
            return POINTS
        return next((step.coverage for step in reversed(self.ramp) if step.since <= now), 0)

    def arm(self, name: str) -> Arm | None:
        """An arm by name."""
        return next((arm for arm in self.arms if arm.name == name), None)

    def arm_at(self, unit: str, coverage: int) -> Arm | None:
        """The arm that covers a unit, or None."""
        at = point(self.salt, unit)
        return next((arm for arm in self.arms if arm.covers(at, coverage)), None)

    @property
    def content(self) -> list[object]:
        """Everything that decides who gets what, as JSON-ready data."""
        arms = [[arm.name, arm.weight, arm.plan.policy_id if arm.plan else None, {**arm.params}] for arm in self.arms]
        where = self.where.text if self.where else None
        return [self.name, self.slots, self.state, self.salt, where, arms, self.ramp, self.guards]

    @property
    def needs(self) -> frozenset[str]:
        """Parameters that some arm sets."""
        return frozenset(name for arm in self.arms for name in arm.params)


@dataclass(frozen=True, slots=True)
class Layer:
    """Experiments that exclude each other. surfaces: values of `ctx.surface` that it is for, () = all requests ·
    params: the parameters that it owns; None = it chooses the policy."""

    name: str
    salt: str
    unit: str
    surfaces: tuple[str, ...]
    params: tuple[str, ...] | None
    experiments: tuple[Experiment, ...] = ()

    def takes(self, facts: Facts) -> bool:
        """Whether the layer is for this request."""
        return not self.surfaces or facts.ctx.get("surface") in self.surfaces

    def experiment_at(self, at: int) -> Experiment | None:
        """The experiment that owns a slot; drafts and stopped ones own none."""
        live = (one for one in self.experiments if one.state in ("running", "paused"))
        return next((one for one in live if one.slots[0] <= at < one.slots[1]), None)


class Holdout(NamedTuple):
    """Units of the first `slots` slots take part in no experiment and get `plan`."""

    slots: int
    salt: str
    unit: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Traffic:
    """How requests are shared among policies. layers: those that choose the policy first."""

    default: Plan | None
    holdout: Holdout | None = None
    layers: tuple[Layer, ...] = ()
    _overlaid: dict[tuple[str, str, str, tuple[tuple[str, float], ...]], Plan] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def experiments(self) -> Mapping[str, Experiment]:
        """Every experiment by name."""
        return {one.name: one for layer in self.layers for one in layer.experiments}

    @property
    def id(self) -> str:
        """Content id: equal for traffic that serves every request alike."""
        held = self.holdout
        parts: list[object] = [self.default.policy_id if self.default else None]
        parts.append([held.slots, held.salt, held.unit, held.plan.policy_id] if held else None)
        for layer in self.layers:
            parts.append([layer.name, layer.salt, layer.unit, layer.surfaces, layer.params])
            parts += [one.content for one in layer.experiments]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    def overlay(self, plan: Plan, params: Mapping[str, float]) -> Plan:
        """`overlay`, made once for each plan and parameters; there are finitely many arms."""
        if not params:
            return plan
        key = (plan.policy, plan.policy_id, plan.plan_id, tuple(sorted(params.items())))
        if key not in self._overlaid:
            self._overlaid[key] = overlay(plan, params)
        return self._overlaid[key]


def overlay(plan: Plan, params: Mapping[str, float]) -> Plan:
    """The plan with other parameter values: same structure, nothing compiled, an id of its own. `params` must be names
    of the structure's table."""
    values = tuple(params.get(name, value) for name, value in zip(plan.structure.params, plan.params, strict=True))
    if values == plan.params:
        return plan
    table = plan.resolved["params"]
    assert isinstance(table, Mapping)
    changed = {name: {**table[name], "value": number_text(value)} for name, value in params.items()}
    resolved = {**plan.resolved, "params": {**table, **changed}}
    new_id = policy_id(resolved)

    def changed_(one: Plan) -> Plan:
        return replace(one, params=values, resolved=resolved, policy_id=new_id)

    return replace(changed_(plan), levels={level: changed_(one) for level, one in plan.levels.items()})


class Decision(NamedTuple):
    """One layer's decision for a request. assigned: the arm that the unit belongs to, None = none · arm: the one that
    was served, `default` where that is no arm · coverage 0..1."""

    layer: str
    name: str
    unit: str | None
    assigned: str | None
    arm: str
    reason: Reason
    coverage: float | None = None


class Assignment(NamedTuple):
    """The plan that serves a request, and why. unassigned: experiments that could not look at it for want of a unit."""

    plan: Plan | None
    decisions: tuple[Decision, ...] = ()
    unassigned: tuple[str, ...] = ()


def assign(
    traffic: Traffic,
    facts: Facts,
    now: float,
    killed: Collection[str] = (),
    forced: Mapping[str, str] | None = None,
) -> Assignment:
    """Kill list, holdout, then layer by layer: slot, experiment, `where`, arm; parameters of other layers last.

    now: wall-clock seconds · killed: names of experiments and policies, or `*` · forced: arm by experiment, for tests
    by hand; names that do not exist are the caller's to refuse.
    """
    if EVERYTHING in killed or traffic.default is None:
        return Assignment(traffic.default)
    if not forced and (held := _held_out(traffic, facts, killed)) is not None:
        return held
    plan, decisions, unassigned = traffic.default, list[Decision](), list[str]()
    for layer in traffic.layers:
        if not layer.experiments or not (layer.takes(facts) or forced):
            continue
        unit = facts.unit(layer.unit)
        choice = _forced(layer, unit, forced or {})
        if choice is None and not layer.takes(facts):
            continue
        if choice is None and unit is None:
            unassigned += [one.name for one in layer.experiments if one.state == "running"]
            continue
        choice = choice or _choose(layer, facts, unit or "", now, plan)
        if choice is not None:
            plan, decision = _serve(traffic, plan, *choice, killed)
            decisions.append(decision)
    return Assignment(plan, tuple(decisions), tuple(unassigned))


Choice = tuple[Experiment, "Arm | None", Decision]


def _held_out(traffic: Traffic, facts: Facts, killed: Collection[str]) -> Assignment | None:
    held = traffic.holdout
    unit = facts.unit(held.unit) if held is not None else None
    if held is None or unit is None or slot(held.salt, unit) >= held.slots:
        return None
    plan = traffic.default if _killed(held.plan, traffic, killed) else held.plan
    return Assignment(plan, (Decision("", HOLDOUT, unit, None, HOLDOUT, "holdout"),))


def _killed(plan: Plan, traffic: Traffic, killed: Collection[str]) -> bool:
    """The default policy cannot be killed: there would be nothing in its place."""
    return plan.policy in killed and (traffic.default is None or plan.policy != traffic.default.policy)


def _forced(layer: Layer, unit: str | None, forced: Mapping[str, str]) -> Choice | None:
    for one in layer.experiments:
        arm = one.arm(forced[one.name]) if one.name in forced else None
        if arm is not None:
            return one, arm, Decision(layer.name, one.name, unit, arm.name, arm.name, "forced")
    return None


def _choose(layer: Layer, facts: Facts, unit: str, now: float, plan: Plan) -> Choice | None:
    """The layer's experiment for this unit, and its arm where the unit gets one."""
    one = layer.experiment_at(slot(layer.salt, unit))
    if one is None:
        return None
    coverage = one.coverage(now)
    # eligibility is a matter of the whole experiment, before the arms are looked at, so that these stay in balance
    if one.where is not None and not one.where.test(facts):
        reason: Reason = "where"
    elif layer.params is not None and not one.needs <= set(plan.structure.params):
        reason = "params"
    elif one.state == "paused":
        reason = "paused"
    else:
        arm = one.arm_at(unit, coverage)
        if arm is not None:
            return one, arm, _decision(layer, one, unit, arm.name, "assigned", coverage)
        reason = "not_covered"
    return one, None, _decision(layer, one, unit, None, reason, coverage)


def _decision(layer: Layer, one: Experiment, unit: str, arm: str | None, reason: Reason, coverage: int) -> Decision:
    return Decision(layer.name, one.name, unit, arm, arm or DEFAULT_ARM, reason, coverage / POINTS)


def _serve(
    traffic: Traffic, plan: Plan, one: Experiment, arm: Arm | None, decision: Decision, killed: Collection[str]
) -> tuple[Plan, Decision]:
    """The plan after a decision. A killed experiment serves its control, a killed policy the default."""
    if arm is None:
        return plan, decision
    if one.name in killed:
        arm = one.arm(CONTROL) or arm
        decision = decision._replace(arm=arm.name, reason="killed")
    if arm.plan is not None and _killed(arm.plan, traffic, killed):
        return plan, decision._replace(arm=DEFAULT_ARM, reason="killed")
    if not set(arm.params) <= set((arm.plan or plan).structure.params):  # a forced arm under another policy
        return plan, decision._replace(arm=DEFAULT_ARM, reason="params")
    return arm.plan or traffic.overlay(plan, arm.params), decision
