"""Walking a trie on a device against a dictionary of prefixes."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.ops.trie import children, contains, dense


def flat(sids, depth):
    """Breadth-first arrays, made the slow way."""
    levels = [[()]] + [sorted({sid[: t + 1] for sid in sids}) for t in range(depth)]
    nodes = [prefix for level in levels for prefix in level]
    number = {prefix: i for i, prefix in enumerate(nodes)}
    first, code = [0], []
    for prefix in nodes:
        below = sorted(p[-1] for p in nodes if p and p[:-1] == prefix)
        code += below
        first.append(len(code))
    return torch.tensor(first, dtype=torch.int32), torch.tensor(code or [0], dtype=torch.int32), nodes, number


sid_sets = st.sets(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(sid_sets, st.data())
def test_children_and_dense_agree_with_the_dictionary(sids, data):
    first, code, nodes, number = flat(sids, 3)
    inner = [i for i, prefix in enumerate(nodes) if len(prefix) < 3] + [-1]
    asked = data.draw(st.lists(st.sampled_from(inner), min_size=1, max_size=6))
    node = torch.tensor(asked)
    sparse = children(first, code, node, 5)
    every = dense(first, code, node, 5, 6)
    for row, at in enumerate(asked):
        below = {p[-1]: number[p] for p in nodes if at >= 0 and p and p[:-1] == nodes[at]}
        legal = sparse.legal[row]
        assert sparse.code[row][legal].tolist() == sorted(below)
        assert sparse.node[row][legal].tolist() == [below[c] for c in sorted(below)]
        assert (sparse.node[row][~legal] == -1).all()
        assert every.code[row].tolist() == list(range(6))
        assert every.node[row].tolist() == [below.get(c, -1) for c in range(6)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=12), st.data())
def test_sets_of_dead_prefixes_are_per_request(pairs, data):
    sorted_keys = torch.tensor(sorted({r * 10 + n for r, n in pairs}), dtype=torch.int64)
    node = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(-1, 9), min_size=3, max_size=3), min_size=3, max_size=3))
    )
    request = torch.tensor([0, 1, 2])
    hit = contains(sorted_keys, node, request, 10)
    for row in range(3):
        assert hit[row].tolist() == [(row, int(n)) in set(pairs) for n in node[row]]


def test_padding_never_reads_past_the_tree():
    first, code, _, number = flat({(4, 4, 4)}, 3)
    last = children(first, code, torch.tensor([number[(4, 4)], -1]), 9)
    assert last.legal.sum() == 1
    assert np.array_equal(last.code.numpy()[0][:1], [4])


@settings(max_examples=50, deadline=None)
@given(sid_sets, st.integers(1, 2))
def test_padding_is_a_code_of_its_own_depth(sids, depth):
    """What is not legal is looked up, too: for a tombstone, among logits that a code of step 1 may exceed."""
    first, code, nodes, _ = flat(sids, 3)
    own = [i for i, prefix in enumerate(nodes) if len(prefix) == depth]
    below = {prefix[-1] for prefix in nodes if len(prefix) == depth + 1}
    assert set(children(first, code, torch.tensor([*own, -1]), 5).code.flatten().tolist()) <= below | {0}
