"""One stage against two at a real step, 512 beams of 8192 codes, on data that is hard for cuts: each way to select by
the compiled code, which cuts rows first or looks at the best few, against a scan of all four million candidates."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from app.ops.selection import select_top
from app.policies import choose
from app.policies.choose import Field
from app.policies.quota import Quota, quota

W, C, K = 512, 8192, 512
KINDS = ("bfloat", "half", "equal", "one row wins", "sorted", "exactly K")
"""Half precision and bfloat16, whose boundary value stands dozens of times; all equal; one row ahead of the others; in
order; as many valid ones as places."""


def ranks(kind: str) -> torch.Tensor:
    rng = np.random.default_rng(KINDS.index(kind))
    if kind in ("half", "bfloat"):
        values = torch.from_numpy(rng.normal(size=(W, C)).astype(np.float32))
        return values.to(torch.float16 if kind == "half" else torch.bfloat16).float()
    values = np.full((W, C), -1.0, np.float32)
    if kind == "one row wins":
        values[7] = np.sort(rng.normal(size=C)).astype(np.float32) + 9
    if kind == "sorted":
        values = np.linspace(-9, 0, W * C, dtype=np.float32).reshape(W, C)
    if kind == "exactly K":
        valid = rng.permutation(W * C).reshape(W, C) < K
        values = np.where(valid, -rng.integers(0, 4, (W, C)), -np.inf).astype(np.float32)
    return torch.from_numpy(values)


@pytest.fixture(scope="module", params=KINDS)
def step(request) -> tuple[torch.Tensor, np.ndarray]:
    """Ranks, and all valid candidates in T0: one stable sort of everything."""
    rank = ranks(request.param)
    flat = rank.numpy().ravel()
    order = np.argsort(-flat, kind="stable")
    return rank, order[flat[order] > -np.inf]


FIELD = Field(
    torch.zeros(W, dtype=torch.int64), torch.arange(W), torch.arange(C).expand(W, C), torch.tensor([K]), (K,), C, (W,)
)
PARENT, COLUMN = torch.arange(W)[:, None], torch.arange(C).expand(W, C)


def taken(rank: torch.Tensor) -> list[int]:
    """What a way to select leaves, as flat places in the order of its ranks."""
    best = select_top(rank, FIELD.code, FIELD.order, C, [0, W], [K])
    kept = int(best.n_valid[0])
    return (best.parent[:kept].long() * C + best.column[:kept].long()).tolist()


def scan(order: np.ndarray, caps: list[tuple[np.ndarray, int]], floors: list[tuple[np.ndarray, int]]) -> list[int]:
    """Floors, then the best, one candidate after the other; a group of -1 is none."""
    chosen: set[int] = set()
    counts: list[dict[int, int]] = [{} for _ in caps]

    def take(at: int) -> bool:
        groups = [int(group[at]) for group, _ in caps]
        full = any(
            own >= 0 and count.get(own, 0) >= most for own, count, (_, most) in zip(groups, counts, caps, strict=True)
        )
        if full or at in chosen or len(chosen) == K:
            return False
        for own, count in zip(groups, counts, strict=True):
            count[own] = count.get(own, 0) + 1
        chosen.add(at)
        return True

    for group, least in floors:
        left = least
        for at in _until(order[group[order] >= 0]):
            left -= take(at)
            if not left:
                break
    for at in _until(order):
        take(at)
        if len(chosen) == K:
            break
    kept: list[int] = order[np.isin(order, list(chosen))].tolist()
    return kept


def _until(order: np.ndarray) -> Iterator[int]:
    for first in range(0, len(order), 4096):
        yield from order[first : first + 4096].tolist()


def test_the_best_k(step):
    rank, order = step
    assert taken(rank) == order[:K].tolist()


def test_a_cap_of_each_beam(step):
    rank, order = step
    got = taken(quota(rank, FIELD, [Quota(40, PARENT)], [], cut=True))
    assert got == scan(order, [(np.repeat(np.arange(W), C), 40)], [])


def test_caps_inside_each_other_and_a_floor_of_some_beams(step):
    rank, order = step
    first, some = PARENT // 8, torch.where(PARENT % 100 == 99, 0, -1)
    got = taken(quota(rank, FIELD, [Quota(40, PARENT), Quota(128, first)], [Quota(9, some)], cut=True))
    rows = np.repeat(np.arange(W), C)
    assert got == scan(order, [(rows, 40), (rows // 8, 128)], [(np.where(rows % 100 == 99, 0, -1), 9)])


def test_a_cap_and_a_floor_of_groups_that_cross_beams(step):
    rank, order = step
    kinds, rare = COLUMN % 11, torch.where(COLUMN % 250 == 249, 0, -1)
    got = taken(quota(rank, FIELD, [Quota(60, kinds)], [Quota(16, rare)], cut=False))
    columns = np.tile(np.arange(C), W)
    assert got == scan(order, [(columns % 11, 60)], [(np.where(columns % 250 == 249, 0, -1), 16)])


def test_groups_of_a_diverse_search(step):
    rank, order = step
    groups, penalty = 4, np.float32(0.5)
    own = torch.arange(W) % groups
    got, group_of = choose.diverse(rank, FIELD, torch.full((W, 1), float(penalty)), groups, own)
    flat, times, want = rank.numpy().ravel(), np.zeros(C, np.float32), []
    for group in range(groups):
        mine = order[order // C % groups == group]
        value = flat[mine] - penalty * times[mine % C]
        # ties by place: `mine` is in T0 of the ranks before the penalty
        best = mine[np.lexsort((mine, -value))][: K // groups]
        np.add.at(times, best % C, 1)
        want += best.tolist()
    assert taken(got) == want
    assert [int(group_of.view(-1)[at]) for at in want] == [at // C % groups for at in want]


def test_places_for_exploration(step):
    rank, order = step
    noise = torch.from_numpy(np.random.default_rng(1).gumbel(size=(W, C)).astype(np.float32))
    got, explored = choose.explore(rank, FIELD, noise, 0.125)
    firm, rest = order[: K - K // 8], order[K - K // 8 :]
    key = (rank + noise).numpy().ravel()[rest]
    drawn = rest[np.lexsort((rest, -key))][: K // 8]
    assert sorted(taken(got)) == sorted([*firm.tolist(), *drawn.tolist()])
    assert explored.view(-1).nonzero().view(-1).tolist() == sorted(drawn.tolist())
