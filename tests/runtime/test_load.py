"""The load gauge against a simulated clock, and requests at each level over a real engine thread."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import Load
from app.core import HistoryIds, Request
from app.runtime.load import Gauge, after, first
from app.runtime.loader import Loaded
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from app.runtime.recorded import recorded
from app.runtime.records import request_line
from app.runtime.replay import replay
from app.runtime.runtime import Runtime
from tests.runtime.test_runtime import World

SETTINGS = Load()  # busy from 1 full batch that waits, quiet below 0.1; a second's mean, half a minute's patience
BACKLOGS = st.sampled_from([0.0, 0.02, 0.07, 0.3, 0.7, 1.5, 4.0])
COURSE = st.lists(st.tuples(st.floats(0.0, 40.0), BACKLOGS), min_size=1, max_size=40)


def readings(course, parts=1):
    """The gauge over a course of (seconds, backlog from then on), looked at `parts` times in each stretch."""
    reading, now = first(100.0), 100.0
    for seconds, backlog in course:
        for part in range(1, parts + 1):
            until = now + seconds * part / parts
            reading = after(reading, until, backlog if part == parts else reading.backlog, SETTINGS)
            yield reading
        now += seconds


def levels(course, parts=1):
    return [one.level for one in readings(course, parts)]


def test_a_backlog_of_a_full_batch_makes_it_busy_and_calm_makes_it_normal_after_its_time():
    course = [(0, 0.0), (0, 2.0), (0.5, 2.0), (0.5, 2.0), (5, 0.0), (20, 0.0), (10, 0.0), (2, 0.0), (15, 0.0)]
    got = list(readings(course))
    assert [one.level for one in got] == [
        "normal", "normal", "normal", "busy", "busy", "busy", "busy", "normal", "quiet",
    ]  # fmt: skip
    assert got[3].mean == pytest.approx(2 * (1 - math.exp(-1)))
    calm_from = 106.0 + math.log(got[4].mean / 0.5)  # the mean falls to half the threshold while nobody looks
    assert got[7].since == pytest.approx(calm_from + SETTINGS.hold_s)


def test_a_short_burst_is_no_load():
    assert set(levels([(0, 1.5), (0.3, 0.0), (0.1, 0.0), (5, 0.0)])) == {"normal"}


def test_a_server_that_nobody_asked_for_long_is_quiet_at_the_first_request():
    assert levels([(0, 4.0), (60, 0.0), (600, 0.0)]) == ["normal", "busy", "quiet"]
    assert levels([(29, 0.0)]) == ["normal"]  # nor does a start say that it will be
    assert levels([(31, 0.0)]) == ["quiet"]


def test_it_is_quiet_below_half_of_the_threshold_and_wakes_at_all_of_it():
    assert levels([(0, 0.07), (300, 0.07)]) == ["normal", "normal"]  # between half of the threshold and all of it
    assert levels([(0, 0.02), (60, 0.07), (300, 0.07)]) == ["normal", "quiet", "quiet"]
    assert levels([(0, 0.02), (60, 0.3), (1, 0.3)]) == ["normal", "quiet", "normal"]


@given(COURSE)
def test_it_becomes_busy_at_most_once_in_the_hold_time_and_so_does_it_leave_quiet(course):
    seen = list(readings(course, parts=4))
    pairs = list(pairwise(seen))
    busy = [b.since for a, b in pairs if b.level == "busy" != a.level]
    woken = [b.at for a, b in pairs if a.level == "quiet" != b.level]
    for moments in (busy, woken):
        assert all(later - earlier >= SETTINGS.hold_s - 1e-6 for earlier, later in pairwise(moments))


@given(COURSE, BACKLOGS)
def test_a_steady_backlog_ends_at_one_level_and_does_not_swing(course, backlog):
    *_, last = readings(course)
    reading, seen = after(last, last.at, backlog, SETTINGS), [last.level]
    for tick in range(1, 400):
        reading = after(reading, last.at + tick / 2, backlog, SETTINGS)
        seen.append(reading.level)
    assert sum(one != other for one, other in pairwise(seen)) <= 2
    assert len(set(seen[-100:])) == 1
    if backlog >= SETTINGS.busy:
        assert seen[-1] == "busy"
    if backlog < SETTINGS.quiet / 2:
        assert seen[-1] == "quiet"


@given(COURSE, st.integers(2, 5))
def test_how_often_it_is_read_does_not_matter(course, parts):
    seldom, often = list(readings(course)), list(readings(course, parts))[parts - 1 :: parts]
    for one, other in zip(seldom, often, strict=True):
        assert one.mean == pytest.approx(other.mean, abs=1e-9)
        assert one.level == other.level


def test_a_clock_that_stands_or_goes_back_changes_nothing():
    reading = after(first(10.0), 10.0, 3.0, SETTINGS)
    assert after(reading, 9.0, 3.0, SETTINGS) == reading


def test_reading_a_gauge_leaves_it_as_it_is():
    gauge = Gauge(SETTINGS, 0.0)
    gauge.observe(0.0, 4.0)
    assert gauge.read(5.0).level == "busy"
    gauge.observe(0.1, 0.0)
    assert gauge.read(5.0).level == "normal"


# ---- served --------------------------------------------------------------------------------------------------------

HEAD = "widebeam: 1\nwidths: [4, 6, 8]\n"
STEPS = (
    "steps:\n  all:\n    normalize: valid\n    rank: score - 0.2 * sibling\n"
    "final:\n  score: score - 0.01 * position\n  rerank: mmr(weight=0.7, pool=20)\n"
)
BY_LEVEL = {"busy": "[1, 2, 3]", "quiet": "[4, 12, 20]"}
LOADED = HEAD + f"load:\n  busy: {{widths: {BY_LEVEL['busy']}}}\n  quiet: {{widths: {BY_LEVEL['quiet']}}}\n" + STEPS
POLICIES = {
    "loaded": LOADED,
    "as_normal": HEAD + STEPS,
    **{f"as_{level}": f"widebeam: 1\nwidths: {widths}\n" + STEPS for level, widths in BY_LEVEL.items()},
    "only_busy": "widebeam: 1\nextends: loaded\nload: {quiet: none}\n",
}
LEVELS = ("quiet", "normal", "busy")


class Clock:
    """Monotonic seconds that pass only when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Timed(World):
    """A served world whose clock is the test's."""

    def __init__(self, policies=None, **limits):
        super().__init__(policies, **limits)
        self.runtime.close()
        self.metrics, self.clock = Metrics(), Clock()
        self.runtime = Runtime(self.deployment, self.metrics, make_log(self.logged), self.clock)

    def ask(self, *history, k=5, **fields):
        return self.runtime.admit(Request(request_id="r", context=HistoryIds(history), k=k, **fields))

    async def answer(self, *history, **fields):
        return await self.ask(*history, **fields).outcome()


