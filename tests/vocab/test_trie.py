from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import Rejected
from app.vocab.trie import Trie, build_trie


@st.composite
def catalogues(draw: st.DrawFn, most: int = 40) -> tuple[np.ndarray, tuple[int, ...]]:
    """SIDs with many collisions and shared prefixes."""
    sizes = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    rows = draw(st.lists(st.tuples(*(st.integers(0, size - 1) for size in sizes)), min_size=0, max_size=most))
    return np.array(rows, np.int32).reshape(len(rows), len(sizes)), sizes


def oracle(codes: np.ndarray) -> tuple[list[list[tuple[int, ...]]], dict[tuple[int, ...], list[int]]]:
    """Prefixes by depth in lexicographic order, and the rows below each prefix in SID order."""
    below: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row in sorted(range(len(codes)), key=lambda row: (*codes[row].tolist(), row)):
        for depth in range(codes.shape[1] + 1):
            below[tuple(codes[row][:depth].tolist())].append(row)
    levels = [sorted(prefix for prefix in below if len(prefix) == depth) for depth in range(codes.shape[1] + 1)]
    levels[0] = [()]
    return levels, below


def check(trie: Trie, order: np.ndarray, leaf_items: np.ndarray, codes: np.ndarray, sizes: tuple[int, ...]) -> None:
    levels, below = oracle(codes)
    assert trie.prefixes == tuple(map(len, levels))
    number = {prefix: i for i, prefix in enumerate(prefix for level in levels for prefix in level)}
    assert trie.nodes == len(number)
    assert len(trie.code) == trie.nodes - 1
    fan_out = [0] * len(sizes)
    for prefix, node in number.items():
        children = sorted(code for code in range(max(sizes)) if (*prefix, code) in number)
        low, high = int(trie.first[node]), int(trie.first[node + 1])
        assert trie.code[low:high].tolist() == children
        assert [number[(*prefix, code)] for code in children] == list(range(low + 1, high + 1))
        if len(prefix) < len(sizes):
            fan_out[len(prefix)] = max(fan_out[len(prefix)], len(children))
        begin, end = trie.leaves_below([node])
        rows = order[leaf_items[begin[0]] : leaf_items[end[0]]].tolist()
        assert rows == below[prefix]
        for code in range(-1, max(sizes) + 1):
            assert trie.step([node], [code]).tolist() == [number.get((*prefix, code), -1)]
    assert trie.max_children == tuple(fan_out)
    assert trie.step([-1], [0]).tolist() == [-1]


@settings(max_examples=80, deadline=None)
@given(catalogues())
def test_the_trie_is_that_of_plain_dictionaries(catalogue: tuple[np.ndarray, tuple[int, ...]]) -> None:
    codes, sizes = catalogue
    check(*build_trie(codes, sizes), codes, sizes)


@settings(max_examples=30, deadline=None)
@given(catalogues())
def test_sids_that_do_not_fit_one_number_give_the_same_trie(catalogue: tuple[np.ndarray, tuple[int, ...]]) -> None:
    codes, sizes = catalogue
    for wide in (2**16, 2**24):  # 3 or 4 steps: no room for the row number, then none for the SID
        trie, order, leaf_items = build_trie(codes, (wide,) * len(sizes))
        same, same_order, same_leaves = build_trie(codes, sizes)
        assert order.tolist() == same_order.tolist()
        assert leaf_items.tolist() == same_leaves.tolist()
        assert trie.first.tolist() == same.first.tolist()
        assert trie.code.tolist() == same.code.tolist()


def test_arrays_are_32_bit() -> None:
    trie, order, leaf_items = build_trie(np.array([[1, 0], [0, 1], [1, 0]]), (2, 2))
    assert {trie.first.dtype, trie.code.dtype, order.dtype, leaf_items.dtype} == {np.dtype(np.int32)}
    assert trie.level_start.tolist() == [0, 1, 3, 5]
    assert order.tolist() == [1, 0, 2]
    assert leaf_items.tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("codes", "code", "location"),
    [
        (np.array([[0, 0], [0, 8]]), "code_out_of_range", "row 1"),
        (np.array([[0, 0], [0, 0], [-1, 0]]), "code_out_of_range", "row 2"),
        (np.array([[2**40, 0]]), "code_out_of_range", "row 0"),
        (np.array([[0, 0, 0]]), "sid_length", None),
        (np.array([0, 0]), "codes_shape", None),
        (np.array([[0.0, 0.0]]), "codes_shape", None),
    ],
)
def test_refusals(codes: np.ndarray, code: str, location: str | None) -> None:
    with pytest.raises(Rejected) as caught:
        build_trie(codes, (8, 8))
    assert (caught.value.code, caught.value.location) == (code, location)


def test_codes_that_carry_a_level_offset_are_named() -> None:
    with pytest.raises(Rejected, match=r"row 0: sid\[1\] = 9, but step 2 has 8 codes \(0\.\.7"):
        build_trie(np.array([[1, 9]]), (8, 8))
