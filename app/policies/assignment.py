"""Why a unit gets what it gets from an experiment: every number of the assignment, for people who ask."""

from __future__ import annotations

from collections.abc import Collection

from app.policies.assign import DEFAULT_ARM, HOLDOUT, POINTS, Experiment, Facts, Layer, Traffic, assign, point, slot


def explain(
    traffic: Traffic, name: str, unit: str, facts: Facts, now: float, killed: Collection[str] = ()
) -> dict[str, object] | None:
    """The assignment of one unit, as JSON-ready data; None for an unknown experiment.

    facts: what else the request would say (`ctx`, `user`); the unit is put where the layer looks for it.
    arm is what would be served, home the arm that the unit belongs to whenever the ramp reaches it.
    """
    found = next(((layer, one) for layer in traffic.layers for one in layer.experiments if one.name == name), None)
    if found is None:
        return None
    layer, one = found
    facts = _with_unit(layer.unit, unit, facts)
    assignment = assign(traffic, facts, now, killed)
    decision = next((each for each in assignment.decisions if each.name == name and each.layer), None)
    held = any(each.name == HOLDOUT and not each.layer for each in assignment.decisions)
    home = one.arm_at(unit, POINTS)
    at = slot(layer.salt, unit)
    return {
        "experiment": name,
        "state": one.state,
        "layer": layer.name,
        "unit": unit,
        "unit_field": layer.unit,
        "slot": at,
        "slots": list(one.slots),
        "point": point(one.salt, unit),
        "home": home.name if home else None,
        "coverage": one.coverage(now) / POINTS,
        "where": one.where.text if one.where else None,
        "eligible": one.where is None or one.where.test(facts),
        "arm": decision.arm if decision else DEFAULT_ARM,
        "reason": decision.reason if decision else _outside(one, layer, at, facts, held),
        "policy": assignment.plan.policy if assignment.plan else None,
        "policy_id": assignment.plan.policy_id if assignment.plan else None,
    }


def _with_unit(field: str, unit: str, facts: Facts) -> Facts:
    if field == "user_id":
        return facts._replace(user_id=unit)
    if field == "request_id":
        return facts._replace(request_id=unit)
    return facts._replace(ctx={**facts.ctx, field.removeprefix("ctx."): unit})


def _outside(one: Experiment, layer: Layer, at: int, facts: Facts, held: bool) -> str:
    """Why the experiment did not look at the unit at all."""
    if held:
        return "holdout"
    if not layer.takes(facts):
        return "surface"
    if not one.slots[0] <= at < one.slots[1]:
        return "slots"
    return "killed" if one.state in ("running", "paused") else one.state
