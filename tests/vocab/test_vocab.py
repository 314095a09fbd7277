from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import Rejected
from app.vocab.items import Numbers, Strings, Table, Texts
from app.vocab.vocab import Vocab, arrange, make_vocab


def vocab_of(items: list[tuple[str, tuple[int, ...]]], sizes: tuple[int, ...]) -> Vocab:
    codes = np.array([sid for _, sid in items], np.int32).reshape(len(items), len(sizes))
    table = Table(Strings.of([name.encode() for name, _ in items]), codes, {})
    return make_vocab(arrange(table, sizes), sizes)


FILMS = [("b", (1, 0)), ("a", (0, 1)), ("c", (1, 0)), ("é", (1, 1)), ("e\u0301", (0, 0))]


def test_items_are_numbered_in_sid_order_and_keep_their_preference() -> None:
    vocab = vocab_of(FILMS, (2, 2))
    assert vocab.ids(range(5)) == ["e\u0301", "a", "b", "c", "é"]
    assert vocab.sids([2, 3, 4]).tolist() == [[1, 0], [1, 0], [1, 1]]
    assert [bound.tolist() for bound in vocab.leaf_range([2])] == [[2], [4]]
    assert [bound.tolist() for bound in vocab.items_below([0, 2, 5])] == [[0, 2, 2], [5, 5, 4]]
    assert len(vocab) == 5


def test_ids_are_found_byte_for_byte() -> None:
    vocab = vocab_of(FILMS, (2, 2))
    assert vocab.find(["é", "e\u0301", "e", "", "c", "\ud800", "c"]).tolist() == [4, 0, -1, -1, 3, -1, 3]
    assert vocab.find([]).tolist() == []


def test_a_number_that_is_no_item_is_an_error_and_not_the_last_item() -> None:
    vocab = vocab_of(FILMS, (2, 2))
    for call in (
        lambda: vocab.sids([0, -1]), lambda: vocab.sids([5]), lambda: vocab.id(-1), lambda: vocab.id(5),
        lambda: vocab.ids([0, -1]), lambda: vocab.ids([5]),
    ):  # fmt: skip
        with pytest.raises(IndexError):
            call()


def test_an_id_given_twice_is_refused_with_both_rows() -> None:
    table = Table(Strings.of([b"x", b"y", b"x"]), np.array([[0], [1], [2]], np.int32), {})
    with pytest.raises(Rejected, match="row 2: id 'x' is also in row 0") as caught:
        make_vocab(table, (3,))
    assert caught.value.code == "duplicate_id"


def test_items_out_of_sid_order_are_refused() -> None:
    with pytest.raises(Rejected) as caught:
        make_vocab(Table(Strings.of([b"x", b"y"]), np.array([[1], [0]], np.int32), {}), (3,))
    assert caught.value.code == "not_in_sid_order"


def test_attributes_follow_their_items() -> None:
    columns = {
        "year": Numbers(np.array([1, 2], np.float32), np.array([True, False])),
        "genre": Texts(np.array([-1, 0], np.int32), Strings.of([b"Drama"])),
    }
    table = arrange(Table(Strings.of([b"x", b"y"]), np.array([[1], [0]], np.int32), columns), (2,))
    vocab = make_vocab(table, (2,))
    year, genre = vocab.attributes["year"], vocab.attributes["genre"]
    assert isinstance(year, Numbers)
    assert isinstance(genre, Texts)
    assert (year.values.tolist(), year.present.tolist()) == ([2, 1], [False, True])
    assert genre.codes.tolist() == [0, -1]


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_dead_nodes_are_those_whose_items_are_all_excluded(data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    sid = st.tuples(*(st.integers(0, size - 1) for size in sizes))
    sids = data.draw(st.lists(sid, max_size=30))
    vocab = vocab_of([(str(i), sid) for i, sid in enumerate(sids)], sizes)
    excluded = data.draw(st.lists(st.integers(-1, max(len(sids) - 1, -1)), max_size=40))
    dead = vocab.dead(np.array(excluded, np.int64))
    assert len(dead) == len(sizes)
    for depth, nodes in enumerate(dead, 1):
        start, end = vocab.trie.level_start[depth : depth + 2]
        expected = [
            node
            for node in range(start, end)
            if set(range(*(int(bound[0]) for bound in vocab.items_below([node])))) <= set(excluded)
        ]
        assert nodes.tolist() == expected
        assert nodes.dtype == np.int64
