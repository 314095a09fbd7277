"""The oracle of `final`: expand, mask, score, dedupe, quota, rerank and limit over a plain list of items."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from app.policies.reference import Value, evaluate


@dataclass(frozen=True)
class Listed:
    """The items of a request in search order: score [M] float32, item [M], sid [M, L], seen [M], extra by name [M]."""

    score: npt.NDArray[np.float32]
    item: npt.NDArray[np.int64]
    sid: npt.NDArray[np.int32]
    seen: npt.NDArray[np.bool_]
    extra: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    params: Mapping[str, float] = field(default_factory=dict)


def expand(
    sids: Sequence[Sequence[int]], most: int, excluded: Collection[int] = (), by: Mapping[int, float] | None = None
) -> list[tuple[int, int]]:
    """(which SID, item) under `sid(max_items=most, by=..)`. sids: the items of each in the catalogue's order of
    preference; by: the items' numbers, NaN or no entry = none."""
    out = []
    for at, items in enumerate(sids):
        left = [item for item in items if item not in excluded]
        if by is not None:
            known = [item for item in left if not math.isnan(by.get(item, math.nan))]
            left = sorted(known, key=lambda item: -by[item]) + [item for item in left if item not in known]
        out += [(at, item) for item in left[:most]]
    return out


def final_list(phases: Mapping[str, object], items: Listed, limit: int) -> list[tuple[int, float]]:
    """(place in the input, final score), best first, under the `final` of a resolved policy."""
    out = []
    for at in range(len(items.score)):
        names = _names(items, at)
        if phases["mask"] is not None and not bool(np.asarray(evaluate(str(phases["mask"]), names))):
            continue
        score = float(np.asarray(evaluate(str(phases["score"]), names)).reshape(-1)[0])
        if np.isfinite(score):
            out.append((at, score + 0.0))
    out.sort(key=lambda one: -one[1])
    if phases["dedupe"] is not None:
        out = _dedupe(str(phases["dedupe"]), items, out)
    rerank = phases["rerank"]
    if isinstance(phases["quota"], list):
        out = _quota([str(one) for one in phases["quota"]], items, out, limit if rerank is None else len(out))
    if rerank is not None:
        out = _mmr(str(rerank), items, out, limit)
    return out[:limit]


def _names(items: Listed, at: int) -> dict[str, Value]:
    names: dict[str, Value] = {
        "score": items.score[at],
        "position": np.float32(at + 1),
        "seen": items.seen[at : at + 1],
    }
    names.update({f"param.{name}": np.float32(value) for name, value in items.params.items()})
    for name, column in items.extra.items():
        names[name] = column[at : at + 1]
        for place, label in enumerate(items.labels.get(name, ())):
            names[f"{name}=={label}"] = column[at : at + 1] == place
    return names


def _group(text: str, items: Listed, at: int) -> object:
    name, _, label = text.partition(" == ")
    if name == "item.id":
        return int(items.item[at])
    value = items.extra[name][at]
    if label:
        return True if value == items.labels[name].index(ast.literal_eval(label)) else None
    if items.extra[name].dtype == np.bool_:
        return True if value else None
    return value.item()


def _dedupe(text: str, items: Listed, ranked: list[tuple[int, float]]) -> list[tuple[int, float]]:
    met: set[object] = set()
    out = []
    for at, score in ranked:
        group = _group(text, items, at)
        if group is None or group not in met:
            out.append((at, score))
            met.add(group)
    return out


def _quota(lines: list[str], items: Listed, ranked: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    limits = []
    for text in lines:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        args = [*call.args, *(one.value for one in call.keywords)]
        limits.append((call.func.id, ast.unparse(args[0]).replace("'", '"'), int(ast.literal_eval(args[1]))))
    taken: list[int] = []

    def full(op_text: str, at: int, limit: int) -> bool:
        group = _group(op_text, items, at)
        return group is None or sum(_group(op_text, items, one) == group for one in taken) >= limit

    def allowed(at: int) -> bool:
        return not any(
            op == "cap" and _group(text, items, at) is not None and full(text, at, limit) for op, text, limit in limits
        )

    for op, text, least in limits:
        for at, _ in ranked if op == "floor" else []:
            if len(taken) < most and at not in taken and not full(text, at, least) and allowed(at):
                taken.append(at)
    for at, _ in ranked:
        if len(taken) < most and at not in taken and allowed(at):
            taken.append(at)
    return [(at, score) for at, score in ranked if at in taken]


def _mmr(text: str, items: Listed, ranked: list[tuple[int, float]], limit: int) -> list[tuple[int, float]]:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    given = {"weight": 0.7, "pool": 200.0}
    given.update(zip(given, (float(ast.literal_eval(one)) for one in call.args), strict=False))
    given.update({str(one.arg): float(ast.literal_eval(one.value)) for one in call.keywords if one.arg in given})
    pool = ranked[: int(given["pool"])]
    low, high = min((s for _, s in pool), default=0.0), max((s for _, s in pool), default=0.0)
    out: list[tuple[int, float]] = []
    while pool and len(out) < limit:
        gains = []
        for at, score in pool:
            relevance = (score - low) / (high - low) if high > low else 1.0
            likeness = max((_alike(items.sid[at], items.sid[other]) for other, _ in out), default=0.0)
            gains.append(given["weight"] * relevance - (1 - given["weight"]) * likeness)
        out.append(pool.pop(int(np.argmax(gains))))
    return out


def _alike(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> float:
    shared = 0
    while shared < len(a) and a[shared] == b[shared]:
        shared += 1
    return shared / len(a)
