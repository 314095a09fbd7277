"""The exact cuts of a row (policy-language 2.3): what may be cut before a selection; the naive cuts are shown wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.ops.selection import select_top
from app.policies import choose
from app.policies.choose import Field, line
from app.policies.quota import Quota, quota

INF = float("inf")


def field(rng: np.random.Generator, w: int, c: int, k: int) -> Field:
    order = torch.from_numpy(rng.permutation(w))
    return Field(
        torch.zeros(w, dtype=torch.int64), order, torch.arange(c).repeat(w, 1), torch.tensor([k]), (k,), c, (w,)
    )


def ranks(rng: np.random.Generator, w: int, c: int) -> torch.Tensor:
    values = rng.choice(np.array([0, -0.5, -1, -1, -2, -3], np.float32), (w, c))
    return torch.from_numpy(np.where(rng.random((w, c)) < 0.2, -np.inf, values).astype(np.float32))


def naive(rank: torch.Tensor, width: int) -> torch.Tensor:
    """Every row cut to its best `width`, ties by column."""
    place = torch.argsort(torch.argsort(rank, dim=1, descending=True, stable=True), dim=1, stable=True)
    return torch.where(place < width, rank, -INF)


def shapes(rng: np.random.Generator) -> tuple[int, int, int]:
    return int(rng.integers(1, 7)), int(rng.integers(2, 13)), int(rng.integers(1, 10))


def test_row_nested_quotas_are_the_same_after_a_cut_to_k():
    rng = np.random.default_rng(1)
    for _ in range(200):
        w, c, k = shapes(rng)
        on, rank = field(rng, w, c, k), ranks(rng, w, c)
        group = torch.from_numpy(rng.integers(0, 3, (w, 1)))
        caps = [Quota(int(rng.integers(1, 4)), on.order[:, None]), Quota(int(rng.integers(1, 6)), group)]
        floors = [Quota(int(rng.integers(0, 3)), torch.where(group == 0, 0, -1))]
        whole = quota(rank, on, caps, floors, cut=False)
        assert torch.equal(quota(rank, on, caps, floors, cut=True), whole)
        assert torch.equal(quota(naive(rank, k), on, caps, floors, cut=False), whole)


@pytest.mark.parametrize("kind", ["cap", "floor"])
def test_groups_that_cross_rows_are_not_cut_because_a_cut_to_k_is_wrong(kind):
    rng = np.random.default_rng(2)
    wrong = 0
    for _ in range(500):
        w, c, k = shapes(rng)
        on, rank = field(rng, w, c, k), ranks(rng, w, c)
        groups = Quota(int(rng.integers(1, 3)), torch.from_numpy(rng.integers(0, 3, (w, c))))
        caps, floors = ([groups], []) if kind == "cap" else ([], [groups])
        whole = quota(rank, on, caps, floors, cut=False)
        wrong += not torch.equal(quota(naive(rank, k), on, caps, floors, cut=False), whole)
    assert wrong > 10


def test_one_unpenalised_cut_of_k_serves_all_groups_and_a_cut_to_the_group_size_does_not():
    rng = np.random.default_rng(3)
    wrong = 0
    for _ in range(200):
        w, c, groups = int(rng.integers(1, 7)), int(rng.integers(2, 13)), int(rng.integers(2, 4))
        k = groups * int(rng.integers(1, 4))
        on, rank = field(rng, w, c, k), ranks(rng, w, c)
        own = torch.from_numpy(rng.integers(0, groups, w))
        penalty = torch.full((w, 1), float(rng.choice([0.0, 0.5, 3.0])))
        wide = Field(on.request, on.order, on.code, on.k, (10**6,), c, (w,))  # never cuts
        whole, _ = choose.diverse(rank, wide, penalty, groups, own)
        assert torch.equal(choose.diverse(rank, on, penalty, groups, own)[0], whole)
        wrong += not torch.equal(choose.diverse(naive(rank, k // groups), wide, penalty, groups, own)[0], whole)
    assert wrong > 10


def test_exploration_needs_the_best_by_rank_and_by_key():
    rng = np.random.default_rng(4)
    wrong = 0
    for _ in range(200):
        w, c, k = shapes(rng)
        on, rank = field(rng, w, c, k), ranks(rng, w, c)
        noise = torch.from_numpy(rng.gumbel(size=(w, c)).astype(np.float32))
        wide = Field(on.request, on.order, on.code, on.k, (10**6,), c, (w,))
        sizes = on
        whole, explored = choose.explore(rank, wide, noise, 0.0)
        assert torch.equal(choose.explore(rank, sizes, noise, 0.0)[0], whole)
        assert not explored.any()
        full = _explore(rank, on, noise, k)
        assert torch.equal(choose.explore(rank, sizes, noise, 0.5)[0], full)
        only_key = naive(torch.add(rank, noise), max(1, k // 2)) > -INF
        wrong += not torch.equal(_explore(torch.where(only_key, rank, -INF), on, noise, k), full)
    assert wrong > 10


def _explore(rank: torch.Tensor, on: Field, noise: torch.Tensor, k: int) -> torch.Tensor:
    """V39 without any cut."""
    spare = int(0.5 * k)
    ordered = line(rank, on, cut=False).at
    chosen, rest = ordered[: k - spare], ordered[k - spare :]
    keyed = torch.full_like(rank, -INF)
    keyed.view(-1)[rest] = (rank + noise).reshape(-1)[rest]
    return choose.only(rank, torch.cat([chosen, line(keyed, on, cut=False).at[:spare]]))


@pytest.mark.parametrize("case", ["equal", "winner row", "sorted", "exactly k", "random"])
def test_two_stages_are_one_stage_at_real_shapes(case):
    rng = np.random.default_rng(5)
    w, c, k = 64, 2048, 256
    values = {
        "equal": np.zeros((w, c)),
        "winner row": np.where(np.arange(w)[:, None] == 7, 1.0, -1.0) + np.zeros((w, c)),
        "sorted": np.arange(w * c).reshape(w, c) / 1e3,
        "exactly k": np.where(rng.permutation(w * c).reshape(w, c) < k, 0.0, -np.inf),
        "random": rng.normal(size=(w, c)).astype(np.float16),
    }[case]
    rank = torch.from_numpy(values.astype(np.float32))
    order = torch.from_numpy(rng.permutation(w))
    on = Field(torch.zeros(w, dtype=torch.int64), order, torch.arange(c).repeat(w, 1), torch.tensor([k]), (k,), c, (w,))
    best = select_top(rank, on.code, order, c, [0, w], [k])
    flat = best.parent * c + best.column
    assert torch.equal(line(rank, on, cut=True).at[:k], flat)
    assert torch.equal(line(rank, on, cut=False).at[:k], flat)
