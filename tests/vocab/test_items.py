from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.vocab import items
from app.vocab.items import Ids, Strings, hash_strings

names = st.lists(st.text(min_size=1, max_size=12), max_size=30)


def utf8(texts: list[str]) -> list[bytes]:
    return [text.encode("utf-8", "surrogatepass") for text in texts]


@given(names, st.integers(0, 2))
def test_every_id_is_found_and_nothing_else_however_the_hashes_collide(texts: list[str], bits: int) -> None:
    unique = list(dict.fromkeys(texts))
    ids = Ids.build(Strings.of(utf8(unique)), hash_of=lambda strings: hash_strings(strings) & ((1 << bits) - 1))
    assert ids.duplicate() is None
    assert ids.find(unique).tolist() == list(range(len(unique)))
    assert ids.find([text + "x" for text in unique if text + "x" not in unique]).max(initial=-1) == -1


hashes = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(hashes | st.integers(5, 7), min_size=1, max_size=60), st.lists(hashes | st.integers(4, 8), max_size=20))
def test_a_search_from_an_edge_ends_where_halving_ends(known: list[int], more: list[int]) -> None:
    ids = Ids.build(Strings.of([b"x"] * len(known)), hash_of=lambda _: np.array(known, np.int64))
    keys = np.array([*known, *more, -(2**63), 2**63 - 1], np.int64)
    assert ids._place(keys).tolist() == np.searchsorted(np.sort(known), keys).tolist()


@given(st.lists(hashes | st.integers(-3, 3), max_size=80), st.integers(0, 60))
def test_items_stand_in_the_stable_order_of_their_hashes(known: list[int], apart: int) -> None:
    numbers = np.array(known, np.int64) >> apart  # the more, the more are equal
    ids = Ids.build(Strings.of([b"x"] * len(known)), hash_of=lambda _: numbers)
    assert ids.by_hash.tolist() == np.argsort(numbers, kind="stable").tolist()
    assert ids.hashes.tolist() == np.sort(numbers).tolist()


@given(names)
def test_hashes_are_the_same_in_whatever_pieces_they_are_made(texts: list[str]) -> None:
    strings, asked = Strings.of(utf8(texts)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "BLOCK", 3)
        ids = Ids.build(strings, between=lambda: asked.append(1))
    assert ids.hashes.tolist() == np.sort(hash_strings(strings)).tolist()
    assert len(asked) >= len(texts) / 3


@given(names)
def test_a_duplicate_is_reported_with_both_places(texts: list[str]) -> None:
    for hash_of in (hash_strings, lambda strings: np.full(len(strings), 7)):
        twice = Ids.build(Strings.of(utf8(texts)), hash_of).duplicate()
        assert (twice is None) == (len(set(texts)) == len(texts))
        if twice:
            assert twice[0] < twice[1]
            assert texts[twice[0]] == texts[twice[1]]


@given(st.lists(st.binary(max_size=9), max_size=30), st.data())
def test_strings_are_taken_in_any_order_across_blocks(raw: list[bytes], data: st.DataObject) -> None:
    strings = Strings.of(raw)
    order = data.draw(st.permutations(range(len(raw))))
    block, items.BLOCK = items.BLOCK, 4
    try:
        taken = strings.take(np.array(order, np.int64))
        assert [one for block in taken.blocks() for one in block] == [raw[i] for i in order]
    finally:
        items.BLOCK = block
    assert [taken.raw(i) for i in range(len(taken))] == [raw[i] for i in order]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=40))
def test_a_hash_is_of_the_bytes_alone_wherever_they_lie(raw: list[bytes]) -> None:
    together = hash_strings(Strings.of(raw)).tolist()
    assert together == [hash_strings(Strings.of([one])).tolist()[0] for one in raw]
    assert len(set(together)) == len(set(raw)), "64 bits do not collide by chance"
    block, items.BLOCK = items.BLOCK, 3
    try:
        assert hash_strings(Strings.of(raw)).tolist() == together
    finally:
        items.BLOCK = block


def test_strings_that_differ_in_one_byte_or_by_zeros_have_other_hashes() -> None:
    raw = [b"", b"\0", b"\0\0", *(b"x" * n for n in range(1, 30)), *(b"x" * 8 + b"\0" * n for n in range(1, 9))]
    raw += [bytes([n]) + b"item-12345" for n in range(256)]
    assert len(set(hash_strings(Strings.of(raw)).tolist())) == len(set(raw))