@asynccontextmanager
async def timed(**limits):
    world = Timed(POLICIES, **limits)
    await world.runtime.start(lambda: Loaded(snapshot=world.snapshot))
    assert world.runtime.reasons() == ()
    world.gate.batches.clear()
    try:
        yield world
    finally:
        world.gate.open.set()
        assert await world.runtime.drained(60)
        world.runtime.close()


def listed(outcome):
    return [(item.id, item.score, item.sid) for item in outcome.items], outcome.status, outcome.reason


async def test_a_request_at_a_level_is_the_policy_with_that_levels_widths_written_plainly():
    async with timed() as world:
        seen = []
        for level in LEVELS:
            for history in ((), ("i1",), ("i3", "i4", "i9")):
                loaded = await world.answer(*history, k=30, policy="loaded", load=level)
                plain = await world.answer(*history, k=30, policy=f"as_{level}", load=level)
                assert listed(loaded) == listed(plain)
                assert (loaded.load, plain.load) == (level, None)
                seen.append(loaded)
        assert len({one.versions.policy_id for one in seen}) == 1
        assert len({len(one.items) for one in seen}) == 3


async def test_requests_of_all_levels_share_a_batch_and_a_structure():
    async with timed() as world:
        plan = world.snapshot.plan("loaded")
        assert {plan.at(level).structure.id for level in LEVELS} == {plan.structure.id}
        assert plan.at("busy").structure is plan.structure
        held = await world.busy()
        tickets = [world.ask("i1", k=30, policy="loaded", load=level) for level in LEVELS]
        world.gate.open.set()
        await held.outcome()
        together = [await ticket.outcome() for ticket in tickets]
        assert world.gate.batches == [1, 3]
        for level, one in zip(LEVELS, together, strict=True):
            alone = await world.answer("i1", k=30, policy="loaded", load=level)
            assert sorted(item.id for item in one.items) == sorted(item.id for item in alone.items)


