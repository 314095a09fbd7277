from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from app.vocab.diff import diff
from app.vocab.items import Columns, Numbers, Strings, Table, Texts
from app.vocab.vocab import Vocab, arrange, make_vocab

SIZES = (2, 3)
Row = tuple[tuple[int, int], str | None, float | None]
rows = st.dictionaries(
    st.sampled_from(list("abcdefgh")),
    st.tuples(
        st.tuples(st.integers(0, 1), st.integers(0, 2)),
        st.sampled_from([None, "x", "y", "z"]),
        st.sampled_from([None, 0.0, 1.0]),
    ),
)


def vocab_of(items: dict[str, Row]) -> Vocab:
    words = [word for word in dict.fromkeys(row[1] for row in items.values()) if word is not None]
    texts = [-1 if row[1] is None else words.index(row[1]) for row in items.values()]
    numbers = [row[2] for row in items.values()]
    columns: Columns = {
        "word": Texts(np.array(texts, np.int32), Strings.of([word.encode() for word in words])),
        "number": Numbers(
            np.array([n or 0.0 for n in numbers], np.float32), np.array([n is not None for n in numbers])
        ),
    }
    codes = np.array([row[0] for row in items.values()], np.int32).reshape(len(items), 2)
    table = arrange(Table(Strings.of([name.encode() for name in items]), codes, columns), SIZES)
    return make_vocab(table, SIZES)


@settings(max_examples=150, deadline=None)
@given(rows, rows)
def test_the_difference_is_that_of_dictionaries(old: dict[str, Row], new: dict[str, Row]) -> None:
    found = diff(vocab_of(old), vocab_of(new), limit=9)
    both = old.keys() & new.keys()
    assert set(found.first_added) == new.keys() - old.keys()
    assert set(found.first_removed) == old.keys() - new.keys()
    assert {(one.id, tuple(one.old), tuple(one.new)) for one in found.first_moved} == {
        (name, old[name][0], new[name][0]) for name in both if old[name][0] != new[name][0]
    }
    assert set(found.first_changed) == {name for name in both if old[name][1:] != new[name][1:]}
    assert (found.added, found.removed) == (len(found.first_added), len(found.first_removed))
    assert (found.moved, found.changed) == (len(found.first_moved), len(found.first_changed))


def test_an_attribute_that_changed_its_type_changed() -> None:
    codes = np.array([[0, 0], [0, 1]], np.int32)
    ids = Strings.of([b"a", b"b"])
    words = {"v": Texts(np.array([0, -1], np.int32), Strings.of([b"0"]))}
    numbers = {"v": Numbers(np.zeros(2, np.float32), np.array([True, False]))}
    old, new = (make_vocab(Table(ids, codes, columns), SIZES) for columns in (words, numbers))
    assert diff(old, new).first_changed == ["a"]
    assert diff(old, new, limit=0).changed == 1


def test_another_number_of_steps_moves_every_item() -> None:
    old = make_vocab(Table(Strings.of([b"a"]), np.zeros((1, 2), np.int32), {}), SIZES)
    new = make_vocab(Table(Strings.of([b"a"]), np.zeros((1, 3), np.int32), {}), (2, 3, 4))
    assert diff(old, new).moved == 1
