"""Whom a change of traffic moves: the share of users whose arm, or whose policy, is another one afterwards.

Computed, not sampled. A user is a point: each salt hashes a unit to an independent 64-bit number, slots and points are
intervals of it (policy-language 3.8), so a share is a sum of lengths, exact to the last hash value. Users are those
that every `where` lets in; whom a `where` keeps out, no experiment moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from app.policies.assign import HOLDOUT, POINTS, SLOTS, Experiment, Layer, Traffic
from app.policies.plan import Plan

WHOLE = 1 << 64
ONE, NONE = Fraction(1), Fraction(0)

Pick = tuple[str, str] | None
"""Experiment and arm; None = the default."""
Joint = dict[tuple[object, object], Fraction]
"""Chances of (before, after)."""


class Moved(NamedTuple):
    """Shares of users, 0..1. arm: who is in another arm afterwards · least: how many must be, however the new sizes are
    reached from the old ones."""

    arm: float
    least: float


class Users(NamedTuple):
    """What a change does to the users of a surface (`ctx.surface`; None = of any that no layer names).

    arm     who is in another arm of some layer, or in or out of the holdout · least: as `Moved`, of the layer that must
            move most
    policy  whose policy id is another one: arms that moved, and policies that were edited
    layers  each layer alone, among those that are not held out; the holdout itself under its name
    """

    surface: str | None
    arm: float
    least: float
    policy: float
    layers: Mapping[str, Moved]


class _Band(NamedTuple):
    """Hash values low <= u < high, and what they mean; None = nothing."""

    low: int
    high: int
    means: object


class _Bands(NamedTuple):
    """What one hash decides. over: the salt and the unit that are hashed; equal ones are the same number of a user."""

    over: tuple[str, str]
    bands: Sequence[_Band]


NOTHING = _Bands(("", ""), (_Band(0, WHOLE, None),))


def moved(before: Traffic, after: Traffic, now: float) -> tuple[Users, ...]:
    """The users of every surface that a layer names, and of the others. now: unix seconds, for ramps.

    Raises ValueError where a side has no default policy to serve.
    """
    if before.default is None or after.default is None:
        raise ValueError("without a default policy there is nothing to compare")
    surfaces = {one for side in (before, after) for layer in side.layers for one in layer.surfaces}
    return tuple(_Change(before, after, now, surface).users() for surface in (None, *sorted(surfaces)))


def notes(before: Traffic, after: Traffic) -> list[str]:
    """What the shares cannot say of this change."""
    out = []
    for name, one in sorted(before.experiments.items()):
        other = after.experiments.get(name)
        if other is not None and (one.where and one.where.text) != (other.where and other.where.text):
            out.append(f"`where` of {name} changes: whom it lets in on one side only is not in the shares")
    parts, others = _parts(before), _parts(after)
    out += [
        f"salt {salt} moves from {parts[salt]} to {others[salt]}: taken as independent of itself"
        for salt in sorted(parts.keys() & others.keys())
        if parts[salt] != others[salt]
    ]
    return out


def _parts(traffic: Traffic) -> dict[str, str]:
    """What each salt is for."""
    parts = {traffic.holdout.salt: "the holdout"} if traffic.holdout else {}
    parts |= {layer.salt: f"layer {layer.name}" for layer in traffic.layers}
    return parts | {one.salt: f"experiments of {layer.name}" for layer in traffic.layers for one in layer.experiments}


@dataclass
class _State:
    """Users alike so far: how many, whether a layer has moved them, and the plans before and after."""

    mass: Fraction
    changed: bool
    old: Plan
    new: Plan


class _Change:
    """One change for the users of one surface."""

    def __init__(self, before: Traffic, after: Traffic, now: float, surface: str | None) -> None:
        assert before.default is not None
        assert after.default is not None
        self._before, self._after, self._now, self._surface = before, after, now, surface
        self._states = [_State(ONE, False, before.default, after.default)]
        self._held = _joint(_holdout(before), _holdout(after))
        self._out = (self._held_share(0), self._held_share(1))

    def users(self) -> Users:
        layers: dict[str, Moved] = {}
        if self._before.holdout or self._after.holdout:
            layers[HOLDOUT] = Moved(float(_differing(self._held)), float(abs(self._out[0] - self._out[1])))
        least = abs(self._out[0] - self._out[1])
        for name, old, new in self._pairs():
            alone = self._fold(old, new)
            layers[name] = Moved(float(_differing(alone)), float(_distance(alone, (NONE, NONE))))
            least = max(least, _distance(alone, self._out))
        return Users(self._surface, float(self._arm()), float(least), float(self._policy()), layers)

    def _pairs(self) -> Iterable[tuple[str, Layer | None, Layer | None]]:
        """Layers of one name; those that choose the policy first, as they are served."""
        sides = [{one.name: one for one in side.layers} for side in (self._before, self._after)]
        names = dict.fromkeys((*sides[0], *sides[1]))

        def late(name: str) -> bool:
            return all(layer.params is not None for side in sides if (layer := side.get(name)))

        for name in sorted(names, key=late):
            yield name, self._taking(sides[0].get(name)), self._taking(sides[1].get(name))

    def _taking(self, layer: Layer | None) -> Layer | None:
        return None if layer is None or (layer.surfaces and self._surface not in layer.surfaces) else layer

    def _fold(self, old: Layer | None, new: Layer | None) -> Joint:
        """Let a layer decide; returns the chances of its decisions."""
        alone: Joint = {}
        grouped: dict[tuple[bool, str, str], _State] = {}
        for state in self._states:
            for (first, second), chance in self._decided(old, new, state).items():
                mass = state.mass * chance
                one, left = _serve(self._before, state.old, old, first)
                two, right = _serve(self._after, state.new, new, second)
                alone[one, two] = alone.get((one, two), NONE) + mass
                changed = state.changed or one != two
                key = (changed, left.policy_id, right.policy_id)
                known = grouped.setdefault(key, _State(NONE, changed, left, right))
                known.mass += mass
        self._states = list(grouped.values())
        return alone

    def _decided(self, old: Layer | None, new: Layer | None, state: _State) -> Joint:
        """Chances of the arms that a user's slot and points give, before and after."""
        decided: Joint = {}
        for (first, second), chance in _joint(_slots(old, state.old), _slots(new, state.new)).items():
            left, right = _arms(old, first, self._now), _arms(new, second, self._now)
            for pair, share in _joint(left, right).items():
                decided[pair] = decided.get(pair, NONE) + chance * share
        return decided

    def _held_share(self, side: int) -> Fraction:
        return sum((chance for pair, chance in self._held.items() if pair[side]), NONE)

    def _mass(self, test: Callable[[_State], bool]) -> Fraction:
        return sum((state.mass for state in self._states if test(state)), NONE)

    def _arm(self) -> Fraction:
        stay = self._held.get((None, None), NONE)
        return _differing(self._held) + stay * self._mass(lambda state: state.changed)

    def _policy(self) -> Fraction:
        ids = [side.holdout.plan.policy_id if side.holdout else "" for side in (self._before, self._after)]
        total = NONE
        for (first, second), chance in self._held.items():
            total += chance * self._mass(
                lambda state, out=(first, second): (  # type: ignore[misc]
                    (ids[0] if out[0] else state.old.policy_id) != (ids[1] if out[1] else state.new.policy_id)
                )
            )
        return total


