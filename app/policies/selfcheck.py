"""C101: a plan proves itself against the oracle on built-in probes before it may serve.

A difference is a bug of ours, not of the policy: the plan is refused and the last good one stays. Ranks are held to the
stated closeness, scaled by the largest of them; survivors may differ only where their ranks are that close.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.ops.selection import select_top
from app.policies import noise
from app.policies.facts import Column, Facts
from app.policies.plan import Plan, StepInputs, StepProgram
from app.policies.reference import Floats, Grid, Ranks, sanitise, score_step
from app.policies.reference_select import Chosen, conditioned, select_step

CLOSE = 1e-4
"""How far ranks of the compiled plan and of the oracle may be apart, of the largest (docs/policies/codes/C101.md)."""
CODES = 6
ROWS = 4
SEED = 20261112
KINDS = ("ties", "random", "wide", "masked", "narrow", "bad")
"""Random matrices with ties, one all masked, one with fewer valid candidates than K, one with NaN and +inf."""


def self_check(
    plan: Plan, sizes: tuple[int, ...], facts: Facts, between: Callable[[], None] = lambda: None
) -> str | None:
    """What differs, or None. Steps with the same phases are checked once for step 1 and once for the later ones.
    between: called between pieces of work of about a millisecond"""
    steps = plan.resolved["steps"]
    assert isinstance(steps, list)
    done: set[str] = set()
    for t, (program, phases) in enumerate(zip(plan.structure.steps, steps, strict=True), 1):
        key = json.dumps([phases, min(t, 2)])
        if key not in done:
            done.add(key)
            probes = []
            for kind in KINDS:
                between()
                probes.append(_probe(kind, plan, program, phases, t, sizes[t - 1], facts))
            wrong = _compare(plan, program, phases, probes, between)
            if wrong is not None:
                return f"step {t}: {wrong}"
    return None


def _compare(
    plan: Plan, program: StepProgram, phases: Mapping[str, object], probes: list[Grid], between: Callable[[], None]
) -> str | None:
    """All probes as the requests of one batch. Survivors are compared bit for bit where the ranks that they are taken
    by are the reference's, bit for bit; by their closeness elsewhere."""
    start = [0, *np.cumsum([len(one.parent) for one in probes]).tolist()]
    grid, told = _join(probes), dict[str, Tensor]()
    inputs = _inputs(plan, program, grid, probes)._replace(told=told.__setitem__)
    between()
    scored = program.run(inputs)
    between()
    want = score_step(phases, grid, plan.operators)
    if not near(scored.score.numpy(), want.score):
        return "scores differ"
    if scored.bad.tolist() != want.bad.tolist():
        return "counts of bad candidates differ"
    given = told["rank"].numpy()
    if not near(given, want.rank):
        return "ranks differ"
    drawn = str(phases["select"]) == "stochastic()"
    for at, (kind, probe) in enumerate(zip(KINDS, probes, strict=True)):
        between()
        own = slice(start[at], start[at + 1])
        ranks = Ranks(want.score[own], want.rank[own], want.bad[own])
        rank = conditioned(ranks.score, probe) if drawn else ranks.rank
        got, expected = _survivors(scored.rank[own], probe), select_step(phases, probe, plan.operators, ranks)
        exact = not drawn and np.array_equal(given[own], ranks.rank)
        if got != expected.survivors and (exact or not _same(got, expected, rank)):
            return f"survivors of probe `{kind}` differ"
    return None


def _same(got: list[tuple[int, int]], want: Chosen, rank: npt.NDArray[np.float32]) -> bool:
    """As many survivors, with ranks as close at every place."""
    if len(got) != len(want.survivors):
        return False
    return near(np.array([rank[at] for at in got]), np.array([rank[at] for at in want.survivors]))


