"""The oracle of selection: prune, quota and the ways to select, as sequential scans over the candidates of one request.

Nothing of the compiler, and no sorting trick: candidates are taken one after the other, as the catalogue's
definitions say it (policy-language 1, "O2").
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from app.policies.operators import Operators
from app.policies.reference import INF, Floats, Grid, Ranks, Value, called, evaluate, score_step, stays, texts

Place = tuple[int, int]


@dataclass(frozen=True)
class Chosen:
    """survivors (row, column) in their order, and the number that each carries on (0 where its operator has none)."""

    survivors: list[Place]
    carry: list[float]


@dataclass(frozen=True)
class _Line:
    op: str
    args: list[ast.expr]


def select_step(phases: Mapping[str, object], grid: Grid, operators: Operators, ranks: Ranks | None = None) -> Chosen:
    """The survivors of one request at one step, under a step of a resolved policy. ranks: where known already."""
    ranks = score_step(phases, grid, operators) if ranks is None else ranks
    names: dict[str, Value] = {f"param.{name}": np.float32(value) for name, value in grid.params.items()}
    names["width"] = np.float32(grid.width)
    select = _line(str(phases["select"]))
    rank = ranks.rank
    if select.op == "stochastic":
        rank = conditioned(ranks.score, grid)
    for text in texts(phases["prune"]):
        operator, arguments = called(text, names, operators)
        left = stays(operator, rank.shape, rank, *arguments)
        rank = np.where(left, rank, -INF).astype(np.float32)
    if texts(phases["quota"]):
        places = quota([_line(text) for text in texts(phases["quota"])], rank, grid)
        return Chosen(places, [0.0] * len(places))
    if select.op == "diverse":
        return diverse(select, rank, grid, names)
    if select.op == "explore":
        return explore(select, rank, grid)
    places = in_order(rank, grid)[: grid.width]
    return Chosen(places, [float(rank[at]) for at in places])


def in_order(rank: Floats, grid: Grid) -> list[Place]:
    """Valid candidates of the request in T0."""
    w, f = rank.shape
    places = [(r, c) for r in range(w) for c in range(f) if rank[r, c] > -INF]
    return sorted(places, key=lambda at: (-float(rank[at]) + 0.0, number(at, grid)))


def number(at: Place, grid: Grid) -> int:
    """order * C + code."""
    order = grid.order if grid.order is not None else np.arange(len(grid.parent))
    return int(order[at[0]]) * int(grid.logits.shape[1]) + int(grid.code[at])


def quota(lines: list[_Line], rank: Floats, grid: Grid) -> list[Place]:
    """V08, V30-V33: floors in their written order, then everything, in T0, never beyond a cap or K."""
    limits = [(line.op, ast.unparse(line.args[0]), int(ast.literal_eval(line.args[1]))) for line in lines]
    candidates = in_order(rank, grid)
    taken: list[Place] = []

    def count(text: str, group: object) -> int:
        return sum(group_number(text, at, grid) == group for at in taken)

    def allowed(at: Place) -> bool:
        for op, text, limit in limits:
            group = group_number(text, at, grid)
            if op == "cap" and group is not None and count(text, group) >= limit:
                return False
        return True

    for op, text, least in limits:
        for at in candidates if op == "floor" else []:
            group = group_number(text, at, grid)
            wanted = group is not None and at not in taken and count(text, group) < least
            if wanted and len(taken) < grid.width and allowed(at):
                taken.append(at)
    for at in candidates:
        if len(taken) < grid.width and at not in taken and allowed(at):
            taken.append(at)
    return [at for at in candidates if at in taken]


def group_number(text: str, at: Place, grid: Grid) -> object:
    """Which group of `text` a candidate is in; None = in none."""
    row, column = at
    if text == "parent":
        return row
    codes = [*(grid.prefix[row].tolist() if grid.prefix is not None else []), int(grid.code[at])]
    if text.startswith(("token[", "prefix[")):
        index = int(text[text.index("[") + 1 : -1])
        return codes[index - 1] if text.startswith("token") else tuple(codes[:index])
    name, _, label = text.partition(" == ")
    value = grid.extra[name][row, column]
    if label:
        return True if value == grid.labels[name].index(ast.literal_eval(label)) else None
    if grid.extra[name].dtype == np.bool_:
        return True if value else None
    return int(value)


def diverse(line: _Line, rank: Floats, grid: Grid, names: Mapping[str, Value]) -> Chosen:
    """V27: groups one after the other, each with its own rows; a code costs `penalty` a time that it was taken."""
    groups = int(ast.literal_eval(line.args[0]))
    penalty = np.float32(np.asarray(evaluate(ast.unparse(line.args[1]), names)))
    candidates = in_order(rank, grid)
    size = grid.width // groups
    if grid.carry is None:
        size = math.ceil(min(grid.width, len(candidates)) / groups)
    times: dict[int, int] = {}
    out, carry = [], []
    for group in range(groups):
        own = [at for at in candidates if grid.carry is None or int(grid.carry[at[0]]) == group]
        if grid.carry is None:
            own = [at for at in own if not times.get(int(grid.code[at]))]
        value = {at: np.float32(rank[at] - penalty * np.float32(times.get(int(grid.code[at]), 0))) for at in own}
        best = sorted(own, key=lambda at: (-float(value[at]) + 0.0, number(at, grid)))[:size]
        for at in best:
            times[int(grid.code[at])] = times.get(int(grid.code[at]), 0) + 1
        out += best
        carry += [float(group)] * len(best)
    return Chosen(out, carry)


def explore(line: _Line, rank: Floats, grid: Grid) -> Chosen:
    """V39: K - E by rank, then E of the rest by rank + noise."""
    share = float(ast.literal_eval(line.args[0])) if line.args else 0.05
    spare = math.floor(share * grid.width)
    candidates = in_order(rank, grid)
    chosen = candidates[: grid.width - spare]
    rest = candidates[grid.width - spare :]
    key = {at: np.float32(rank[at] + grid.noise["explore"][at]) for at in rest}
    drawn = sorted(rest, key=lambda at: (-float(key[at]) + 0.0, number(at, grid)))[:spare]
    kept = set(chosen) | set(drawn)
    before = grid.carry if grid.carry is not None else np.zeros(len(rank))
    out = [at for at in candidates if at in kept]
    return Chosen(out, [max(float(at in drawn), float(before[at[0]])) for at in out])


def conditioned(score: Floats, grid: Grid) -> Floats:
    """V37: Gumbel of each child under its parent's, as Kool et al. 1903.06059 (appendix B) computes it."""
    out = np.full_like(score, -INF)
    for r in range(len(score)):
        limit = float(grid.carry[r]) if grid.carry is not None else 0.0
        raw = [
            float(np.float32(score[r, c] + grid.noise["gumbel"][r, c])) if score[r, c] > -INF else -math.inf
            for c in range(score.shape[1])
        ]
        top = max(raw, default=-math.inf)
        for c, one in enumerate(raw):
            if one == -math.inf:
                continue
            gap = -math.inf if one == top else math.log1p(-math.exp(one - top))
            u = limit - one + gap
            out[r, c] = np.float32(limit - max(0.0, u) - math.log1p(math.exp(-abs(u))))
    return out


def _line(text: str) -> _Line:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    return _Line(call.func.id, [*call.args, *(one.value for one in call.keywords)])
