"""The `final` phase after `expand`, on the host: mask, score, dedupe, quota, rerank, limit (V41-V46)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.errors import Fault
from app.policies.builtin import BUILT_IN
from app.policies.check_types import bind
from app.policies.expr import Compare, Expr, Field, Name, Operation, Text, show, walk
from app.policies.facts import Facts
from app.policies.lower import Frame, Lowered, Scope, lower_condition, lower_number, tensor_of
from app.policies.lower_step import argument, expression, extra_in, operations
from app.policies.plan import FinalInputs, FinalList, FinalProgram
from app.policies.resolve import Policy, Resolved

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Keys = Callable[[FinalInputs], Ints]


@dataclass(frozen=True)
class Limit:
    """A cap or a floor of the list; key gives each item's group, -1 = in none."""

    key: Keys
    limit: int


@dataclass(frozen=True)
class Parts:
    """The phases of `final`; None and () = there is none. mmr = (weight, pool)."""

    mask: Lowered | bool
    score: Lowered | np.float32 | None
    dedupe: Keys | None
    caps: tuple[Limit, ...]
    floors: tuple[Limit, ...]
    mmr: tuple[float, int] | None
    limit: int
    position: bool


def lower_final(policy: Policy, limit: int, facts: Facts) -> FinalProgram | None:
    """The program of a policy's `final`; None where it only expands and cuts."""
    phases = policy.final
    mask, score, dedupe = (expression(phases[word]) for word in ("mask", "score", "dedupe"))
    quota, rerank = operations(phases["quota"]), operations(phases["rerank"])
    changed = score is not None and show(score) != "score"
    own_key = dedupe is not None and show(dedupe) != "item.id"
    if mask is None and not changed and not own_key and not quota and not rerank:
        return None
    scope = Scope({}, facts)
    nodes = [*([mask] if mask else []), *([score] if score else []), *(_group(one) for one in quota)]
    names = {part.name for node in nodes for part in walk(node) if isinstance(part, Name)}
    uses = frozenset().union(*(extra_in(node) for node in nodes), {"seen"} & names)
    if own_key and dedupe is not None:
        uses |= {show(dedupe)}
    parts = Parts(
        mask=True if mask is None else lower_condition(mask, scope),
        score=lower_number(score, scope) if changed and score is not None else None,
        dedupe=None if dedupe is None else _key(dedupe, facts),
        caps=tuple(Limit(_key(_group(one), facts), int(argument(one, "max"))) for one in quota if one.op == "cap"),
        floors=tuple(Limit(_key(_group(one), facts), int(argument(one, "min"))) for one in quota if one.op == "floor"),
        mmr=(argument(rerank[0], "weight"), int(argument(rerank[0], "pool"))) if rerank else None,
        limit=limit,
        position="position" in names,
    )
    return FinalProgram(uses, lambda inputs, params: _run(parts, inputs, params))


def expand_by(expand: Resolved) -> str:
    """The number, `item.x`, by which `expand` orders the items of an SID, the largest first; "" = the vocab's order."""
    [operation] = operations(expand)
    given = bind(BUILT_IN[operation.op], operation)[0].get("by")
    return show(given.value) if given else ""


def _group(operation: Operation) -> Expr:
    return next(arg.value for arg in operation.args if arg.name in ("group", None))


def _key(node: Expr, facts: Facts) -> Keys:
    """Group numbers of a field, or of a field that has a value."""
    match node:
        case Field(name="id"):
            return lambda inputs: inputs.item
        case Field(space=space, name=name):
            column = facts[f"{space}.{name}"]
            if column.form == "condition":
                return lambda inputs: inputs.extra[column.key].astype(np.int64) - 1
            if column.form == "text":
                return lambda inputs: inputs.extra[column.key].astype(np.int64) + 1  # unknown: a group of its own
            return lambda inputs: np.unique(inputs.extra[column.key], return_inverse=True)[1].astype(np.int64)
        case Compare(left=Field(space=space, name=name), right=Text(value=value)):
            column = facts[f"{space}.{name}"]
            label = column.labels.index(value)
            return lambda inputs: (inputs.extra[column.key] == label).astype(np.int64) - 1
    raise Fault(f"`{show(node)}` passed the checks and is no key")


