"""Loads that leave the batches alone."""

from __future__ import annotations

import threading
import time

import pytest

from app.policies.selfcheck import KINDS
from app.runtime import pace
from app.runtime.pace import LEAST_S, MOST_S, REST, Pace
from app.runtime.runtime import Runtime
from tests import support
from tests.live_support import live_server

PROBES = 2 * len(KINDS)
"""Pieces of a proof at least: each is made, and compared."""
CONFIG = support.onerec_config((4, 5, 6))


class Clock:
    """A clock that moves when somebody works or sleeps."""

    def __init__(self):
        self.now, self.slept = 0.0, []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def test_it_rests_in_proportion_to_what_it_has_worked_where_there_are_batches():
    clock, busy = Clock(), [True]
    rest = Pace(lambda: busy[0], clock.clock, clock.sleep)
    for worked in (0.01, 0.02):
        clock.now += worked
        rest()
    assert clock.slept == pytest.approx([REST * 0.01, REST * 0.02])
    busy[0] = False
    clock.now += 0.03
    rest()
    assert len(clock.slept) == 2
    busy[0] = True
    clock.now += 0.005
    rest()
    assert clock.slept[2:] == pytest.approx([REST * 0.005])  # what was done while there were none is not made up for
    clock.now += 60
    rest()
    assert clock.slept[3:] == [MOST_S]


def test_it_rests_for_many_small_pieces_together():
    clock = Clock()
    rest = Pace(lambda: True, clock.clock, clock.sleep)
    for _ in range(30):
        clock.now += LEAST_S / 3.5
        rest()
    assert clock.slept == pytest.approx([REST * LEAST_S * 4 / 3.5] * 7)


@pytest.mark.parametrize("busy", [True, False])
async def test_a_version_is_loaded_with_rests_where_there_are_batches_alone(tmp_path, monkeypatch, busy):
    rests = []
    monkeypatch.setattr(pace, "LEAST_S", 0.0)
    monkeypatch.setattr(pace.Pace.__init__, "__defaults__", (time.perf_counter, rests.append))
    monkeypatch.setattr(Runtime, "busy", property(lambda _: busy))
    root = support.write_root(tmp_path / "root")
    async with live_server(root) as server:
        support.write_weights(root, CONFIG, support.onerec_weights(CONFIG, 2), "v2")
        await server.settles(lambda status: status["active"]["weights"]["version"] == "v2")
    assert (len(rests) >= 3) is busy  # behind the headers, behind the contract, and before the tensors
    assert rests == [] or max(rests) <= MOST_S


@pytest.mark.parametrize("busy", [True, False])
async def test_a_vocab_is_loaded_and_its_policies_are_compiled_with_rests_where_there_are_batches(
    tmp_path, monkeypatch, busy
):
    rests = []
    monkeypatch.setattr(pace, "LEAST_S", 0.0)
    monkeypatch.setattr(
        pace.Pace.__init__,
        "__defaults__",
        (time.perf_counter, lambda _: rests.append(threading.current_thread().name)),
    )
    monkeypatch.setattr(Runtime, "busy", property(lambda _: busy))
    policies = {"base": "widebeam: 1\n", "wide": "widebeam: 1\nextends: base\nwidths: [4, 8, 8]\n"}
    root = support.write_root(tmp_path / "root", policies=policies)
    async with live_server(root) as server:
        support.write_vocab(root, (4, 5, 6), [{"id": "one", "sid": (1, 2, 3)}, {"id": "two", "sid": (3, 2, 1)}], "v2")
        await server.settles(lambda status: status["active"]["vocab"]["version"] == "v2")
    # file and table, three levels, ids and what is made of their order; then inside of each policy's proof, too
    assert (rests.count("widebeam-artifacts") >= 12) is busy
    assert (rests.count("widebeam-prepare") >= len(policies) * PROBES) is busy
    assert "widebeam-compose" not in rests, "a rollback does not rest"


@pytest.mark.parametrize("busy", [True, False])
async def test_an_edit_is_compiled_with_rests_where_there_are_batches(tmp_path, monkeypatch, busy):
    rests = []
    root = support.write_root(tmp_path / "root")
    async with live_server(root) as server:
        monkeypatch.setattr(pace, "LEAST_S", 0.0)
        monkeypatch.setattr(
            pace.Pace.__init__,
            "__defaults__",
            (time.perf_counter, lambda _: rests.append(threading.current_thread().name)),
        )
        monkeypatch.setattr(Runtime, "busy", property(lambda _: busy))
        support.replace_text(root / "policies" / "base.yaml", "widebeam: 1\nsteps: {all: {score: parent + 2 * logp}}\n")
        assert (await server.post("policies:reload")).status == 200
    assert (rests.count("widebeam-policies") >= PROBES) is busy
