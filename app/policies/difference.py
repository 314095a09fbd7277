"""What differs between two policies, or two folders of them: by meaning, not by text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from app.policies.assign import POINTS, Traffic
from app.policies.expr import number_text
from app.policies.load import PolicySet
from app.policies.plan import Plan
from app.policies.users import Users, moved, notes


class Change(NamedTuple):
    """One value that differs; None = it is not there on that side. place: `widths`, `step 2 rank`, `steps 1-3 mask`,
    `param penalty value`, `final limit`."""

    place: str
    before: object
    after: object


class FileChange(NamedTuple):
    """A policy or an experiment by name. what: added | removed | changed | edited (other text, same answers) | same |
    rejected (errors keep the new one from being served, the old one stays)."""

    name: str
    what: str
    before: str | None
    after: str | None
    changes: tuple[Change, ...] = ()
    compile: bool = False


class FolderChange(NamedTuple):
    """Two folders. users: empty where a side has no policy to serve; notes: what cannot be said."""

    policies: tuple[FileChange, ...]
    experiments: tuple[FileChange, ...]
    traffic: tuple[Change, ...]
    users: tuple[Users, ...]
    notes: tuple[str, ...]


def changes(before: Plan, after: Plan) -> tuple[Change, ...]:
    """What differs between two plans of one contract, in the order of the file's keys."""
    return tuple(_gathered(_compared(_parts(before), _parts(after)), len(before.structure.steps)))


def _compared(left: Mapping[str, object], right: Mapping[str, object]) -> list[Change]:
    places = dict.fromkeys((*left, *right))
    return [Change(at, left.get(at), right.get(at)) for at in places if left.get(at) != right.get(at)]


def _parts(plan: Plan) -> dict[str, object]:
    """Every value of a plan by place. A phase of a step has the place `step t phase`."""
    resolved = plan.resolved
    levels = {f"load {level} widths": list(one.widths) for level, one in plan.levels.items()}
    parts: dict[str, object] = {"widths": list(plan.widths), **levels, "underfill": plan.underfill}
    for name, one in _table(resolved["params"]).items():
        for key, value in _table(one).items():
            parts[f"param {name} {key}"] = value
    steps = resolved["steps"]
    assert isinstance(steps, Sequence)
    for t, step in enumerate(steps, 1):
        for phase, value in _table(step).items():
            parts[f"step {t} {phase}"] = value
    for phase, value in _table(resolved["final"]).items():
        parts[f"final {phase}"] = plan.limit if phase == "limit" else value
    for name, version in _table(resolved["operators"]).items():
        parts[f"operator {name}"] = version
    return parts


def _table(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping)
    return value


def _gathered(found: Sequence[Change], steps: int) -> list[Change]:
    """The same change in neighbouring steps as one line; operators are named only where nothing else says so."""
    by_phase: dict[str, list[tuple[int, Change]]] = {}
    out: list[Change] = []
    for one in found:
        word, _, rest = one.place.partition(" ")
        if word != "step":
            out.append(one)
            continue
        number, _, phase = rest.partition(" ")
        by_phase.setdefault(phase, []).append((int(number), one))
    for phase, given in by_phase.items():
        runs: list[list[tuple[int, Change]]] = []
        for t, one in given:
            last = runs[-1][-1] if runs else None
            if last and last[0] == t - 1 and (last[1].before, last[1].after) == (one.before, one.after):
                runs[-1].append((t, one))
            else:
                runs.append([(t, one)])
        for run in runs:
            first, end = run[0][0], run[-1][0]
            whole = "all steps" if end - first + 1 == steps > 1 else f"steps {first}-{end}"
            place = f"step {first}" if first == end else whole
            out.append(Change(f"{place} {phase}", run[0][1].before, run[0][1].after))
    return [one for one in out if not one.place.startswith("operator ") or None not in (one.before, one.after)]


# ---- folders -------------------------------------------------------------------------------------------------------


