"""Several requests of one structure in one step, as the runtime lays them out, against the sequential oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from app.ops.selection import select_top
from app.policies import noise
from app.policies.facts import Catalogue, Column
from app.policies.plan import Plan, StepInputs
from app.policies.reference import Grid, sanitise
from app.policies.reference_select import Chosen, select_step

COLUMNS = (
    Column("attr", "genre", "text", labels=("drama", "comedy", "crime")),
    Column("attr", "cold", "condition"),
    Column("attr", "age", "number", low=0, high=10),
    Column("attr", "studio", "text", fixed=True, labels=("a", "b")),
    Column("prior", "popularity"),
    Column("blocked", "ads", "condition"),
    Column("boosted", "campaign", "condition"),
    Column("user", "age"),
    Column("ctx", "country", "text"),
)
CATALOGUE = Catalogue((10**6,) * 4, COLUMNS)
CONDITIONS = ('ctx.country == "BR"', 'ctx.country in ["BR", "MX"]', 'ctx.country != "MX"')
"""Those on the texts of a request that `case` knows the truth of."""
LABELS = {one.key: one.labels for one in COLUMNS if one.labels}
LEVELS = np.array([0.0, -0.0, -0.5, -1.0, -1.0, -2.0, -2.5, -4.0], np.float32)


@dataclass(frozen=True)
class Case:
    """One request's grid with its seed."""

    grid: Grid
    seed: int


def case(rng: np.random.Generator, plan: Plan, t: int, c: int, f: int, params: Mapping[str, float]) -> Case:
    """A random request at step t: ties, -inf, NaN; few codes, so that everything collides."""
    children = plan.structure.steps[t - 1].children
    w = 1 if t == 1 else int(rng.integers(1, 6))
    f = f if children else c
    logits = rng.choice(LEVELS, size=(w, c)) if rng.random() < 0.7 else rng.normal(size=(w, c)).astype(np.float32)
    logits = np.where(
        rng.random((w, c)) < 0.1, rng.choice(np.array([-np.inf, np.nan, np.inf], np.float32), (w, c)), logits
    )
    code = np.stack([np.sort(rng.choice(c, f, replace=False)) for _ in range(w)]).astype(np.int64)
    legal = rng.random((w, f)) < rng.choice([0.0, 0.7, 1.0, 1.0])
    order = rng.permutation(w).astype(np.int64)
    prefix = np.stack([np.arange(t - 1) * 0 + rng.integers(0, 3, t - 1) for _ in range(w)]).astype(np.int64)
    # two survivors never share a prefix: tests number the rows in the last code
    if t > 1:
        prefix[:, -1] = (rng.permutation(w) + rng.integers(0, 2)) % max(w, 2)
    seed = int(rng.integers(0, 2**53))
    studio = np.broadcast_to(rng.integers(-1, 2, (w, 1)), (w, f)).copy()
    extra = {
        "attr.genre": rng.integers(-1, 3, (w, f)),
        "attr.cold": rng.random((w, f)) < 0.3,
        "attr.age": rng.integers(0, 10, (w, f)).astype(np.float32),
        "attr.studio": studio,
        "prior.popularity": -rng.random((w, f)).astype(np.float32),
        "blocked.ads": rng.random((w, f)) < 0.2,
        "boosted.campaign": rng.random((w, f)) < 0.2,
        "user.age": np.full((w, f), rng.choice([31, 0, -2, 1e30]), np.float32),
        **{text: np.full((w, f), rng.random() < 0.5) for text in CONDITIONS},
    }
    seeds, codes = torch.full((w,), seed, dtype=torch.int64), torch.from_numpy(code)
    rows = torch.from_numpy(prefix)
    drawn = {
        "gumbel": noise.gumbel(seeds, rows, codes, t).numpy(),
        "uniform": noise.uniform(seeds, rows, codes, t).numpy(),
        "explore": noise.gumbel(seeds, rows, codes, t, noise.EXPLORE).numpy(),
    }
    grid = Grid(
        logits=logits,
        code=code,
        legal=legal,
        trie=legal if children else rng.random((w, f)) < 0.7,
        seen=rng.random((w, f)) < 0.3,
        excluded=rng.random((w, f)) < 0.1,
        parent=rng.choice(np.array([0.0, -1.0, -2.0, -2.5], np.float32), size=w),
        log_norm=None,
        params=params,
        step=t,
        width=int(rng.integers(1, 9)),
        order=order,
        prefix=prefix,
        noise=drawn,
        extra=extra,
        labels=LABELS,
    )
    return Case(grid, seed)