def near(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Equal where not finite, and within CLOSE of the largest where finite."""
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite):
        return False
    scale = 1 + float(np.abs(b[finite]).max(initial=0.0))
    return bool(np.all(np.abs(a[finite].astype(np.float64) - b[finite]) <= CLOSE * scale))


def _survivors(rank: Tensor, grid: Grid) -> list[tuple[int, int]]:
    assert grid.order is not None
    order, code = torch.from_numpy(grid.order), torch.from_numpy(grid.code)
    best = select_top(rank, code, order, grid.logits.shape[1], [0, len(grid.parent)], [grid.width])
    kept = int(best.n_valid[0])
    return list(zip(best.parent[:kept].tolist(), best.column[:kept].tolist(), strict=True))


def _probe(
    kind: str, plan: Plan, program: StepProgram, phases: Mapping[str, object], t: int, vocab: int, facts: Facts
) -> Grid:
    rng = np.random.default_rng([SEED, t, KINDS.index(kind)])
    w, c = (1 if t == 1 else ROWS), CODES
    logits = rng.normal(scale=3.0 if kind == "wide" else 1.0, size=(w, c))
    if kind == "ties":
        logits = np.round(logits)
    if kind == "bad":
        logits = np.where(rng.random((w, c)) < 0.4, rng.choice([np.nan, np.inf, -np.inf], (w, c)), logits)
    legal = np.full((w, c), kind != "masked")
    if kind == "narrow":
        legal = np.arange(c)[None] < 1 + np.arange(w)[:, None] % 2
    prefix = np.tile(np.arange(w)[:, None], (1, t - 1)) % ROWS
    return Grid(
        logits=logits.astype(np.float32),
        code=np.tile(np.arange(c), (w, 1)),
        legal=legal,
        trie=legal if program.children else rng.random((w, c)) < 0.7,
        seen=rng.random((w, c)) < 0.2,
        excluded=rng.random((w, c)) < 0.1,
        parent=(-np.arange(w) / 2).astype(np.float32),
        log_norm=None,
        params=dict(zip(plan.structure.params, plan.params, strict=True)),
        step=t,
        width=_width(phases),
        order=rng.permutation(w).astype(np.int64),
        prefix=prefix,
        carry=_carry(phases, t, w),
        noise=_drawn(program, prefix, c, t),
        extra={key: _column(key, facts, rng, w, c) for key in sorted(program.uses) if "." in key},
        labels={key: one.labels for key, one in facts.items() if one.labels},
        vocab=vocab,
    )


def _join(probes: list[Grid]) -> Grid:
    """The rows of all probes in one grid, for what is done row by row."""

    def all_of(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(one, name) for one in probes])

    first = probes[0]
    return replace(
        first,
        logits=all_of("logits"),
        code=all_of("code"),
        legal=all_of("legal"),
        trie=all_of("trie"),
        seen=all_of("seen"),
        excluded=all_of("excluded"),
        parent=all_of("parent"),
        order=all_of("order"),
        prefix=all_of("prefix"),
        carry=None if first.carry is None else all_of("carry"),
        noise={name: np.concatenate([one.noise[name] for one in probes]) for name in first.noise},
        extra={name: np.concatenate([one.extra[name] for one in probes]) for name in first.extra},
    )


def _width(phases: Mapping[str, object]) -> int:
    """Two survivors a group for `diverse`, five otherwise: more than a narrow probe holds, fewer than the others."""
    select = str(phases["select"])
    return (
        2 * int(select.split("groups=")[1].split(",", maxsplit=1)[0])
        if "groups=" in select
        else 4
        if "diverse" in select
        else 5
    )


def _carry(phases: Mapping[str, object], t: int, rows: int) -> npt.NDArray[np.float32] | None:
    if t == 1:
        return None
    gumbel = str(phases["select"]) == "stochastic()"
    return np.array([-0.3 * row if gumbel else row % 2 for row in range(rows)], np.float32)


def _drawn(program: StepProgram, prefix: npt.NDArray[np.int64], codes: int, t: int) -> dict[str, Floats]:
    if "seed" not in program.uses:
        return {}
    rows, seed = torch.from_numpy(prefix), torch.full((len(prefix),), SEED)
    code = torch.arange(codes).repeat(len(prefix), 1)
    return {
        "gumbel": noise.gumbel(seed, rows, code, t).numpy(),
        "uniform": noise.uniform(seed, rows, code, t).numpy(),
        "explore": noise.gumbel(seed, rows, code, t, noise.EXPLORE).numpy(),
    }


def _column(key: str, facts: Facts, rng: np.random.Generator, w: int, c: int) -> npt.NDArray[np.generic]:
    column = facts.get(key, Column("ctx", key, "condition"))  # a condition on the request's texts
    shape = (w, 1) if column.fixed else (1, 1) if column.space in ("user", "ctx") else (w, c)
    made: npt.NDArray[np.generic]
    if column.form == "condition":
        made = rng.random(shape) < 0.4
    elif column.form == "text":
        made = rng.integers(-1, len(column.labels), shape)
    else:
        low, high = max(column.low, -1.0), min(column.high, 1.0)
        made = (low + max(high - low, 0.0) * rng.random(shape)).astype(np.float32)
    return np.broadcast_to(made, (w, c)).copy()


def _inputs(plan: Plan, program: StepProgram, grid: Grid, probes: list[Grid]) -> StepInputs:
    n, uses = len(grid.parent), program.uses
    assert grid.order is not None and grid.prefix is not None
    extra = {key: torch.from_numpy(column) for key, column in grid.extra.items()}
    extra = {key: one[:, 0] if key.startswith(("user.", "ctx.")) else one for key, one in extra.items()}
    return StepInputs(
        logits=torch.from_numpy(sanitise(grid.logits)[0]),
        log_norm=None,
        code=torch.from_numpy(grid.code),
        legal=torch.from_numpy(grid.legal),
        trie=torch.from_numpy(grid.trie) if "trie" in uses else None,
        seen=torch.from_numpy(grid.seen) if "seen" in uses else None,
        excluded=torch.from_numpy(grid.excluded),
        parent=torch.from_numpy(grid.parent),
        params=torch.tensor(plan.params, dtype=torch.float32).expand(n, len(plan.params)),
        step=grid.step,
        width=torch.full((n,), float(grid.width)),
        request=torch.arange(len(probes)).repeat_interleave(torch.tensor([len(one.parent) for one in probes])),
        order=torch.from_numpy(grid.order),
        widths=tuple(one.width for one in probes),
        rows=tuple(len(one.parent) for one in probes),
        prefix=torch.from_numpy(grid.prefix),
        seed=torch.full((n,), SEED),
        carry=None if grid.carry is None else torch.from_numpy(grid.carry),
        extra=extra,
    )
