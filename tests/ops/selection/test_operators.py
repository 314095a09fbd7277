"""The registered operators on a CPU, their shapes without data, and what surrounds them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from app.ops.selection import child_of, children_bits, count_bad, one_read, pack, reference, select_logits, select_top
from app.ops.selection.geometry import requests


def batch(seed=0, codes=13, widths=(3, 0, 5), keep=(4, 2, 9), dtype=torch.float32):
    torch.manual_seed(seed)
    rows = sum(widths)
    start = [0, *torch.tensor(widths).cumsum(0).tolist()]
    order = torch.cat([torch.randperm(width) for width in widths])
    return torch.randn(rows, codes).to(dtype), torch.randn(rows), order, start, list(keep)


def test_fakesranks_through_the_operator_are_the_definition():
    rank, _, order, start, keep = batch()
    rank[rank < 0] = -torch.inf
    code = torch.arange(13).expand(rank.shape)
    of = requests(start, keep, rank.device)
    found = torch.ops.widebeam.select_top(rank, order, *of[:3], of.widest, of.most, of.total)
    expected = reference.select_top(rank, code, order, 13, start, keep)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    assert all(
        torch.equal(one, two) for one, two in zip(select_top(rank, code, order, 13, start, keep), expected, strict=True)
    )


@pytest.mark.parametrize("normalize", ["step", "valid", "none", "given"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_selected_as_their_scores_are(normalize, dtype):
    logits, parent, order, start, keep = batch(dtype=dtype)
    logits[1, 2], logits[4, 5] = torch.nan, torch.inf
    parent[6] = -torch.inf
    legal = torch.rand(logits.shape) < 0.7
    norm = torch.randn(len(parent))
    slots = torch.arange(16, dtype=torch.int32).view(8, 2)
    best = select_logits(
        logits, parent, order, start, keep, normalize=normalize, mask=pack(None, legal, 13), norm=norm, ancestry=slots
    )
    values = logits.float().nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    over = {"step": values, "valid": values.where(legal, -torch.inf)}
    own = over[normalize].logsumexp(1) if normalize in over else norm if normalize == "given" else torch.zeros(8)
    score = (parent[:, None] + (values - own[:, None])).where(legal, -torch.inf).nan_to_num(nan=-torch.inf)
    code = torch.arange(13).expand(score.shape)
    expected = reference.select_top(score, code, order, 13, start, keep)
    assert torch.equal(best.parent, expected.parent)
    assert torch.equal(best.code, expected.column)
    assert torch.equal(best.n_valid, expected.n_valid)
    alive = best.parent >= 0
    torch.testing.assert_close(best.score[alive], score[best.parent[alive], best.code[alive]])
    assert (best.score[~alive] == -torch.inf).all()
    assert best.bad.tolist() == [0, 1, 0, 0, 1, 0, 0, 0]
    at = best.parent.clamp(min=0)
    assert torch.equal(best.slots, torch.cat((slots[at], at.int()[:, None]), 1))


def test_shapes_are_known_without_data():
    logits, parent, order, start, keep = batch()
    of = requests(start, keep, logits.device)
    slots = order.int()[:, None]
    real = select_logits(logits, parent, order, start, keep, normalize="step", ancestry=slots)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(one) for one in (logits, parent, order, slots, *of[:3])]
        fake = torch.ops.widebeam.select_logits(
            fakes[0], None, None, *fakes[1:3], fakes[3], *fakes[4:], of.widest, of.most, of.total, "step"
        )
        ranks = torch.ops.widebeam.select_top(fakes[0], fakes[2], *fakes[4:], of.widest, of.most, of.total)
    assert [(one.shape, one.dtype) for one in fake] == [(one.shape, one.dtype) for one in real]
    top = reference.select_top(logits, torch.arange(13).expand(8, 13), order, 13, start, keep)
    assert [(one.shape, one.dtype) for one in ranks] == [(one.shape, one.dtype) for one in top]


def test_a_cpu_has_no_kernel_of_one_read():
    logits, _, _, start, keep = batch()
    assert not one_read(logits, start, keep)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(0, 2**20))
def test_bits_are_the_legal_codes(codes, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    columns = max(1, codes // 2)
    code = torch.stack([torch.randperm(codes, generator=generator)[:columns].sort().values for _ in range(rows)])
    legal = torch.rand(code.shape, generator=generator) < 0.5
    mask = pack(code, legal, codes)
    assert mask.shape[1] % 4 == 0
    found = [{c for c in range(8 * mask.shape[1]) if row[c // 8] >> (c % 8) & 1} for row in mask.tolist()]
    assert found == [set(one[flags].tolist()) for one, flags in zip(code, legal, strict=True)]
    whole = torch.zeros(len(code), codes, dtype=torch.bool).scatter_(1, code, legal)
    assert torch.equal(pack(None, whole, codes), mask)


def test_a_node_is_found_by_its_code_and_nothing_else_is():
    first = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    edges = torch.tensor([1, 5, 9, 0, 2, 5, 6, 7], dtype=torch.int32)
    for node in (-1, 0, 1, 2):
        for code in range(-1, 12):
            own = range(first[node], first[node + 1]) if node >= 0 else ()
            expected = next((edge + 1 for edge in own if edges[edge] == code), -1)
            row = torch.tensor([0])
            assert child_of(first, edges, torch.tensor([node]), row, torch.tensor([code]), 5).item() == expected
            assert child_of(first, edges, torch.tensor([node]), row - 1, torch.tensor([code]), 5).item() == -1


def test_children_are_bits_without_those_that_are_dead():
    first = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    edges = torch.tensor([1, 5, 9, 0, 2, 5, 6, 37], dtype=torch.int32)
    node, request = torch.tensor([0, 1, 2, -1, 2, 0]), torch.tensor([0, 0, 0, 1, 1, 1])
    dead = torch.tensor([0 * 9 + 2, 0 * 9 + 8, 1 * 9 + 1, 1 * 9 + 4])  # request 0: nodes 2 and 8; request 1: 1 and 4
    expected = [[1, 9], [], [0, 2, 5, 6], [], [2, 5, 6, 37], [5, 9]]
    mask = children_bits(first, edges, node, 5, 38, dead=dead, request=request, nodes=9)
    assert [[c for c in range(64) if row[c // 8] >> (c % 8) & 1] for row in mask.tolist()] == expected
    everyone = children_bits(first, edges, node, 5, 38, dead=dead[:0], request=request, nodes=9)
    assert everyone[0].tolist() == [34, 2, 0, 0, 0, 0, 0, 0]


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any), st.integers(0, 3), st.integers(0, 2**20))
def test_what_was_wrong_is_counted_by_request(widths, lists, seed):
    torch.manual_seed(seed)
    n, requests = sum(widths), len(widths)
    request = torch.repeat_interleave(torch.tensor(widths))
    start = torch.tensor([0, *torch.tensor(widths).cumsum(0).tolist()], dtype=torch.int32)
    bad, broken = torch.randint(0, 9, (n,), dtype=torch.int32), [torch.randint(0, 9, (n,)) for _ in range(lists)]
    score = torch.randn(n).masked_fill(torch.rand(n) < 0.3, -torch.inf)
    expected = torch.zeros(2 * requests + 1, dtype=torch.int64)
    expected.index_add_(0, request, bad.long().masked_fill(score == -torch.inf, 0))
    expected[requests:-1].index_add_(0, request, (score > -torch.inf).long())
    expected[-1] = sum(int(one.sum()) for one in broken)
    assert torch.equal(count_bad(bad, broken, score, start), expected)
    none = count_bad(None, broken, score, start)
    assert none.tolist() == [0] * 2 * requests + [expected[-1]]
