from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.vocab import recent
from app.vocab.items import Strings, Table
from app.vocab.recent import Recent
from app.vocab.vocab import make_vocab


class Counted:
    """Numbers of ids by a rule, and what was asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, ids: Sequence[str]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        self.asked.append(list(ids))
        return np.array([number(name) for name in ids], np.int64)


def number(name: str) -> int:
    return -1 if name.startswith("?") else sum(map(ord, name))


some = st.lists(st.text("ab?\ud800", max_size=6), max_size=9)


@given(st.lists(some, max_size=30), st.integers(1, 12), st.integers(0, 5), st.integers(1, 9))
def test_answers_are_those_of_the_catalogue_whatever_was_asked_before(
    requests: list[list[str]], most: int, longest: int, many: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MOST", most), ("LONGEST", longest), ("MANY", many)):
            patch.setattr(recent, name, value)
        seen = Recent(Counted())
        for ids in requests:
            found = seen.find(ids)
            assert found.dtype == np.int64
            assert found.tolist() == [number(name) for name in ids]
            assert len(seen) < most + many


def test_an_id_is_looked_up_once_unknown_ones_too() -> None:
    look_up = Counted()
    seen = Recent(look_up)
    for _ in range(3):
        assert seen.find(["a", "?b", "c", "a"]).tolist() == [97, -1, 99, 97]
    seen.find(["c", "d", "a"])
    assert look_up.asked == [["a", "?b", "c", "a"], ["d"]]


def test_a_long_id_and_a_list_that_is_no_history_push_nothing_out() -> None:
    look_up = Counted()
    seen = Recent(look_up)
    long = "x" * (recent.LONGEST + 1)
    for _ in range(2):
        assert seen.find(["a", long]).tolist() == [97, number(long)]
    assert look_up.asked == [["a", long], [long]]
    assert len(seen) == 1
    assert len(seen.find(["b"] * (recent.MANY + 1))) == recent.MANY + 1
    assert len(seen) == 1


def test_an_empty_request_asks_for_nothing() -> None:
    look_up = Counted()
    assert Recent(look_up).find([]).dtype == np.int64
    assert look_up.asked == []


def test_another_vocab_remembers_nothing_of_the_one_before() -> None:
    def named(*names: str) -> Table:
        return Table(Strings.of([name.encode() for name in names]), np.array([[0], [1]], np.int32), {})

    before, after = make_vocab(named("a", "b"), (2,)), make_vocab(named("b", "c"), (2,))
    assert before.find(["a", "b", "c"]).tolist() == [0, 1, -1]
    assert after.find(["a", "b", "c"]).tolist() == [-1, 0, 1]
    assert before.find(["a", "b", "c"]).tolist() == [0, 1, -1]