def _run(parts: Parts, inputs: FinalInputs, params: Mapping[str, float]) -> FinalList:
    def told(phase: str, left: Ints) -> Ints:
        if inputs.told is not None:
            inputs.told(phase, left, score)
        return left

    score, allowed, bad = _scored(parts, inputs, params)
    told("mask", np.flatnonzero(allowed))
    index = np.flatnonzero(allowed & np.isfinite(score))
    index = told("numbers", index[np.argsort(-score[index], kind="stable")])  # ties stay in search order
    if parts.dedupe is not None:
        index = told("dedupe", index[_first_of(parts.dedupe(inputs)[index])])
    if parts.caps or parts.floors:
        index = told("quota", _quota(parts, inputs, index))
    if parts.mmr is not None:
        weight, pool = parts.mmr
        index = _mmr(told("rerank", index[:pool]), score, inputs.sid, weight, parts.limit)
    index = told("limit", index[: parts.limit].astype(np.int64))
    return FinalList(index, score[index], bad)


def _scored(
    parts: Parts, inputs: FinalInputs, params: Mapping[str, float]
) -> tuple[Floats, npt.NDArray[np.bool_], int]:
    """Final scores, whom the mask allows, and how many of those a NaN or +inf costs their place."""
    known: dict[str, Tensor] = {
        f"param.{name}": torch.tensor(value, dtype=torch.float32) for name, value in params.items()
    }
    for name, column in inputs.extra.items():
        known[name] = torch.from_numpy(np.asarray(column))
    if inputs.seen is not None:
        known["seen"] = torch.from_numpy(inputs.seen)
    known["score"] = torch.from_numpy(inputs.score)
    if parts.position:
        known["position"] = torch.arange(1, len(inputs.score) + 1, dtype=torch.float32)
    frame = Frame(torch.device("cpu"), known)
    kept = np.full(len(inputs.score), True)
    if isinstance(parts.mask, bool):
        kept &= parts.mask
    else:
        kept &= parts.mask(frame).expand(len(kept)).numpy()
    if parts.score is None:
        return inputs.score, kept, 0
    score = tensor_of(parts.score, frame).expand(len(kept)).numpy().astype(np.float32) + np.float32(0)
    wrong = kept & (np.isnan(score) | (score == np.inf))
    return score, kept, int(wrong.sum())


def _first_of(key: Ints) -> Ints:
    """Places of the first of each key; items in no group all stay."""
    named = np.flatnonzero(key >= 0)
    first = named[np.unique(key[named], return_index=True)[1]]
    return np.sort(np.concatenate([first, np.flatnonzero(key < 0)]))


def _quota(parts: Parts, inputs: FinalInputs, index: Ints) -> Ints:
    """Floors in their written order, then the best; at most `limit` items, or all where a rerank follows."""
    most = parts.limit if parts.mmr is None else len(index)
    caps = [(one.key(inputs)[index], one.limit) for one in parts.caps]
    floors = [(one.key(inputs)[index], one.limit) for one in parts.floors]
    taken = np.zeros(len(index), dtype=bool)
    counts: list[dict[int, int]] = [{} for _ in caps]

    def scan(goal: Ints | None, least: int) -> None:
        # a list has at most a few thousand items, and this runs once a request
        have: dict[int, int] = {}
        if goal is not None:
            for group in goal[taken].tolist():
                have[group] = have.get(group, 0) + 1
        for at in range(len(index)):
            if taken.sum() >= most:
                return
            group = -1 if goal is None else int(goal[at])
            if taken[at] or (goal is not None and (group < 0 or have.get(group, 0) >= least)):
                continue
            if any(
                key[at] >= 0 and count.get(int(key[at]), 0) >= limit
                for (key, limit), count in zip(caps, counts, strict=True)
            ):
                continue
            taken[at] = True
            have[group] = have.get(group, 0) + 1
            for (key, _), count in zip(caps, counts, strict=True):
                count[int(key[at])] = count.get(int(key[at]), 0) + 1

    for goal, least in floors:
        scan(goal, least)
    scan(None, 0)
    return index[taken]


def _mmr(pool: Ints, score: Floats, sid: npt.NDArray[np.int32], weight: float, limit: int) -> Ints:
    """V45 (Carbonell & Goldstein 1998): weight * relevance - (1 - weight) * likeness to what was chosen; relevance is
    the score scaled to 0..1 over the pool, likeness the shared prefix's share of the SID; ties by current order."""
    if not len(pool):
        return pool
    own = score[pool].astype(np.float64)
    spread = own.max() - own.min()
    relevance = (own - own.min()) / spread if spread > 0 else np.ones(len(pool))
    likeness, open_ = np.zeros(len(pool)), np.full(len(pool), True)
    codes = sid[pool]
    chosen: list[int] = []
    for _ in range(min(limit, len(pool))):
        gain = np.where(open_, weight * relevance - (1 - weight) * likeness, -np.inf)
        best = int(np.argmax(gain))
        chosen.append(best)
        open_[best] = False
        shared = np.logical_and.accumulate(codes == codes[best], axis=1).sum(axis=1) / codes.shape[1]
        likeness = np.maximum(likeness, shared)
    return pool[chosen]
