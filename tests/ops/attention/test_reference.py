import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from app.ops.attention import reference
from app.ops.attention.reference import (
    alone_attention,
    causal_attention,
    context_attention,
    extend_attention,
    merge,
    prefix_attention,
)

SCALE = 0.3


class Largest(TorchDispatchMode):
    """The largest tensor that any operator makes or is given as new memory, in elements."""

    def __init__(self):
        super().__init__()
        self.numel, self.calls = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def softmax_attention(q, keys, values, bias=None):
    """One row in float64: q [H, D], keys and values [S, Hkv, D], bias [H, S] -> out [H, D], lse [H]."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("hd,shd->hs", q.double(), keys) * SCALE + (0 if bias is None else bias)
    if keys.shape[0] == 0:
        return torch.zeros(q.shape, dtype=torch.float64), torch.full((q.shape[0],), -np.inf, dtype=torch.float64)
    return torch.einsum("hs,shd->hd", scores.softmax(-1), values), scores.logsumexp(-1)


def make(widths, lengths, heads, kv_heads, dim=8, steps=3, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    n, r, positions, slots = sum(widths), len(widths), max([*lengths, 1]) + 2, max(sum(widths), 1) + 3
    data = {
        "q": torch.randn(n, heads, dim).to(dtype),
        "k": torch.randn(n, kv_heads, dim).to(dtype),
        "v": torch.randn(n, kv_heads, dim).to(dtype),
        "context_k": torch.randn(r, positions, kv_heads, dim).to(dtype),
        "context_v": torch.randn(r, positions, kv_heads, dim).to(dtype),
        "length": torch.tensor(lengths, dtype=torch.int32),
        "row_start": torch.tensor([0, *np.cumsum(widths)], dtype=torch.int32),
        "k_slots": torch.randn(steps, slots, kv_heads, dim).to(dtype),
        "v_slots": torch.randn(steps, slots, kv_heads, dim).to(dtype),
        "ancestry": torch.randint(0, slots, (n, steps), dtype=torch.int32),
        "request": [r for r, width in enumerate(widths) for _ in range(width)],
    }
    for r_, length in enumerate(lengths):  # what lies behind a context is never read
        data["context_k"][r_, length:] = torch.nan
        data["context_v"][r_, length:] = torch.nan
    return data


def context_of(d, bias=None):
    return context_attention(
        d["q"], d["context_k"], d["context_v"], d["length"], d["row_start"], scale=SCALE, bias=bias
    )


def prefix_of(d, **how):
    arguments = (d["q"], d["k"], d["v"], d["k_slots"], d["v_slots"])
    return prefix_attention(*arguments, **({"ancestry": d["ancestry"], "scale": SCALE} | how))


shapes = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=5)
head_counts = st.sampled_from([(4, 4), (4, 2), (3, 1), (1, 1), (8, 2)])


@settings(max_examples=40, deadline=None)
@given(shapes, head_counts, st.booleans(), st.integers(0, 3), st.integers(0, 99))
def test_the_parts_and_their_merge_equal_one_softmax(shape, heads, biased, first, seed):
    widths, lengths = zip(*shape, strict=True)
    d = make(widths, lengths, *heads, seed=seed)
    positions, prefix = d["context_k"].shape[1], d["ancestry"].shape[1] - first + 1
    bias = torch.randn(heads[0], positions) if biased else None
    own_bias = torch.randn(heads[0], prefix) if biased else None
    shared, own = context_of(d, bias), prefix_of(d, first=first, bias=own_bias)
    out, lse = merge(*shared, *own)
    for n, r in enumerate(d["request"]):
        length = lengths[r]
        part_k = d["context_k"][r, :length]
        part_v = d["context_v"][r, :length]
        expected = softmax_attention(d["q"][n], part_k, part_v, bias[:, :length] if biased else None)
        torch.testing.assert_close(shared[0][n].double(), expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(shared[1][n].double(), expected[1], atol=1e-5, rtol=1e-5)
        steps = range(first, d["ancestry"].shape[1])
        own_k = torch.stack([*(d["k_slots"][j, d["ancestry"][n, j]] for j in steps), d["k"][n]])
        own_v = torch.stack([*(d["v_slots"][j, d["ancestry"][n, j]] for j in steps), d["v"][n]])
        expected = softmax_attention(d["q"][n], own_k, own_v, own_bias)
        torch.testing.assert_close(own[0][n].double(), expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own[1][n].double(), expected[1], atol=1e-5, rtol=1e-5)
        both = torch.cat([bias[:, :length], own_bias], 1) if biased else None
        expected = softmax_attention(d["q"][n], torch.cat([part_k, own_k]), torch.cat([part_v, own_v]), both)
        torch.testing.assert_close(out[n].double(), expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[n].double(), expected[1], atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.tuples(st.integers(1, 6), st.integers(1, 9)), head_counts, st.integers(0, 3), st.booleans())
def test_a_request_alone_is_one_softmax_over_its_context_and_each_prefix(shape, heads, first, compact):
    d = make(*([one] for one in shape), *heads, seed=first)
    expected, _ = merge(*context_of(d), *prefix_of(d, first=first, compact=compact))
    own = (d[name][0, : shape[1]] for name in ("context_k", "context_v"))
    arguments = (d["q"], d["k"], d["v"], *own, d["k_slots"], d["v_slots"])
    out = alone_attention(*arguments, ancestry=d["ancestry"], scale=SCALE, first=first, compact=compact)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(shapes, head_counts, st.integers(0, 3), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_extending_equals_the_merge_of_the_parts(shape, heads, first, dtype, compact):
    d = make(*zip(*shape, strict=True), *heads, dtype=dtype, seed=first)
    shared = context_of(d)
    expected, _ = merge(*shared, *prefix_of(d, first=first, compact=compact))
    arguments = (d["q"], d["k"], d["v"], d["k_slots"], d["v_slots"])
    out = extend_attention(shared, *arguments, ancestry=d["ancestry"], scale=SCALE, first=first, compact=compact)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_inputs_stay_within_their_rounding(dtype):
    d = make((5, 0, 7, 7), (9, 4, 6, 6), 4, 2, dim=16, dtype=dtype)
    out, lse = merge(*context_of(d), *prefix_of(d, first=1))
    wide = {key: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for key, x in d.items()}
    expected, expected_lse = merge(*context_of(wide), *prefix_of(wide, first=1))
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(lse, expected_lse, atol=2e-2, rtol=2e-2)


def test_the_fused_and_the_plain_path_agree_in_any_block_size(monkeypatch):
    d = make((70, 3, 70), (40, 7, 40), 4, 2)
    fused = context_of(d)
    zero = torch.zeros(4, d["context_k"].shape[1])
    for block in (1, 1000, 1 << 30):
        monkeypatch.setattr(reference, "SCORES", block)
        plain = context_of(d, zero)
        torch.testing.assert_close(plain, fused, atol=1e-5, rtol=1e-5)


def test_compacted_slots_equal_identity_ancestry():
    d = make((5, 6), (3, 4), 4, 2)
    identity = torch.arange(11, dtype=torch.int32).unsqueeze(1).expand(11, 3)
    torch.testing.assert_close(
        prefix_of(d, ancestry=identity, first=1, compact=True), prefix_of(d, ancestry=identity, first=1)
    )


def test_whatever_a_tombstone_holds_stays_in_its_row():
    d = make((5, 6), (3, 4), 4, 2)
    clean = merge(*context_of(d), *prefix_of(d))
    live = torch.tensor([0, 1, 3, 4, 5, 6, 7, 10])
    for row in (2, 8, 9):
        d["q"][row], d["k"][row], d["v"][row] = torch.nan, torch.inf, -torch.inf
        d["ancestry"][row] = torch.tensor([-1, 2**31 - 1, -(2**31)])
    dirty = merge(*context_of(d), *prefix_of(d))
    torch.testing.assert_close(dirty[0][live], clean[0][live], rtol=0, atol=0)
    torch.testing.assert_close(dirty[1][live], clean[1][live], rtol=0, atol=0)
    arguments = [d[name] for name in ("q", "k", "v", "k_slots", "v_slots")]
    whole = extend_attention(context_of(d), *arguments, ancestry=d["ancestry"], scale=SCALE)
    torch.testing.assert_close(whole[live], clean[0][live], rtol=1e-5, atol=1e-6)


def test_rows_of_a_request_in_another_order_give_the_same_rows():
    d = make((40, 30), (33, 20), 4, 2)
    order = torch.cat([torch.randperm(40), 40 + torch.randperm(30)])
    expected = [x[order] for x in merge(*context_of(d), *prefix_of(d))]
    moved = d | {name: d[name][order] for name in ("q", "k", "v", "ancestry")}
    torch.testing.assert_close(list(merge(*context_of(moved), *prefix_of(moved))), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("biased", [False, True], ids=["fused", "plain"])
def test_the_context_is_never_gathered_per_row(biased):
    widths, lengths, heads, dim = (256, 200, 17), (300, 120, 77), 4, 32
    d = make(widths, lengths, heads, heads, dim=dim)
    with Largest() as largest:
        context_of(d, torch.zeros(heads, d["context_k"].shape[1]) if biased else None)
    per_row = sum(width * length for width, length in zip(widths, lengths, strict=True)) * heads * dim
    assert largest.calls > 0
    assert largest.numel < per_row // 8


def test_scores_of_many_rows_are_never_held_at_once(monkeypatch):
    monkeypatch.setattr(reference, "SCORES", 10_000)
    d = make((500,), (100,), 4, 2)
    with Largest() as largest:
        context_of(d, torch.zeros(4, 102))
    assert largest.numel <= 500 * 4 * 8


@pytest.mark.parametrize("sizes", [[3], [4, 4, 4], [1, 7, 7, 2], [0, 2]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_causal_attention_sees_what_came_before(sizes, heads, kv_heads):
    torch.manual_seed(1)
    total, start = sum(sizes), np.cumsum([0, *sizes])
    q, k, v = torch.randn(total, heads, 8), torch.randn(total, kv_heads, 8), torch.randn(total, kv_heads, 8)
    out = causal_attention(q, k, v, torch.tensor(start, dtype=torch.int32), SCALE)
    for first, end in itertools.pairwise(start):
        for n in range(first, end):
            expected, _ = softmax_attention(q[n], k[first : n + 1], v[first : n + 1])
            torch.testing.assert_close(out[n].double(), expected, atol=1e-5, rtol=1e-5)


def test_operands_that_do_not_fit_are_named():
    d = make((2,), (3,), 4, 2)
    with pytest.raises(ValueError, match="q: 3 heads are not a multiple of the 2 key/value heads"):
        context_of(d | {"q": torch.randn(2, 3, 8)})
    with pytest.raises(ValueError, match=r"length: 9 is outside of 0\.\.5"):
        context_of(d | {"length": torch.tensor([9])})
