from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.vocab import items
from app.vocab.items import Ids, Strings, hash_strings

names = st.lists(st.text(min_size=1, max_size=12), max_size=30)


def utf8(texts: list[str]) -> list[bytes]:
    return [text.encode("utf-8", "surrogatepass") for text in texts]


@contextmanager
def poor(mask: int) -> Iterator[None]:
    """Hashes of which only some bits are left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "hash_strings", lambda strings: hash_strings(strings) & np.uint32(mask))
        patch.setattr(items, "crc32", lambda raw: zlib.crc32(raw) & mask)
        yield


MASKS = st.sampled_from([0, 1, 3, 0x80000001, 0xC0000000, 0xFFFFFFFF])


@given(names, MASKS)
def test_every_id_is_found_and_nothing_else_however_the_hashes_collide(texts: list[str], mask: int) -> None:
    unique = list(dict.fromkeys(texts))
    with poor(mask):
        ids = Ids.build(Strings.of(utf8(unique)))
        assert ids.duplicate() is None
        assert ids.find(unique).tolist() == list(range(len(unique)))
        assert ids.find([*unique, *unique[::-1]]).tolist() == [*range(len(unique)), *reversed(range(len(unique)))]
        assert ids.find([text + "x" for text in unique if text + "x" not in unique]).max(initial=-1) == -1
        mixed = [name for text in unique for name in (text, text + "\0")]
        known = {text: item for item, text in enumerate(unique)}
        assert ids.find(mixed).tolist() == [known.get(name, -1) for name in mixed]


def test_a_bucket_longer_than_the_window_is_searched_to_its_end() -> None:
    texts = [f"i{n}" for n in range(5 * items.WINDOW)]
    for mask in (0, 0x0000FFFF):  # one hash; one bucket of different ones
        with poor(mask):
            ids = Ids.build(Strings.of(utf8(texts)))
            assert ids.find(texts).tolist() == list(range(len(texts)))
            assert ids.find(["i", "j7", ""]).tolist() == [-1, -1, -1]


@given(names, MASKS)
def test_items_stand_in_the_stable_order_of_their_hashes(texts: list[str], mask: int) -> None:
    strings = Strings.of(utf8(texts))
    hashes = hash_strings(strings) & np.uint32(mask)
    with poor(mask):
        ids = Ids.build(strings)
    assert ids.by_hash[: len(texts)].tolist() == np.argsort(hashes, kind="stable").tolist()
    assert ids.hashes[: len(texts)].tolist() == np.sort(hashes).tolist()
    bits = 33 - len(ids.edges).bit_length()
    assert ids.edges.tolist() == [int((hashes >> np.uint32(bits) < n).sum()) for n in range(len(ids.edges))]


@given(names)
def test_hashes_are_the_same_in_whatever_pieces_they_are_made(texts: list[str]) -> None:
    strings, asked = Strings.of(utf8(texts)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "BLOCK", 3)
        ids = Ids.build(strings, between=lambda: asked.append(1))
    assert ids.hashes[: len(texts)].tolist() == np.sort(hash_strings(strings)).tolist()
    assert len(asked) >= len(texts) / 3


@given(names)
def test_a_duplicate_is_reported_with_both_places(texts: list[str]) -> None:
    for mask in (0xFFFFFFFF, 0):
        with poor(mask):
            twice = Ids.build(Strings.of(utf8(texts))).duplicate()
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


@given(st.lists(st.binary(max_size=40), max_size=40), st.integers(0, 7))
def test_a_hash_is_the_crc_32_that_zlib_gives_wherever_the_bytes_lie(raw: list[bytes], before: int) -> None:
    strings = Strings.of([b"x" * before, *raw])
    own = Strings(strings.text, strings.start[1:])
    expected = [zlib.crc32(one) for one in raw]
    assert hash_strings(own).tolist() == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "BLOCK", 3)
        assert hash_strings(own).tolist() == expected
