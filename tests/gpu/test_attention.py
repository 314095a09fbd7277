"""The attention operators on a GPU against their definition in float32, and what a launch may touch."""

from __future__ import annotations

import itertools

import pytest
import torch

from app.ops import attention
from app.ops.attention import context, launch, reference

SCALE = 0.17
HALF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half an ulp of a result, relative."""


def make(dtype, *, n=301, h=6, hkv=6, d=64, positions=4, first=0, slots=401, seed=0, scale=1.0):
    """q, k, v are views of one product, as a model makes them; slots and tree are random."""
    torch.manual_seed(seed)
    product = (torch.randn(n, h + 2 * hkv, d, device="cuda") * scale).to(dtype)
    q, k, v = product.split_with_sizes([h, hkv, hkv], 1)
    steps = positions - 1 + first
    k_slots, v_slots = ((torch.randn(max(steps, 1), slots, hkv, d, device="cuda") * scale).to(dtype) for _ in range(2))
    tree = torch.randint(0, slots, (n, steps), device="cuda", dtype=torch.int32)
    return (q, k, v, k_slots, v_slots), {"ancestry": tree, "first": first, "scale": SCALE}


def inside_products(operands, h):
    """The same operands with slots that are parts of products of q, k and v; queries there are NaN."""
    q, k, v, *slots = operands
    steps, rows, hkv, d = slots[0].shape
    whole = torch.full((steps, rows, h + 2 * hkv, d), torch.nan, dtype=q.dtype, device="cuda")
    parts = whole[:, :, h : h + hkv], whole[:, :, h + hkv :]
    for part, given in zip(parts, slots, strict=True):
        part.copy_(given)
    return (q, k, v, *parts)


def wide(operands):
    return tuple(x.float() for x in operands)


def assert_rounded(found, expected, dtype):
    """Within half an ulp of the result, and what float32 sums in another order."""
    assert found.dtype == dtype
    error = (found.float() - expected).abs()
    bound = HALF[dtype] * expected.abs() * 1.01 + 3e-6 * expected.abs().max() + torch.finfo(dtype).tiny
    assert bool((error <= bound).all()), float((error / bound).max())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", [64, 128, 256, 8, 40, 96])
@pytest.mark.parametrize(("h", "hkv"), [(6, 6), (8, 2), (5, 1)])
def test_a_prefix_of_every_length_is_the_definition(dtype, d, h, hkv):
    for positions, compact, biased, first in itertools.product(range(1, 9), (False, True), (False, True), (0, 1)):
        operands, how = make(dtype, d=d, h=h, hkv=hkv, positions=positions, first=first, seed=positions)
        bias = torch.randn(h, positions, device="cuda") if biased else None
        expected, sums = reference.prefix_attention(*wide(operands), **how, bias=bias, compact=compact)
        out, lse = attention.prefix_attention_with_lse(*operands, **how, bias=bias, compact=compact)
        assert_rounded(out, expected, dtype)
        torch.testing.assert_close(lse, sums, atol=2e-5, rtol=2e-5)
        alone = attention.prefix_attention(*operands, **how, bias=bias, compact=compact)
        assert torch.equal(alone, out)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", [64, 128, 256, 8, 40])
@pytest.mark.parametrize(("h", "hkv"), [(6, 6), (8, 8), (8, 2)])
def test_slots_inside_of_products_give_the_same_bits(dtype, d, h, hkv):
    for positions, compact, first in itertools.product(range(1, 9), (False, True), (0, 1)):
        operands, how = make(dtype, d=d, h=h, hkv=hkv, positions=positions, first=first, seed=positions)
        expected = attention.prefix_attention_with_lse(*operands, **how, compact=compact)
        found = attention.prefix_attention_with_lse(*inside_products(operands, h), **how, compact=compact)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_slots_of_keys_and_values_that_lie_unequally_far_apart_are_refused():
    operands, how = make(torch.bfloat16)
    apart = inside_products(operands, 6)
    for pair in ((operands[3], apart[4]), (apart[3], operands[4])):
        with pytest.raises(ValueError, match="of values; equal are served"):
            attention.prefix_attention(*operands[:3], *pair, **how)


@pytest.mark.parametrize(
    ("n", "h", "d", "positions"), [(7, 3, 64, 8), (3, 5, 40, 3), (33, 2, 256, 4), (301, 14, 64, 4)]
)
def test_a_product_with_its_own_slot_stays_inside_of_its_memory(n, h, d, positions, monkeypatch):
    """q, k and v are the last slot itself, and around all slots is poison."""
    (*_, k_slots, v_slots), how = make(torch.float16, n=n, h=h, hkv=h, d=d, positions=positions, slots=n + 2)
    torch.manual_seed(4)
    slots = torch.randn(positions, n + 2, 3 * h, d, device="cuda").half()
    slots[:-1, :, :h] = torch.nan
    slots[:-1, :, h : 2 * h], slots[:-1, :, 2 * h :] = k_slots, v_slots
    slots[-1, n:] = torch.nan
    whole = between_nans(slots)
    before = whole.clone()
    own = whole[-1, :n]
    operands = (own[:, :h], own[:, h : 2 * h], own[:, 2 * h :], whole[:, :, h : 2 * h], whole[:, :, 2 * h :])
    expected, _ = reference.prefix_attention(*wide(operands), **how)
    guard = Guarded()
    monkeypatch.setattr(launch, "torch", guard)
    out, _ = launch.attend(*operands, how["ancestry"], scale=SCALE, first=0, compact=False, lse=True)
    assert_rounded(out, expected, torch.float16)
    for memory, size in guard.made:
        assert bool((memory[:4096] == -12345.0).all() & (memory[4096 + size :] == -12345.0).all())
        assert not bool((memory[4096 : 4096 + size] == -12345.0).any()), "every place is written"
    torch.testing.assert_close(whole, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_what_a_context_gave_counts_as_one_more_key(dtype, d):
    for positions, compact in itertools.product((1, 2, 4, 8), (False, True)):
        operands, how = make(dtype, d=d, h=8, hkv=4, positions=positions, seed=9)
        n = len(operands[0])
        shared = torch.randn(n, 8, d, device="cuda").to(dtype)
        sums = torch.randn(8, n, device="cuda").mul(3).t()
        sums[::7] = -torch.inf
        expected = reference.extend_attention((shared.float(), sums), *wide(operands), **how, compact=compact)
        out = attention.extend_attention((shared, sums), *operands, **how, compact=compact)
        assert_rounded(out, expected, dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_large_scores_do_not_overflow(dtype):
    operands, how = make(dtype, positions=5, scale=60.0, seed=3)
    expected, sums = reference.prefix_attention(*wide(operands), **how)
    out, lse = attention.prefix_attention_with_lse(*operands, **how)
    assert float(sums.abs().max()) > 5000, "beyond what float32 keeps to a hundredth after the exponential"
    torch.testing.assert_close(out.float(), expected, atol=0.5, rtol=0.01)
    torch.testing.assert_close(lse, sums, atol=1e-2, rtol=1e-5)


def test_what_tombstones_hold_stays_with_them():
    operands, how = make(torch.bfloat16, positions=4)
    clean = attention.prefix_attention(*operands, **how)
    dead = torch.tensor([0, 17, 18, 300], device="cuda")
    live = torch.tensor([n for n in range(301) if n not in dead.tolist()], device="cuda")
    operands[0][dead] = torch.nan
    how["ancestry"][dead] = torch.tensor([2**31 - 1, -(2**31), 401], dtype=torch.int32, device="cuda")
    found = attention.prefix_attention(*operands, **how)
    assert torch.equal(found[live], clean[live])
    assert bool(found[dead].isnan().all()), "a NaN is not hidden"


class Guarded:
    """torch with memory that lies between poisoned zones."""

    def __init__(self):
        self.made = []

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, shape, *, dtype, device):
        size = torch.Size(shape).numel()
        whole = torch.full((size + 8192,), -12345.0, dtype=dtype, device=device)
        self.made.append((whole, size))
        return whole[4096 : 4096 + size].view(shape)


def between_nans(x):
    whole = torch.full((x.numel() + 8192,), torch.nan, dtype=x.dtype, device=x.device)
    inside = whole[4096 : 4096 + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside


@pytest.mark.parametrize(("n", "h", "d", "positions"), [(1, 1, 64, 1), (7, 3, 64, 8), (3, 5, 40, 3), (33, 2, 256, 4)])
def test_nothing_outside_of_the_operands_is_read_or_written(n, h, d, positions, monkeypatch):
    operands, how = make(torch.float16, n=n, h=h, hkv=h, d=d, positions=positions, slots=n + 2)
    operands = tuple(between_nans(x) for x in operands)
    expected, _ = reference.prefix_attention(*wide(operands), **how)
    guard = Guarded()
    monkeypatch.setattr(launch, "torch", guard)
    out, _ = launch.attend(*operands, how["ancestry"], scale=SCALE, first=0, compact=False, lse=True)
    assert_rounded(out, expected, torch.float16)
    assert len(guard.made) == 2
    for whole, size in guard.made:
        assert bool((whole[:4096] == -12345.0).all() & (whole[4096 + size :] == -12345.0).all())
        assert not bool((whole[4096 : 4096 + size] == -12345.0).any()), "every place is written"


def test_a_launch_is_captured_and_follows_the_current_stream():
    operands, how = make(torch.bfloat16, positions=4)
    expected = attention.prefix_attention(*operands, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention.prefix_attention(*operands, **how)
    found.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
    operands[4].mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, attention.prefix_attention(*operands, **how))


def test_more_rows_than_32_bits_of_bytes():
    n, h, d = 1 << 17, 64, 128
    operands, how = make(torch.bfloat16, n=16, h=h, hkv=h, d=d, positions=2, slots=n)
    how["ancestry"].fill_(n - 1)
    q, k, v = (x.repeat(n // 16, 1, 1) for x in operands[:3])
    tree = how["ancestry"].repeat(n // 16, 1)
    out = attention.prefix_attention(q, k, v, *operands[3:], ancestry=tree, scale=SCALE)
    expected, _ = reference.prefix_attention(*wide(x[-16:] for x in (q, k, v)), *operands[3:], **how)
    assert_rounded(out[-16:], expected, torch.bfloat16)


def contexts(dtype, widths, lengths, *, h=8, hkv=2, d=64, positions=70):
    torch.manual_seed(1)
    n, r = sum(widths), len(widths)
    q = torch.randn(n, h, d, device="cuda").to(dtype)
    k, v = (torch.randn(r, positions, hkv, d, device="cuda").to(dtype) for _ in range(2))
    for one, length in enumerate(lengths):  # what lies behind a context is never read
        k[one, length:], v[one, length:] = torch.nan, torch.nan
    start = torch.tensor([0, *itertools.accumulate(widths)], dtype=torch.int32, device="cuda")
    return q, k, v, torch.tensor(lengths, dtype=torch.int32, device="cuda"), start


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", [64, 128, 256, 40])
@pytest.mark.parametrize(("h", "hkv"), [(6, 6), (8, 2)])
def test_a_ragged_batch_over_its_contexts_is_the_definition(dtype, d, h, hkv):
    widths, lengths = [130, 0, 1, 64, 5, 9], [70, 3, 1, 64, 0, 33]
    q, k, v, length, start = contexts(dtype, widths, lengths, h=h, hkv=hkv, d=d)
    expected, sums = reference.context_attention(q.float(), k.float(), v.float(), length, start, scale=SCALE)
    for widest in (130, 512):
        out, lse = attention.context_attention(q, k, v, length, start, widest=widest, scale=SCALE)
        torch.testing.assert_close(out.float(), expected, atol=4 * HALF[dtype], rtol=4 * HALF[dtype])
        torch.testing.assert_close(lse, sums, atol=1e-4, rtol=1e-4)
        assert bool((lse[195:200] == -torch.inf).all()) and bool((out[195:200] == 0).all())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("h", "hkv"), [(4, 4), (8, 2), (3, 1)])
def test_contexts_of_many_tiles(dtype, d, h, hkv):
    widths, lengths = [512, 300, 1, 129], [512, 511, 513, 64]
    q, k, v, length, start = contexts(dtype, widths, lengths, h=h, hkv=hkv, d=d, positions=513)
    q[:512].mul_(8)  # maxima that rise from tile to tile
    expected, sums = reference.context_attention(q.float(), k.float(), v.float(), length, start, scale=SCALE)
    out, lse = attention.context_attention(q, k, v, length, start, widest=512, scale=SCALE)
    torch.testing.assert_close(out.float(), expected, atol=4 * HALF[dtype], rtol=4 * HALF[dtype])
    torch.testing.assert_close(lse, sums, atol=1e-4, rtol=1e-4)


def test_a_context_stays_with_its_rows_and_inside_of_its_memory(monkeypatch):
    widths, lengths = [130, 0, 7], [200, 5, 65]
    q, k, v, length, start = contexts(torch.bfloat16, widths, lengths, hkv=4, positions=200)
    clean, sums = attention.context_attention(q, k, v, length, start, widest=130, scale=SCALE)
    q, k, v = (between_nans(x) for x in (q, k, v))
    q[[3, 131]] = torch.nan
    guard = Guarded()
    monkeypatch.setattr(context, "torch", guard)
    assert context.unfit(q, k, v, SCALE) is None
    out, lse = context.attend(q, k, v, length, start, widest=140, scale=SCALE)
    live = torch.tensor([n for n in range(137) if n not in {3, 131}], device="cuda")
    assert torch.equal(out[live], clean[live]) and torch.equal(lse[live], sums[live])
    assert bool(out[[3, 131]].isnan().all()), "a NaN is not hidden"
    for whole, size in guard.made:
        assert bool((whole[:4096] == -12345.0).all() & (whole[4096 + size :] == -12345.0).all())
        assert not bool((whole[4096 : 4096 + size] == -12345.0).any()), "every place is written"


def test_a_captured_context_follows_its_operands():
    q, k, v, length, start = contexts(torch.bfloat16, [130, 60, 7], [200, 5, 65], hkv=4, positions=200)
    attention.context_attention(q, k, v, length, start, widest=512, scale=SCALE)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, _ = attention.context_attention(q, k, v, length, start, widest=512, scale=SCALE)
    length.copy_(torch.tensor([64, 199, 0]))
    start.copy_(torch.tensor([0, 1, 150, 197]))
    k.nan_to_num_(), v.nan_to_num_()
    graph.replay()
    expected, _ = reference.context_attention(q.float(), k.float(), v.float(), length, start, scale=SCALE)
    torch.testing.assert_close(found.float(), expected, atol=2**-6, rtol=2**-6)


@pytest.mark.parametrize("dtype", HALF)
def test_one_row_a_request_over_its_context(dtype):
    q, k, v, length, start = contexts(dtype, [1] * 6, [70, 3, 1, 64, 0, 33])
    expected, sums = reference.context_attention(q.float(), k.float(), v.float(), length, start, scale=SCALE)
    out, lse = attention.context_attention(q, k, v, length, start, widest=1, scale=SCALE)
    torch.testing.assert_close(out.float(), expected, atol=4 * HALF[dtype], rtol=4 * HALF[dtype])
    torch.testing.assert_close(lse, sums, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", HALF)
def test_prompts_see_what_came_before(dtype):
    sizes = [5, 70, 1, 64, 0, 64]
    start = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device="cuda")
    q = torch.randn(sum(sizes), 8, 64, device="cuda").to(dtype)
    k, v = (torch.randn(sum(sizes), 2, 64, device="cuda").to(dtype) for _ in range(2))
    out = attention.causal_attention(q, k, v, start, longest=70, scale=SCALE)
    expected = reference.causal_attention(q.float(), k.float(), v.float(), start, SCALE)
    torch.testing.assert_close(out.float(), expected, atol=4 * HALF[dtype], rtol=4 * HALF[dtype])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device():
    q, k, v, length, start = contexts(torch.bfloat16, [130, 1, 60], [70, 3, 70], hkv=8)
    operands, how = make(torch.bfloat16, n=191, h=8, hkv=8)
    attention.extend_attention(
        attention.context_attention(q, k, v, length, start, widest=512, scale=1.0), *operands, **how
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        shared = attention.context_attention(q, k, v, length, start, widest=512, scale=1.0)
        attention.extend_attention(shared, *operands, **how)
        attention.causal_attention(q, operands[1], operands[2], start, longest=512, scale=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
