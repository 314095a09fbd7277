"""The time of a batch as learnt from batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.runtime.predict import BatchTime


def test_nothing_is_predicted_before_enough_was_seen():
    time = BatchTime()
    for _ in range(BatchTime.MIN_BATCHES - 1):
        time.observe(10, 0.1)
        assert time.seconds(10) is None
    time.observe(10, 0.1)
    assert time.seconds(10) == pytest.approx(0.1)


def test_a_line_is_found_and_a_change_is_followed():
    time = BatchTime()
    for n in range(200):
        time.observe(n % 50, 0.002 + 1e-4 * (n % 50))
    assert time.seconds(500) == pytest.approx(0.002 + 0.05, rel=0.01)
    for n in range(400):
        time.observe(n % 50, 0.02 + 1e-3 * (n % 50))
    assert time.seconds(40) == pytest.approx(0.06, rel=0.05)


def test_after_a_rest_a_slow_time_is_soon_forgotten():
    time = BatchTime()
    for _ in range(50):
        time.observe(40, 0.658)
    for _ in range(5):
        time.observe(40, 0.015, rested=True)
    assert time.seconds(40) < 0.05


@given(st.lists(st.tuples(st.integers(1, 10**5), st.floats(0, 100)), min_size=8, max_size=30), st.integers(1, 10**5))
def test_predictions_never_fall_as_rows_grow_and_are_never_negative(seen, rows):
    time = BatchTime()
    for one, seconds in seen:
        time.observe(one, seconds)
    few, many = time.seconds(rows), time.seconds(2 * rows)
    assert 0 <= few <= many
