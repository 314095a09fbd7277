"""Which algorithm is chosen, by a clock that says what it is told."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from app.ops.product import choice as room
from app.ops.product import operators
from app.ops.product.choice import KEPT, Way, choose, from_rows, quickest
from app.ops.product.lt import Algorithm, Failed
from app.ops.product.table import LEAST, Chosen, Key, Table

KEY = Key(0, torch.bfloat16, 896, 896, onto=True)


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ([5.0, 4.0, 3.0, 6.0], 2),
        ([5.0, 4.95], 0),  # within what is taken for noise
        ([5.0, 4.8], 1),
        ([1.0, 2.0, 3.0], 0),
        ([5.0], 0),
        ([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 1),
    ],
)
def test_the_quickest_wins_unless_it_gains_nothing(times, best):
    found, medians = quickest(range(len(times)), lambda way: times[way])
    assert found == best
    assert medians[best] == times[best]
    assert medians[0] == times[0]


def test_all_are_looked_at_in_turns_and_few_of_them_again():
    asked = []

    def lap(way):
        asked.append(way)
        return 10.0 - way

    best, medians = quickest(range(8), lap)
    assert best == 7
    assert sorted(medians) == [0, 4, 5, 6, 7]
    assert asked[:16] == [*range(8), *range(8)]
    assert asked[16:] == [0, 4, 5, 6, 7] * room.THEN
    assert KEPT == 4


def test_a_lap_that_was_disturbed_does_not_decide():
    laps = Counter()

    def lap(way):
        laps[way] += 1
        return 50.0 if way == 1 and laps[way] == 4 else [5.0, 3.0, 4.0][way]

    assert quickest(range(3), lap)[0] == 1


@pytest.mark.parametrize(
    ("most", "gains_from", "least"),
    [
        (16384, 0, LEAST),
        (16384, 4096, 4096),
        (16384, 3000, 4096),
        (5000, 0, LEAST),
        (5000, 4097, 5000),
        (1024, 0, 1024),
    ],
)
def test_it_serves_from_the_fewest_rows_on_by_which_it_gains(most, gains_from, least):
    assert from_rows(most, lambda rows: rows >= gains_from) == least


class FakeBench:
    """Three algorithms, of which the second is the quickest, but not by fewer than 4,096 rows."""

    made: list[tuple[Key, int]] = []  # noqa: RUF012  one test's

    def __init__(self, key, rows, stream):
        del stream
        if rows > 1 << 20:
            raise torch.cuda.OutOfMemoryError("too many")
        self.rows = rows
        self.made.append((key, rows))

    def ways(self, algorithms=None):
        named = [Algorithm(bytes([one]), 0) for one in (1, 2, 3)] if algorithms is None else algorithms
        return [Way(one, None, 1) for one in (None, *named)]

    def work(self, way, seconds):
        assert way.algorithm is None
        assert seconds > 0

    def lap(self, way):
        number = way.algorithm.data[0] if way.algorithm else 0
        return [4.0, 4.0, 3.0 if self.rows >= 4096 else 9.0, 5.0][number]


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(room, "Bench", FakeBench)
    monkeypatch.setattr(room, "_stream", lambda _: None)
    monkeypatch.setattr(room.lt, "library", object)
    FakeBench.made.clear()


@pytest.mark.usefixtures("fake")
def test_a_shape_is_chosen_for_once_by_the_most_rows_that_are_multiplied():
    table, other = Table(), KEY._replace(m=64)

    def run():
        for rows in (2000, 16384, 5000):
            table.find(KEY, rows)
        table.find(other, 1500)

    first, second = choose([run, run], table)
    assert (first.key, first.at, first.before, first.now) == (KEY, 16384, 4.0, 3.0)
    assert first.chosen == Chosen(Algorithm(bytes([2]), 0), 4096)
    assert (second.key, second.before, second.now, second.chosen.algorithm) == (other, 4.0, 4.0, None)
    assert [rows for _, rows in FakeBench.made] == [16384, 8192, 4096, 2048, 1500]
    assert table.find(KEY, 4096) == first.chosen.algorithm
    assert table.find(KEY, 4095) is None
    assert choose([run], table) == (), "of the same shapes nothing is chosen again"
    assert len(FakeBench.made) == 5


@pytest.mark.usefixtures("fake")
def test_without_memory_to_measure_in_torchs_algorithm_stays():
    table = Table()
    [found] = choose([lambda: table.find(KEY, 1 << 21)], table)
    assert found.chosen.algorithm is None

    def short():
        raise torch.cuda.OutOfMemoryError("the step itself")

    assert choose([short], table) == ()


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("lacks", ["a description", "the handle"])
def test_where_cublaslt_cannot_describe_a_product_torchs_algorithm_stays(monkeypatch, lacks):
    class Without(FakeBench):
        def __init__(self, key, rows, stream):
            super().__init__(key, rows, stream)
            if lacks == "a description":
                raise Failed("attribute 31 of a product", 7)

        def ways(self, algorithms=None):
            raise Failed("cublasLtCreate", 1)

    monkeypatch.setattr(room, "Bench", Without)
    table = Table()
    [found] = choose([lambda: table.find(KEY, 2000)], table)
    assert found.chosen.algorithm is None
    assert found.document()["from_rows"] is None


def test_noting_ends_with_what_is_run(monkeypatch):
    monkeypatch.setattr(room.lt, "library", object)
    table = Table()
    with pytest.raises(ValueError, match="of a family"):
        choose([lambda: (_ for _ in ()).throw(ValueError("of a family"))], table)
    assert table._wanted is None
    assert operators.TABLE._wanted is None
