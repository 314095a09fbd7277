import pytest

from bench.gdn_cpu import LEAST, OFTEN, Contestant, contest


def contestant(milliseconds, score=-1.0):
    times = iter(milliseconds)
    return Contestant(lambda: [[((1, 2, 3), score)]], lambda: next(times))


def test_quick_contestants_run_more_often_and_all_of_them_in_every_round():
    quick, slow = [float(n) for n in range(1, 1 + OFTEN * LEAST)], [20.0, 10.0, 30.0]
    found = contest({"widebeam": contestant(quick), "generate": contestant(slow)}, rounds=9, seconds=0)
    assert found["runs"] == {"widebeam": OFTEN * LEAST, "generate": LEAST}
    assert found["median_ms"] == {"widebeam": 5.0, "generate": 20.0}
    assert found["fastest_ms"] == {"widebeam": 1.0, "generate": 10.0}
    assert found["times_faster"] == {"widebeam": 1.0, "generate": 4.0}


def test_whoever_finds_other_scores_ends_the_bench():
    with pytest.raises(AssertionError, match="Not equal"):
        contest({"widebeam": contestant([]), "generate": contestant([], score=-1.1)}, rounds=1, seconds=0)
