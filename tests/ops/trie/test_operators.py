"""The trie's operators as nodes of torch's graphs, on a device without our kernels."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from app.ops import trie
from app.ops.trie import reference
from tests.ops import nodes

SIZE, WIDEST = 12, 7
NODES = torch.ops.widebeam


def tree(count=40, rows=17, wide=torch.int32, seed=1):
    """first, code, node: of up to 5 children a node, which is fewer than WIDEST."""
    made = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 6, (count,), generator=made)
    first = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    code = torch.cat([torch.randperm(SIZE, generator=made)[:own].sort().values for own in sizes]).int()
    return first.to(wide), code, torch.randint(-1, count, (rows,), generator=made)


def dead(first, code, node):
    """sorted_keys, node [n, F], request, nodes: some of the children."""
    found, many = trie.children(first, code, node, WIDEST).node, len(code) + 1
    request = torch.arange(len(node)) // 4
    keys = (request.unsqueeze(1) * many + found)[found >= 0]
    return keys[::3].unique(), found, request, many


@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_nodes_are_the_definitions_as_wide_as_they_say(wide):
    first, code, node = tree(wide=wide)
    found = NODES.trie_children(first, code, node, WIDEST)
    assert all(
        torch.equal(one, two) for one, two in zip(found, reference.children(first, code, node, WIDEST), strict=True)
    )
    assert found[0].shape == (17, WIDEST)
    own = trie.children(first, code, node, WIDEST)
    most = own.code.shape[1]
    assert most < WIDEST, "a CPU's own rows have no more columns than children"
    assert all(torch.equal(one, two[:, :most]) for one, two in zip(own, found, strict=True))
    assert not found[2][:, most:].any()
    expected = reference.dense(first, code, node, WIDEST, SIZE)
    assert torch.equal(NODES.trie_nodes(first, code, node, WIDEST, SIZE), expected.node)
    assert all(
        torch.equal(one, two) for one, two in zip(trie.dense(first, code, node, WIDEST, SIZE), expected, strict=True)
    )
    keys = dead(first, code, node)
    assert torch.equal(NODES.trie_contains(*keys), reference.contains(*keys))
    assert 0 < int(NODES.trie_contains(*keys).sum()) >= len(keys[0])


@pytest.mark.parametrize("rows", [0, 17])
def test_torch_finds_them_to_be_what_they_say(rows):
    given = tree(rows=rows)
    nodes.check("trie_children", *given, WIDEST)
    nodes.check("trie_nodes", *given, WIDEST, SIZE)
    keys, found, request, many = dead(*tree())
    nodes.check("trie_contains", keys, found, request, many)
    nodes.check("trie_contains", keys[:0], found.t().contiguous().t(), request, many)


def walk(first, code, node, keys, request):
    """A step's candidates, without what is dead, and all codes."""
    some = trie.children(first, code, node, WIDEST)
    gone = trie.contains(keys, some.node, request, code.shape[0] + 1)
    return some.code, some.legal & ~gone, trie.dense(first, code, node, WIDEST, SIZE)


def wide_walk(first, code, node, keys, request):
    """The same by the definitions."""
    some = reference.children(first, code, node, WIDEST)
    gone = reference.contains(keys, some.node, request, code.shape[0] + 1)
    return some.code, some.legal & ~gone, reference.dense(first, code, node, WIDEST, SIZE)


def test_an_export_and_a_compiled_graph_have_one_node_each():
    first, code, node = tree()
    keys, _, request, _ = dead(first, code, node)
    rows, given = Dim("rows", min=1, max=1 << 20), (first, code, node, keys, request)
    wanted = ["trie_children", "trie_contains", "trie_nodes"]
    assert nodes.exported(walk, given, (None, None, {0: rows}, None, {0: rows}), wide_walk) == wanted
    assert nodes.compiled(walk, given, wide_walk) == wanted


def test_without_data_they_have_shapes():
    given = tree()
    with FakeTensorMode() as mode:
        first, code, node = (mode.from_tensor(one) for one in given)
        some = trie.children(first, code, node, WIDEST)
        assert [(one.shape, one.dtype) for one in some] == [
            ((17, WIDEST), torch.int64), ((17, WIDEST), torch.int64), ((17, WIDEST), torch.bool),
        ]  # fmt: skip
        assert trie.dense(first, code, node, WIDEST, SIZE).node.shape == (17, SIZE)