async def test_a_level_without_widths_has_the_policys_own_and_is_still_said():
    async with timed() as world:
        quiet = await world.answer("i1", k=30, policy="only_busy", load="quiet")
        assert listed(quiet) == listed(await world.answer("i1", k=30, policy="as_normal"))
        assert quiet.load == "quiet"


async def test_the_level_rises_under_overload_falls_after_it_and_stays_with_its_request():
    async with timed(batch=4) as world:
        assert (await world.answer("i1", policy="loaded")).load == "normal"
        held = await world.busy()
        waiting = [world.ask("i2", policy="loaded") for _ in range(12)]  # three full batches
        world.clock.now += 3.0
        late = world.ask("i3", policy="loaded")
        assert world.runtime.status()["load"] == {"level": "busy", "backlog": pytest.approx(2.85, abs=0.1), "for_s": 0}
        assert world.sample("widebeam_load_level", level="busy") == 1
        assert world.sample("widebeam_load_level", level="normal") == 0
        world.gate.open.set()
        await held.outcome()
        outcomes = await asyncio.gather(*(one.outcome() for one in [*waiting, late]))
        assert [one.load for one in outcomes] == ["normal"] * 12 + ["busy"]
        assert len(outcomes[-1].items) == 3
        assert world.sample("widebeam_load_requests_total", level="busy") == 1
        world.clock.now += SETTINGS.hold_s - 1
        assert (await world.answer("i1", policy="loaded")).load == "busy"
        world.clock.now += 5
        assert (await world.answer("i1", policy="loaded")).load in ("normal", "quiet")
        world.clock.now += SETTINGS.hold_s
        quiet = await world.answer("i1", k=30, policy="loaded")
        assert (quiet.load, len(quiet.items)) == ("quiet", 20)


async def test_the_thresholds_are_the_deployments():
    world = Timed(POLICIES, batch=4)
    deployment = msgspec.structs.replace(world.deployment, load=Load(busy=0.25, quiet=0.01, window_s=10.0, hold_s=1.0))
    world.runtime.close()
    world.runtime = Runtime(deployment, Metrics(), make_log(world.logged), world.clock)
    await world.runtime.start(lambda: Loaded(snapshot=world.snapshot))
    held = await world.busy()
    waiting = [world.ask("i2") for _ in range(2)]
    world.clock.now += 8.0
    assert world.runtime.status()["load"]["level"] == "busy"
    world.gate.open.set()
    await asyncio.gather(held.outcome(), *(one.outcome() for one in waiting))
    world.runtime.close()


async def test_a_recorded_request_is_asked_again_at_its_recorded_level():
    async with timed() as world:
        lines = []
        for level in LEVELS:
            request = Request(f"r-{level}", HistoryIds(("i1", "i5")), k=25, policy="loaded", load=level)
            outcome = await world.runtime.admit(request).outcome()
            lines.append(msgspec.json.encode(request_line(request, outcome, "now", str)))
        assert [msgspec.json.decode(line)["load"] for line in lines] == list(LEVELS)
        world.clock.now += 1000
        assert world.runtime.status()["load"]["level"] == "quiet"
        records = [recorded(line, "log") for line in lines]
        found = [one async for one in replay(world.runtime, records, "loaded", "as_normal")]
        assert [one.recorded for one in found] == [True, True, True]
        assert [one.same for one in found] == [False, True, False]
        assert recorded(b'{"context": {"history": []}, "k": 3}', "log").request.load == "normal"


async def test_wide_requests_are_a_backlog_by_their_rows():
    async with timed(batch=16, rows=64) as world:
        held = await world.busy()
        waiting = [world.ask("i2", policy="as_quiet") for _ in range(12)]  # 12 rows each: 2.25 batches by rows
        world.clock.now += 3.0
        assert world.runtime.status()["load"]["level"] == "busy"
        world.gate.open.set()
        await asyncio.gather(held.outcome(), *(one.outcome() for one in waiting))