def folder_changes(before: PolicySet, after: PolicySet, now: float) -> FolderChange:
    """What differs between two folders compiled for one contract. now: unix seconds, for ramps."""
    built = {plan.structure.id for plan in before.plans()}
    names = sorted({*before.policies, *after.policies})
    said = notes(before.traffic, after.traffic)
    try:
        users = moved(before.traffic, after.traffic, now)
    except ValueError as error:
        users, said = (), [str(error), *said]
    return FolderChange(
        tuple(_policy(name, before, after, built) for name in names),
        tuple(_experiment(name, before, after) for name in sorted({*before.experiments, *after.experiments})),
        tuple(_traffic_changes(before, after)),
        users,
        tuple(said),
    )


def _policy(name: str, before: PolicySet, after: PolicySet, built: set[str]) -> FileChange:
    old, new = before.policies.get(name), after.policies.get(name)
    left, right = (one.plan if one else None for one in (old, new))
    ids = (left.policy_id if left else None, right.policy_id if right else None)
    if new is not None and new.errors:
        return FileChange(name, "rejected", ids[0], None)
    fresh = right is not None and right.structure.id not in built
    if old is None or new is None:
        return FileChange(name, "added" if old is None else "removed", *ids, compile=fresh)
    if left is not None and right is not None and left.policy_id != right.policy_id:
        return FileChange(name, "changed", *ids, changes(left, right), fresh)
    if (left is None) != (right is None):
        return FileChange(name, "changed", *ids, compile=fresh)
    texts = [one.kept.source.data if one.kept else b"" for one in (old, new)]
    return FileChange(name, "same" if texts[0] == texts[1] else "edited", *ids)


def _experiment(name: str, before: PolicySet, after: PolicySet) -> FileChange:
    left, right = _experiment_parts(before.traffic, name), _experiment_parts(after.traffic, name)
    if name in after.experiments and after.experiments[name].standing != "live":
        return FileChange(name, "rejected", None, None)
    if left is None or right is None:
        return FileChange(name, "added" if left is None else "removed", None, None)
    found = tuple(_compared(left, right))
    return FileChange(name, "changed" if found else "same", None, None, found)


def _experiment_parts(traffic: Traffic, name: str) -> dict[str, object] | None:
    one = traffic.experiments.get(name)
    if one is None:
        return None
    parts: dict[str, object] = {
        "layer": one.layer,
        "slots": list(one.slots),
        "state": one.state,
        "salt": one.salt,
        "where": one.where.text if one.where else None,
        "ramp": [list(step) for step in one.ramp] or None,
        "stop_if": [list(guard) for guard in one.guards] or None,
    }
    for arm in one.arms:
        parts[f"arm {arm.name} weight"] = arm.weight * 100 / POINTS
        parts[f"arm {arm.name} policy"] = f"{arm.plan.policy} {arm.plan.policy_id}" if arm.plan else None
        for key, value in arm.params.items():
            parts[f"arm {arm.name} param {key}"] = number_text(value)
    return parts


def _traffic_changes(before: PolicySet, after: PolicySet) -> list[Change]:
    return _compared(_traffic_parts(before), _traffic_parts(after))


def _traffic_parts(folder: PolicySet) -> dict[str, object]:
    traffic, held = folder.traffic, folder.traffic.holdout
    parts: dict[str, object] = {"default": folder.default}
    if held is not None:
        parts |= {"holdout share": f"{held.slots / 100:g}%", "holdout salt": held.salt, "holdout unit": held.unit}
        parts["holdout policy"] = held.plan.policy
    for layer in traffic.layers:
        where = f"layer {layer.name}"
        parts |= {f"{where} salt": layer.salt, f"{where} unit": layer.unit}
        parts |= {f"{where} surfaces": list(layer.surfaces) or None}
        parts |= {f"{where} params": None if layer.params is None else list(layer.params)}
    return parts
