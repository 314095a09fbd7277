"""Walking a trie on a GPU: the kernels against the definition."""

from __future__ import annotations

import pytest
import torch

from app.ops import trie
from app.ops.trie import operators, reference


def tree(index, nodes=500, fan=9, size=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = torch.randint(0, fan + 1, (nodes,), generator=generator)
    count[0] = fan
    first = torch.cat([count.new_zeros(1), count.cumsum(0)]).to(index)
    code = torch.cat([torch.randperm(size, generator=generator)[:c].sort().values for c in count]).to(torch.int32)
    node = torch.randint(-1, nodes, (333,), generator=generator)
    return first.cuda(), code.cuda(), node.cuda()


@pytest.fixture
def launched(monkeypatch):
    names = []
    right = operators._kernel
    monkeypatch.setattr(operators, "_kernel", lambda name, first: names.append(name) or right(name, first))
    return names


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("widest", [1, 9, 64])
def test_children_and_codes_lead_where_the_definition_says(index, widest, launched):
    first, code, node = tree(index, fan=widest)
    same(trie.children(first, code, node, widest), reference.children(first, code, node, widest))
    same(trie.dense(first, code, node, widest, 64), reference.dense(first, code, node, widest, 64))
    assert launched == ["children", "dense"]


@pytest.mark.parametrize("keys", [0, 1, 77])
def test_membership_in_a_requests_set(keys, launched):
    first, code, node = tree(torch.int32)
    found = trie.children(first, code, node, 9)
    request = torch.arange(333, device="cuda") // 100
    nodes = len(code) + 1
    inside = (request.unsqueeze(1) * nodes + found.node)[found.node >= 0]
    sets = inside[torch.randperm(len(inside), device="cuda")[:keys]].unique()
    for at in (found.node, found.node.t().contiguous().t()):
        assert torch.equal(trie.contains(sets, at, request, nodes), reference.contains(sets, at, request, nodes))
    assert int(trie.contains(sets, found.node, request, nodes).sum()) >= len(sets)
    assert ("contains" in launched) == bool(keys)


def test_an_empty_tree_and_no_rows():
    none = torch.zeros(2, dtype=torch.int32, device="cuda")
    code = torch.empty(0, dtype=torch.int32, device="cuda")
    first, some, node = tree(torch.int32)
    same(trie.children(first, some, node[:0], 9), reference.children(first, some, node[:0], 9))
    assert trie.dense(none[:2], code, node[:0], 1, 5).node.shape == (0, 5)