def _serve(traffic: Traffic, plan: Plan, layer: Layer | None, pick: object) -> tuple[Pick, Plan]:
    """The arm that is served, and the plan with it; as `assign` does it."""
    if layer is None or not isinstance(pick, tuple):
        return None, plan
    experiment = next(one for one in layer.experiments if one.name == pick[0])
    arm = experiment.arm(pick[1])
    if arm is None or not set(arm.params) <= set((arm.plan or plan).structure.params):
        return None, plan
    return (experiment.name, arm.name), arm.plan or traffic.overlay(plan, arm.params)


# ---- bands of hash values ------------------------------------------------------------------------------------------


def _cut(at: int, of: int) -> int:
    """The first hash value u whose u * of >> 64 is `at`."""
    return -(-(at << 64) // of)


def _bands(over: tuple[str, str], parts: Iterable[tuple[int, int, object]], of: int) -> _Bands:
    """Disjoint parts [first, end) of 0..of as bands, with nothing between them."""
    bands, at = [], 0
    for first, end, means in sorted(parts, key=lambda part: part[0]):
        low, high = _cut(first, of), _cut(end, of)
        bands += [_Band(at, low, None), _Band(low, high, means)]
        at = high
    return _Bands(over, [one for one in (*bands, _Band(at, WHOLE, None)) if one.low < one.high])


def _holdout(traffic: Traffic) -> _Bands:
    held = traffic.holdout
    return NOTHING if held is None else _bands((held.salt, held.unit), [(0, held.slots, HOLDOUT)], SLOTS)


def _slots(layer: Layer | None, plan: Plan) -> _Bands:
    """Which experiment may choose an arm for a slot."""
    if layer is None:
        return NOTHING
    parts = [
        (*one.slots, one.name)
        for one in layer.experiments
        if one.state == "running" and (layer.params is None or one.needs <= set(plan.structure.params))
    ]
    return _bands((layer.salt, layer.unit), parts, SLOTS)


def _arms(layer: Layer | None, name: object, now: float) -> _Bands:
    """Which arm an experiment gives a point: the covered first part of each home range."""
    if layer is None or name is None:
        return NOTHING
    one: Experiment = next(experiment for experiment in layer.experiments if experiment.name == name)
    coverage = one.coverage(now)
    parts = []
    for arm in one.arms:
        first, end = arm.home
        parts.append((first, first + (end - first) * coverage // POINTS, (one.name, arm.name)))
    return _bands((one.salt, layer.unit), parts, POINTS)


def _joint(one: _Bands, other: _Bands) -> Joint:
    """Chances of what two hashes say together; of one number where both hash the same."""
    same = one.over == other.over
    out: Joint = {}
    for first in one.bands:
        for second in other.bands:
            if same:
                chance = Fraction(max(0, min(first.high, second.high) - max(first.low, second.low)), WHOLE)
            else:
                chance = Fraction((first.high - first.low) * (second.high - second.low), WHOLE * WHOLE)
            if chance:
                pair = (first.means, second.means)
                out[pair] = out.get(pair, NONE) + chance
    return out


def _differing(joint: Joint) -> Fraction:
    return sum((chance for (one, other), chance in joint.items() if one != other), NONE)


def _distance(joint: Joint, out: tuple[Fraction, Fraction]) -> Fraction:
    """How far apart the sizes before and after are (total variation), with shares `out` of users held out."""
    sizes: dict[object, list[Fraction]] = {HOLDOUT: list(out)}
    for pair, chance in joint.items():
        for side, means in enumerate(pair):
            sizes.setdefault(means, [NONE, NONE])[side] += chance * (1 - out[side])
    return sum((max(NONE, one - other) for one, other in sizes.values()), NONE)
