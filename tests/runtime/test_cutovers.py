"""The history of cutovers and the measurement of their hold."""

from __future__ import annotations

from types import SimpleNamespace

from app.runtime.cutover import REMEMBERED, Cutovers


class Engine:
    """A clock, and batches by the ids of their jobs' snapshots."""

    def __init__(self):
        self.now, self.held = 0.0, []
        self.cutovers = Cutovers(lambda: self.now, lambda cutover, seconds: self.held.append(seconds))

    def formed(self, *snapshots):
        jobs = tuple(SimpleNamespace(snapshot=SimpleNamespace(id=one)) for one in snapshots)
        self.cutovers.formed(SimpleNamespace(jobs=jobs))

    def hold(self):
        return self.cutovers.documents()[-1]["hold_ms"]


def test_an_idle_engine_holds_nobody():
    engine = Engine()
    engine.cutovers.swapped("a", "b", "newest")
    engine.now = 7
    engine.cutovers.admitted("b", running=False)
    engine.formed("b")
    assert (engine.hold(), engine.held) == (0.0, [0.0])


def test_the_rest_of_the_running_batch_is_not_the_cutovers():
    engine = Engine()
    engine.formed("a")
    engine.cutovers.swapped("a", "b", "newest")
    engine.cutovers.admitted("b", running=True)
    engine.now = 0.040
    engine.formed("b")
    assert engine.hold() == 0.0


def test_batches_of_the_old_snapshot_that_come_first_are():
    engine = Engine()
    engine.formed("a")
    engine.cutovers.swapped("a", "b", "newest")
    engine.cutovers.admitted("a", running=True)
    assert engine.hold() is None
    engine.cutovers.admitted("b", running=True)
    engine.now = 0.040
    engine.formed("a")
    engine.now = 0.065
    engine.formed("a", "b")
    assert engine.hold() == 25.0
    engine.now = 1
    engine.formed("b")
    assert engine.held == [0.025]


def test_a_cutover_that_nobody_used_has_no_hold_and_the_history_is_bounded():
    engine = Engine()
    for n in range(REMEMBERED + 5):
        engine.cutovers.swapped(f"s{n}", f"s{n + 1}", "policies")
    engine.cutovers.admitted(f"s{REMEMBERED + 5}", running=False)
    engine.formed(f"s{REMEMBERED + 5}")
    history = engine.cutovers.documents()
    assert len(history) == REMEMBERED
    assert [one["hold_ms"] for one in history[-2:]] == [None, 0.0]


def test_each_cutover_says_what_answers_took_before_and_after_it():
    engine = Engine()
    for n in range(12):
        engine.now = 100 + n
        engine.cutovers.answered(0.010)
    engine.cutovers.swapped("a", "b", "newest", {"weights": "v2", "vocab": "v1"})
    engine.now += 5
    engine.cutovers.swapped("b", "a", "rollback")
    engine.cutovers.answered(0.020)
    engine.now += 5.5
    first, second = engine.cutovers.documents()
    assert (first["weights"], first["vocab"]) == ("v2", "v1")
    assert 9.7 < first["p99_before_ms"] < 10.3
    assert 19.5 < first["p99_after_ms"] < 20.5  # although nothing came for a while
    assert second["p99_after_ms"] is None
    engine.cutovers.answered(0.040)
    engine.now += 60
    assert 39 < engine.cutovers.documents()[1]["p99_after_ms"] < 41


def test_a_server_without_requests_has_nothing_to_compare():
    engine = Engine()
    engine.cutovers.swapped(None, "a", "start")
    engine.now += 60
    (one,) = engine.cutovers.documents()
    assert (one["p99_before_ms"], one["p99_after_ms"], engine.cutovers.latency()) == (None, None, (0, None, None))
