"""Turns of servers, without a server."""

from __future__ import annotations

import pytest

from bench import waits
from bench.waits import Asked, Load, table, turns


class Counted(Asked):
    """A server that answers at once: how often it was asked, and in how many connections."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__(port=0)
        self.client, self.took, self.asked, self.opened = self, milliseconds, 0, []

    def open(self, connections):
        self.opened.append(connections)

    def ask(self, bodies):
        self.asked += 1
        assert len(bodies) == self.opened[-1]
        return self.took


LOAD = Load("stand-in", at_once=2, width=64, turn=5)


@pytest.mark.parametrize(("seconds", "counted"), [(60.0, 5), (-1.0, 1)])
def test_every_server_has_a_turn_a_round_which_ends_early_where_it_takes_long(monkeypatch, seconds, counted):
    monkeypatch.setattr(waits, "PAUSE_S", 0)
    monkeypatch.setattr(waits, "TURN_S", seconds)
    asked = {"one": Counted(2.0), "other": Counted(3.0)}
    turns(asked, LOAD, 0, rounds=3)
    for server in asked.values():
        assert server.opened == [2, 2, 2]  # connections of its own each time: a server closes those that nobody uses
        assert server.asked == 3 * (1 + counted)  # the first of a turn is not counted
    rows = table(asked, 0, LOAD)
    assert [(row["way"], row["runs"], row["median_ms"], row["ratio"]) for row in rows] == [
        ("one", 3 * counted, 2.0, 1.0),
        ("other", 3 * counted, 3.0, 1.5),
    ]
