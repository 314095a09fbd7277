"""Exact selection against the stable argsort (policy-language O1)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.ops.selection import keys, reference, sanitise, select_top

TIES = [0.0, -0.0, -1.0, 1.0, -np.inf, 0.5, -3.4028235e38, 1e-45, -1e-45]


def oracle(rank, order, size, code, kept):
    """One request: candidates in T0 order by a stable sort over (rank descending, order * C + code ascending)."""
    rows, columns = np.nonzero(rank > -np.inf)
    place = order[rows] * size + code[rows, columns]
    best = np.lexsort((place, -(rank[rows, columns] + 0.0)))[:kept]
    return list(zip(rows[best].tolist(), columns[best].tolist(), strict=True))


def found(result, start, kept, first_row):
    parent, column = result.parent[start : start + kept].tolist(), result.column[start : start + kept].tolist()
    live = [(p - first_row, c) for p, c in zip(parent, column, strict=True) if p >= 0]
    assert all(p == -1 and c == -1 for p, c in list(zip(parent, column, strict=True))[len(live) :])
    return live


@st.composite
def batches(draw):
    columns = draw(st.integers(1, 7))
    requests = [(draw(st.integers(0, 5)), draw(st.integers(0, 9))) for _ in range(draw(st.integers(1, 4)))]
    rows = sum(width for width, _ in requests)
    values = st.sampled_from(TIES) if draw(st.booleans()) else st.floats(-5, 5, width=32)
    rank = np.array(draw(st.lists(values, min_size=rows * columns, max_size=rows * columns)), np.float32)
    order = np.concatenate([np.empty(0, np.int64), *(draw(st.permutations(range(w))) for w, _ in requests)])
    return rank.reshape(rows, columns), order.astype(np.int64), requests


@settings(max_examples=400, deadline=None)
@given(batches())
def test_selection_is_the_stable_argsort_of_each_request(batch):
    rank, order, requests = batch
    rows, columns = rank.shape
    size = columns + 2
    code = np.tile(np.arange(1, columns + 1), (rows, 1))  # a row's codes need not start at 0
    start = np.concatenate(([0], np.cumsum([width for width, _ in requests]))).tolist()
    kept = [k for _, k in requests]
    result = select_top(torch.from_numpy(rank), torch.from_numpy(code), torch.from_numpy(order), size, start, kept)
    out = 0
    for request, (width, keep) in enumerate(requests):
        own = slice(start[request], start[request] + width)
        expected = oracle(rank[own], order[own], size, code[own], keep)
        assert found(result, out, keep, start[request]) == expected
        assert result.n_valid[request] == len(expected)
        assert result.order[out : out + keep].tolist() == list(range(keep))
        out += keep


@pytest.mark.parametrize("kind", ["random", "equal", "sorted", "one winner", "half"])
@pytest.mark.parametrize(("width", "columns", "keep"), [(64, 1024, 32), (16, 300, 512), (1, 50, 64), (50, 3, 200)])
def test_two_stages_equal_one_at_real_shapes(kind, width, columns, keep):
    generator = torch.Generator().manual_seed(7)
    rank = torch.randn(width, columns, generator=generator)
    if kind == "equal":
        rank = torch.zeros_like(rank)
    elif kind == "sorted":
        rank = rank.flatten().sort().values.reshape(width, columns)
    elif kind == "one winner":
        rank = rank.clone()
        rank[width // 2] += 100
    elif kind == "half":
        rank = rank.half().float()
    code = torch.arange(columns).expand(width, columns)
    order = torch.randperm(width, generator=generator)
    result = select_top(rank, code, order, columns, [0, width], [keep])
    flat = np.empty((width, columns), np.float32)
    flat[order.numpy()] = rank.numpy()  # rows in order, so that the flat index is the tie key
    best = np.argsort(-flat.ravel(), kind="stable")[: min(keep, width * columns)]
    place_to_row = np.argsort(order.numpy())
    live = found(result, 0, keep, 0)
    assert live == [(int(place_to_row[i // columns]), int(i % columns)) for i in best]


def keys_made(monkeypatch):
    """Grows by one with each call of `keys`."""
    made, real = [], reference.keys
    monkeypatch.setattr(reference, "keys", lambda *given: made.append(1) or real(*given))
    return made


def uneven(requests=3, rows=4, columns=6):
    """Ranks of which no two are equal, in no order."""
    generator = np.random.default_rng(5)
    return torch.from_numpy(generator.permutation(requests * rows * columns).astype(np.float32)).view(-1, columns)


@pytest.mark.parametrize(("kept", "alone"), [(1, False), (3, True), (23, True), (24, False), (25, False)])
def test_ranks_that_all_differ_give_what_keys_would(kept, alone, monkeypatch):
    rank = uneven()
    code = torch.arange(6).expand(12, 6)
    given = (rank, code, torch.arange(4).repeat(3), 6, [0, 4, 8, 12], [kept] * 3)
    quick, made = select_top(*given), keys_made(monkeypatch)
    assert not made
    select_top(*given)
    assert bool(made) is not alone, "as many as there are, or rows that are cut first: by keys"
    monkeypatch.setattr(reference, "_distinct", lambda *_: None)
    assert all(torch.equal(a, b) for a, b in zip(quick, select_top(*given), strict=True))


@pytest.mark.parametrize(
    ("at", "value", "alone"),
    [
        (0, 22.0, False),  # a tie of the first two
        (10, 12.0, False),  # of the last that is kept and the next
        (13, 11.0, True),  # behind the next one
        (10, -np.inf, True),  # one fewer, of enough
    ],
)
def test_ranks_alone_choose_only_where_they_all_differ_up_to_the_next_one(at, value, alone, monkeypatch):
    made = keys_made(monkeypatch)
    rank = torch.arange(23, -1, -1, dtype=torch.float32)
    rank[at] = value
    result = select_top(rank.view(4, 6), torch.arange(6).expand(4, 6), torch.arange(4), 6, [0, 4], [11])
    assert bool(made) is not alone
    expected = oracle(rank.view(4, 6).numpy(), np.arange(4), 6, np.tile(np.arange(6), (4, 1)), 11)
    assert found(result, 0, 11, 0) == expected


def test_a_rank_of_minus_infinity_is_no_survivor_where_all_others_differ(monkeypatch):
    made = keys_made(monkeypatch)
    rank = torch.arange(6, dtype=torch.float32).view(2, 3)
    rank[0, :2] = -torch.inf
    given = (torch.arange(3).expand(2, 3), torch.arange(2), 3, [0, 2])
    assert select_top(rank, *given, [4]).parent.tolist() == [1, 1, 1, 0]
    assert not made
    assert select_top(rank, *given, [5]).parent.tolist() == [1, 1, 1, 0, -1]
    assert made


def test_shuffled_rows_give_the_same_survivors():
    rank = torch.randn(12, 40).mul(2).round()  # many ties
    code, order = torch.arange(40).expand(12, 40), torch.arange(12)
    shuffle = torch.randperm(12)
    plain = select_top(rank, code, order, 40, [0, 12], [50])
    moved = select_top(rank[shuffle], code, order[shuffle], 40, [0, 12], [50])
    assert torch.equal(shuffle[moved.parent], plain.parent)
    assert torch.equal(moved.column, plain.column)


def test_keys_order_every_kind_of_float():
    values = torch.tensor([[3.0, 1e-45, 0.0, -1e-45, -1.0, -3.4028235e38]])
    packed = keys(values, torch.zeros(1, 6, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 8)[0]
    assert packed.tolist() == sorted(packed.tolist(), reverse=True)
    assert len(set(packed.tolist())) == 6
    zero = keys(torch.tensor([[0.0, -0.0]]), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1), 8)[0]
    assert zero[0] == zero[1]


def test_bad_logits_become_invalid_and_are_counted():
    good = torch.tensor([[1.0, -torch.inf], [2.0, 3.0]])
    values, bad = sanitise(good)
    assert bad is None
    assert torch.equal(values, good)
    values, bad = sanitise(torch.tensor([[1.0, torch.nan], [torch.inf, 3.0]]))
    assert bad.tolist() == [1, 1]
    assert values.tolist() == [[1.0, -torch.inf], [-torch.inf, 3.0]]


def test_a_half_precision_step_is_read_as_fp32():
    values, bad = sanitise(torch.ones(2, 2, dtype=torch.bfloat16))
    assert bad is None
    assert values.dtype == torch.float32
