"""Inputs of the gated delta rule as a model makes them, and trees of beams with the states that the definition has."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from app.ops.gdn import Record, Records, replay, unit_keys, unit_queries
from app.ops.gdn.reference import delta_rule_step


class Shape(NamedTuple):
    """Heads and head dims: HK, HV, K, V."""

    hk: int
    hv: int
    k: int
    v: int


class Tokens(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_alpha: Tensor
    beta: Tensor

    @property
    def alpha(self) -> Tensor:
        return self.log_alpha.exp()


def tokens(count: int, shape: Shape, seed: int, dtype: torch.dtype = torch.float32) -> Tokens:
    """q, k of unit length and q scaled by K ** -0.5; v ~ N(0, 1); beta = sigmoid(N(0, 1)); alpha as the models are
    initialised: exp(-A softplus(a + 1)), A uniform in 0.01..16 a head, a ~ N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    rate = torch.empty(shape.hv).uniform_(0.01, 16, generator=generator)
    return Tokens(
        unit_queries(normal(count, shape.hk, shape.k)).to(dtype),
        unit_keys(normal(count, shape.hk, shape.k)).to(dtype),
        normal(count, shape.hv, shape.v).to(dtype),
        (-rate * functional.softplus(normal(count, shape.hv) + 1)).to(dtype),
        torch.sigmoid(normal(count, shape.hv)).to(dtype),
    )


def new_records(steps: int, rows: int, shape: Shape, dtype: torch.dtype = torch.float32) -> Records:
    return Records(
        torch.full((steps, rows, shape.hv), torch.nan),
        torch.full((steps, rows, shape.hv, shape.v), torch.nan, dtype=dtype),
        torch.full((steps, rows, shape.hk, shape.k), torch.nan),
        torch.full((steps, rows, shape.hk), torch.nan),
    )


def tree(widths: list[list[int]], seed: int) -> list[Tensor]:
    """Parents of each step's rows, widths[t][r] beams of request r: any beam of the same request, so some are pruned
    and others have many children, in any order. Step 0's parents are the requests."""
    generator = torch.Generator().manual_seed(seed)
    parents, start = [], torch.arange(len(widths[0]) + 1)
    for width in widths:
        count = torch.tensor(width)
        size = start.diff().repeat_interleave(count)
        picked = (torch.rand(len(size), generator=generator) * size).long()
        parents.append(start[:-1].repeat_interleave(count) + picked)
        start = torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)])
    return parents


class Run(NamedTuple):
    """One decode: outputs of every step, and what the definition gives."""

    ours: list[Tensor]
    exact: list[Tensor]


def decode(
    shape: Shape,
    widths: list[list[int]],
    seed: int,
    *,
    compact: bool = False,
    records: torch.dtype = torch.float32,
    exact: torch.dtype = torch.float32,
) -> Run:
    """Every step of a random tree by replay, and by a state for each beam that follows its parent."""
    parents, generator = tree(widths, seed), torch.Generator().manual_seed(seed + 1)
    s_ctx = torch.randn((len(widths[0]), shape.hv, shape.k, shape.v), generator=generator) * shape.k**-0.5
    slots = new_records(len(widths), max(map(sum, widths)), shape, records)
    state, ours, theirs = s_ctx.to(exact), [], []
    ancestry = torch.empty(len(widths[0]), 0, dtype=torch.int32)
    for t, parent in enumerate(parents):
        x = tokens(len(parent), shape, seed + 2 + t)
        state = state[parent]
        o, state = delta_rule_step(state, x.q, x.k, x.v, x.alpha, x.beta)
        theirs.append(o)
        if t:
            ancestry = torch.cat([ancestry[parent], parent.int().unsqueeze(1)], 1)
            if compact:
                for kept in slots:
                    kept[:t, : len(parent)] = kept[:t, parent]
                ancestry = torch.arange(len(parent), dtype=torch.int32).unsqueeze(1).expand(-1, t).clone()
        else:
            ancestry = ancestry[parent]
        start = torch.tensor([0, *widths[t]]).cumsum(0)
        o, delta = replay(*x[:3], x.alpha, x.beta, s_ctx, slots, row_start=start, ancestry=ancestry, compact=compact)
        length = 0.5 + torch.rand(x.k.shape[:2], generator=generator)
        slots.put(t, Record(x.alpha, delta, x.k * length.unsqueeze(2), 1 / length))
        ours.append(o)
    return Run(ours, theirs)
