from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.vocab import recent
from app.vocab.items import Strings, Table
from app.vocab.recent import Recent
from app.vocab.vocab import Vocab, make_vocab


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


@given(st.lists(some, max_size=30), st.integers(1, 12), st.integers(0, 5))
def test_answers_are_those_of_the_catalogue_whatever_was_asked_before(
    requests: list[list[str]], most: int, longest: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recent, "MOST", most)
        patch.setattr(recent, "LONGEST", longest)
        seen = Recent(Counted())
        for ids in requests:
            assert seen.find(ids) == [number(name) for name in ids]
            assert len(seen) < most + max(map(len, requests), default=0) + 1


def test_an_id_is_looked_up_once_unknown_ones_too() -> None:
    look_up = Counted()
    seen = Recent(look_up)
    for _ in range(3):
        assert seen.find(["a", "?b", "c", "a"]) == [97, -1, 99, 97]
    seen.find(["c", "d", "a"])
    assert look_up.asked == [["a", "?b", "c", "a"], ["d"]]


def test_a_long_id_is_not_kept() -> None:
    look_up = Counted()
    seen = Recent(look_up)
    long = "x" * (recent.LONGEST + 1)
    for _ in range(2):
        assert seen.find(["a", long]) == [97, number(long)]
    assert look_up.asked == [["a", long], [long]]
    assert len(seen) == 1


def test_an_empty_request_asks_for_nothing() -> None:
    look_up = Counted()
    assert Recent(look_up).find([]) == []
    assert look_up.asked == []


def vocab_of(*names: str) -> Vocab:
    table = Table(Strings.of([name.encode() for name in names]), np.arange(len(names), dtype=np.int32)[:, None], {})
    return make_vocab(table, (len(names),))


def test_a_request_has_its_known_items_in_their_order_and_a_count_of_the_others() -> None:
    vocab = vocab_of("a", "b")
    for ids, items, unknown in (
        (["b", "x", "a", "b", "y"], [1, 0, 1], 2),
        (["a"], [0], 0),
        (["x"], [], 1),
        ([], [], 0),
    ):
        for _ in range(2):
            found = vocab.known(ids)
            assert (found[0].tolist(), found[0].dtype, found[1]) == (items, np.int64, unknown)


def test_another_vocab_remembers_nothing_of_the_one_before() -> None:
    before, after = vocab_of("a", "b"), vocab_of("b", "c")
    for vocab, items in ((before, [0, 1]), (after, [0, 1]), (before, [0, 1])):
        assert vocab.known(["a", "b", "c"])[0].tolist() == items
    assert after.known(["a"])[0].tolist() == []
    assert before.known(["c"])[0].tolist() == []


def test_threads_that_ask_at_once_get_what_each_alone_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MOST", 50)
    seen = Recent(Counted())
    asked = [[f"{n % 97}{'?' * (n % 3)}" for n in range(at, at + 40)] for at in range(200)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(seen.find, asked))
    assert found == [[number(name) for name in ids] for ids in asked]