def with_groups(one: Case, rng: np.random.Generator, groups: int) -> Case:
    """Rows of a diverse search: each belongs to a group, and the width is a multiple of the groups."""
    carry = None if one.grid.step == 1 else rng.integers(0, groups, len(one.grid.parent)).astype(np.float32)
    return replace(one, grid=replace(one.grid, carry=carry, width=groups * int(rng.integers(1, 4))))


def with_gumbels(one: Case, rng: np.random.Generator) -> Case:
    """Rows of a stochastic search carry their Gumbel."""
    carry = None if one.grid.step == 1 else rng.gumbel(size=len(one.grid.parent)).astype(np.float32)
    return replace(one, grid=replace(one.grid, carry=carry))


def run_batch(plan: Plan, t: int, cases: Sequence[Case]) -> list[Chosen]:
    """Survivors of each request: the compiled step, then the fast path's best K."""
    program = plan.structure.steps[t - 1]
    grids = [one.grid for one in cases]
    start = [0, *np.cumsum([len(grid.parent) for grid in grids]).tolist()]
    rows = [(len(grid.parent), at) for at, grid in enumerate(grids)]

    def joined(values: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values))

    def per_row(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([value for (n, _), value in zip(rows, values, strict=True) for _ in range(n)], dtype=dtype)

    values = [[grid.params.get(name, 0.0) for name in plan.structure.params] for grid in grids]
    carry = None if any(grid.carry is None for grid in grids) else joined([grid.carry for grid in grids])
    extra = {name: joined([grid.extra[name] for grid in grids]) for name in program.uses if name in grids[0].extra}
    extra = {name: column[:, 0] if name.startswith(("user.", "ctx.")) else column for name, column in extra.items()}
    inputs = StepInputs(
        logits=joined([sanitise(grid.logits)[0] for grid in grids]),
        log_norm=None,
        code=joined([grid.code for grid in grids]),
        legal=joined([grid.legal for grid in grids]),
        trie=joined([grid.trie for grid in grids]) if "trie" in program.uses else None,
        seen=joined([grid.seen for grid in grids]) if "seen" in program.uses else None,
        excluded=joined([grid.excluded for grid in grids]),
        parent=joined([grid.parent for grid in grids]),
        params=torch.tensor([values[at] for n, at in rows for _ in range(n)], dtype=torch.float32).reshape(
            start[-1], -1
        ),
        step=t,
        width=per_row([grid.width for grid in grids], torch.float32),
        request=per_row(list(range(len(grids))), torch.int64) if "request" in program.uses else None,
        order=joined([grid.order for grid in grids]) if "request" in program.uses else None,
        widths=tuple(grid.width for grid in grids) if "request" in program.uses else (),
        rows=tuple(len(grid.parent) for grid in grids) if "request" in program.uses else (),
        prefix=joined([grid.prefix for grid in grids]) if "prefix" in program.uses else None,
        seed=per_row([one.seed for one in cases], torch.int64) if "seed" in program.uses else None,
        carry=carry if "carry" in program.uses else None,
        extra=extra,
    )
    scored = program.run(inputs)
    assert not torch.isnan(scored.rank).any()
    assert not (scored.rank == np.inf).any()
    assert (scored.carry is not None) == program.carries
    order = joined([grid.order for grid in grids])
    keep = [grid.width for grid in grids]
    best = select_top(scored.rank, inputs.code, order, grids[0].logits.shape[1], start, keep)
    out, first = [], 0
    for at, width in enumerate(keep):
        own = range(first, first + int(best.n_valid[at]))
        places = [(int(best.parent[i]) - start[at], int(best.column[i])) for i in own]
        carried = [0.0 if scored.carry is None else float(scored.carry[start[at] + r, c]) for r, c in places]
        out.append(Chosen(places, carried))
        first += width
    return out


def expected(plan: Plan, t: int, cases: Sequence[Case]) -> list[Chosen]:
    """The oracle's survivors."""
    steps = plan.resolved["steps"]
    assert isinstance(steps, list)
    return [select_step(steps[t - 1], one.grid, plan.operators) for one in cases]
