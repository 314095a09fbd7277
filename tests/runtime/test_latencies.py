"""Quantiles of the newest answers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from app.runtime.latencies import KEPT_S, MAX_ROWS, Latencies


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@given(st.lists(st.floats(1e-4, 50), min_size=1, max_size=300))
def test_quantiles_are_within_two_percent(times):
    latencies = Latencies(Clock())
    for seconds in times:
        latencies.add(seconds)
    found = latencies.newest(10)
    assert found.requests == len(times)
    for share, value in ((0.5, found.p50_ms), (0.99, found.p99_ms)):
        exact = 1e3 * sorted(times)[math.ceil(share * len(times)) - 1]
        assert abs(value / exact - 1) < 0.026  # half a bucket, and three digits


def test_what_is_outside_of_the_buckets_counts_at_their_ends():
    latencies = Latencies(Clock())
    for seconds in (0.0, -1.0, 1e9):
        latencies.add(seconds)
    assert latencies.newest(1).requests == 3
    assert latencies.newest(1).p99_ms > 90_000


def test_a_cut_tells_before_from_after_and_old_rows_go():
    clock = Clock()
    latencies = Latencies(clock)
    latencies.add(0.010)
    clock.now += 0.1
    latencies.cut()
    latencies.add(0.100)
    assert 9.7 < latencies.between(99, clock.now).p99_ms < 10.3
    assert 97 < latencies.between(clock.now, math.inf).p99_ms < 103
    assert latencies.between(0, 99) == (0, None, None)
    for _ in range(2 * MAX_ROWS):
        latencies.cut()
    assert len(latencies._rows) == MAX_ROWS
    clock.now += KEPT_S + 1
    latencies.add(0.01)
    assert len(latencies._rows) == 1
