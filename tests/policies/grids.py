"""Random and hostile step inputs, for the compiled path and for the reference alike."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from hypothesis import strategies as st

from app.policies.plan import Plan, Scored, StepInputs
from app.policies.reference import Grid, Ranks, sanitise, score_step

SPECIAL = np.array([0.0, -0.0, 1.0, 1.0, -1.0, 2.5, -np.inf, np.nan, np.inf, 1e30, -1e30, 1e-40], np.float32)


@st.composite
def grids(draw: st.DrawFn, children: bool, params: Mapping[str, float] | None = None) -> Grid:
    """A request's step: ties, -inf, NaN, +inf, -0.0, fp16-rounded and plain logits; padded candidate lists."""
    w, c = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    f = draw(st.integers(1, c)) if children else c
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(scale=draw(st.sampled_from([0.01, 1.0, 30.0])), size=(w, c)).astype(np.float32)
    if draw(st.booleans()):
        logits = logits.astype(np.float16).astype(np.float32)
    special = rng.random((w, c)) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    logits = np.where(special, rng.choice(SPECIAL, size=(w, c)), logits)
    code = np.stack([np.sort(rng.choice(c, f, replace=False)) for _ in range(w)]).astype(np.int64)
    legal = rng.random((w, f)) < draw(st.sampled_from([0.0, 0.8, 1.0]))
    code = np.where(legal, code, 0) if children else code
    parent = rng.choice([0.0, -1.5, -700.25, -3e4], size=w).astype(np.float32)
    full = draw(st.booleans())
    return Grid(
        logits=logits,
        code=code,
        legal=legal,
        trie=legal if children else rng.random((w, f)) < 0.7,
        seen=rng.random((w, f)) < 0.3,
        excluded=rng.random((w, f)) < draw(st.sampled_from([0.0, 0.3])),
        parent=parent,
        log_norm=(rng.normal(size=w) + 20).astype(np.float32) if full else None,
        params=dict(params or {}),
        step=1,
        width=draw(st.integers(1, 12)),
    )


def run(plan: Plan, grid: Grid, t: int = 1) -> Scored:
    """The compiled step on a grid."""
    program = plan.structure.steps[t - 1]
    clean, _ = sanitise(grid.logits)
    values = [grid.params.get(name, value) for name, value in zip(plan.structure.params, plan.params, strict=True)]
    n = len(grid.parent)
    return program.run(
        StepInputs(
            logits=torch.from_numpy(clean),
            log_norm=None if grid.log_norm is None else torch.from_numpy(grid.log_norm),
            code=torch.from_numpy(grid.code),
            legal=torch.from_numpy(grid.legal),
            trie=torch.from_numpy(grid.trie) if "trie" in program.uses else None,
            seen=torch.from_numpy(grid.seen) if "seen" in program.uses else None,
            excluded=torch.from_numpy(grid.excluded),
            parent=torch.from_numpy(grid.parent),
            params=torch.tensor(values, dtype=torch.float32).expand(n, len(values)),
            step=t,
            width=torch.full((n,), float(grid.width)),
        )
    )


def reference(plan: Plan, grid: Grid, t: int = 1) -> Ranks:
    """The oracle on the same grid, from the resolved policy's text alone."""
    steps = plan.resolved["steps"]
    assert isinstance(steps, list)
    return score_step(steps[t - 1], grid, plan.operators)


def largest_term(grid: Grid) -> np.ndarray:
    """[W, F] the largest finite number that parent + logp adds up."""
    clean, _ = sanitise(grid.logits)
    finite = np.where(np.isfinite(clean), np.abs(clean), 0)
    over = finite.max(axis=1) + 30
    norm = np.abs(grid.log_norm) if grid.log_norm is not None else 0
    return np.maximum(np.maximum(over, np.abs(grid.parent)), norm)[:, None]


def close(a: np.ndarray, b: np.ndarray, terms: np.ndarray, ulps: int = 4) -> np.ndarray:
    """Within ulps of the largest term; infinities must be equal."""
    with np.errstate(invalid="ignore"):
        near = np.abs(a.astype(np.float64) - b) <= ulps * np.spacing(np.maximum(terms, 1e-30).astype(np.float32))
    return near | (a == b)
