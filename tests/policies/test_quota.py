"""Caps and floors against a scan of one candidate after the other, whatever way they are found in."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from app.ops.selection import reference
from app.policies import choose
from app.policies import quota as module
from app.policies.choose import Field
from app.policies.groups import _by_rank
from app.policies.quota import Quota, quota
from tests.no_wait import NoWait

INF = float("inf")
LEVELS = np.array([0, -0.5, -1, -1, -2, -3], np.float32)


class Step(NamedTuple):
    """Requests of several rows, and their quotas as a policy may have them."""

    rank: torch.Tensor
    field: Field
    caps: list[Quota]
    floors: list[Quota]
    nested: bool


def number(rng: np.random.Generator, shape: tuple[int, int], most: int, *, outside: bool = False) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-1 if outside else 0, int(rng.integers(1, most + 1)), shape))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Caps lie in each other, and in the groups of a floor that has several; both may be of rows, of codes, of
    candidates, or of some of them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = tuple(rng.integers(1, 6, int(rng.integers(1, 4))).tolist())
    w, c = sum(rows), int(rng.integers(1, 14))
    widths = tuple(rng.integers(1, 9, len(rows)).tolist())
    order = torch.cat([torch.from_numpy(rng.permutation(n)) for n in rows])
    code = torch.arange(c).repeat(w, 1)
    field = Field(choose.numbered(rows, order.device), order, code, torch.tensor(widths), widths, c, rows)
    scale = draw(st.sampled_from(["ties", "distinct", "sorted"]))
    rank = rng.choice(LEVELS, (w, c)) if scale == "ties" else rng.normal(size=(w, c)).astype(np.float32)
    rank = np.sort(rank.ravel())[::-1].reshape(w, c) if scale == "sorted" else rank
    out = rng.random((w, c)) < draw(st.sampled_from([0.0, 0.2, 0.9]))
    rank = torch.from_numpy(np.where(out, -np.inf, rank).astype(np.float32))

    def limit(most: int = 5) -> int:
        return int(rng.integers(1, most + 1))

    kind = draw(st.sampled_from(["code", "any", "blocks", "some", "row", "none"]))
    if kind == "code":
        caps = [Quota(limit(), code, c if rng.random() < 0.5 else None, once=True)]
    elif kind == "some":
        caps = [Quota(limit(), number(rng, (w, c), 1, outside=True), 1)]
    elif kind in ("any", "blocks"):  # of neighbours, so that a look finds little else where ranks are sorted
        blocks = torch.arange(w * c).view(w, c) // int(rng.integers(2, 9))
        inner = number(rng, (w, c), 6) if kind == "any" else blocks
        caps = [Quota(limit(), inner), Quota(limit(8), inner // 2, w * c)][: int(rng.integers(1, 3))]
    elif kind == "row":
        caps = [Quota(limit(), order[:, None], nested=True), Quota(limit(8), order[:, None] // 2, nested=True)]
    else:
        caps = []
    floors = []
    for _ in range(draw(st.integers(0, 2))):
        outer = caps[-1].group // 2 if caps and kind != "some" else number(rng, (w, c), 3)
        many = kind != "some" and rng.random() < 0.5
        group = outer if many else number(rng, (w, c), 1, outside=True)
        floors.append(Quota(int(rng.integers(0, 4)), group, None if many else 1, nested=many and kind == "row"))
    nested = kind in ("row", "none") and all(one.nested for one in floors)
    return Step(rank, field, caps, floors, nested)


def scan(step: Step) -> list[tuple[int, int]]:
    """One candidate after the other: floors, then the best."""
    field, chosen = step.field, []
    rank, order = step.rank.numpy(), field.order.tolist()
    first = 0
    for request, (rows, width) in enumerate(zip(field.rows, field.widths, strict=True)):
        assert field.request[first].item() == request
        places = [(r, f) for r in range(first, first + rows) for f in range(rank.shape[1]) if rank[r, f] > -INF]
        places.sort(key=lambda at: (-float(rank[at]), order[at[0]] * field.size + at[1]))
        taken: list[tuple[int, int]] = []
        for goal in (*step.floors, None):
            for at in places:
                fits = all(held(one, taken, at) < one.limit for one in step.caps if of(one, at) >= 0)
                wanted = goal is None or (of(goal, at) >= 0 and held(goal, taken, at) < goal.limit)
                if at not in taken and fits and wanted and len(taken) < width:
                    taken.append(at)
        chosen += taken
        first += rows
    return sorted(chosen)


def of(one: Quota, at: tuple[int, int]) -> int:
    r, f = at
    return int(one.group[r, min(f, one.group.shape[1] - 1)])


def held(one: Quota, taken: list[tuple[int, int]], at: tuple[int, int]) -> int:
    return Counter(of(one, other) for other in taken)[of(one, at)]


@pytest.mark.parametrize("line", [0, 20, 10**9])
@pytest.mark.parametrize("free", [True, False])
@given(step=steps(), look=st.sampled_from([1, 2, 4]))
@settings(max_examples=60, deadline=None)
def test_what_is_taken_is_that_of_the_scan(free, line, step, look):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "waiting_is_free", lambda _: free)
        patch.setattr(module, "LOOK", look)
        patch.setattr(module, "LINE", line)
        if not free:
            patch.setattr(reference, "_distinct", lambda *_: None)  # what a CPU looks at first
        with NoWait(on=not free):
            out = quota(step.rank, step.field, step.caps, step.floors, cut=step.nested)
            uncut = quota(step.rank, step.field, step.caps, step.floors, cut=False)
    found = [tuple(at) for at in (out > -INF).nonzero().tolist()]
    assert found == scan(step)
    assert torch.equal(out, torch.where(out > -INF, step.rank, -INF))
    assert torch.equal(out, uncut)
    event(f"{'nested' if step.nested else 'across rows'}, {len(step.floors)} floors")


def test_a_cap_that_fills_one_group_a_look_needs_as_many_looks_as_it_says(monkeypatch):
    """The worst case: each look finds nothing but one group, and takes one of it."""
    monkeypatch.setattr(choose, "waiting_is_free", lambda _: False)
    monkeypatch.setattr(module, "LOOK", 1)
    monkeypatch.setattr(module, "LINE", 10**9)
    looks = []
    right = module.head
    monkeypatch.setattr(module, "head", lambda *given: looks.append(1) or right(*given))
    w, c, k = 6, 20, 6
    field = Field(
        torch.zeros(w).long(), torch.arange(w), torch.arange(c).repeat(w, 1), torch.tensor([k]), (k,), c, (w,)
    )
    rank = -torch.arange(w * c).view(w, c).float()
    group = torch.arange(w)[:, None].expand(w, c)
    out = quota(rank, field, [Quota(1, group)], [], cut=False)
    assert (out > -INF).nonzero().tolist() == [[r, 0] for r in range(w)]
    assert len(looks) == 1 + k


def test_looks_of_a_group_with_one_candidate_a_row_are_fewer():
    assert Quota(1, torch.zeros(1)).looks(512, 512, 2048) == 512
    assert Quota(1, torch.zeros(1), once=True).looks(512, 512, 2048) == 171  # 512 groups of 512, 1536 a look
    assert Quota(16, torch.zeros(1), once=True).looks(512, 512, 2048) == 11
    assert Quota(16, torch.zeros(1), once=True).looks(512, 512, 512) == 32
    assert Quota(1, torch.zeros(1), values=1).looks(512, 512, 2048) == 1
    assert Quota(513, torch.zeros(1)).looks(512, 512, 2048) == 0


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_equal_prefixes_have_one_number_and_others_have_others(seed):
    rng = np.random.default_rng(seed)
    prefix = torch.from_numpy(rng.integers(-1, int(rng.integers(1, 4)), rng.integers(1, [9, 5])))
    with NoWait():
        got = _by_rank(prefix)
    assert torch.equal(got, torch.unique(prefix, dim=0, return_inverse=True)[1])
    assert len(_by_rank(prefix[:0])) == 0
