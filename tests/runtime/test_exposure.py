"""Experiments over a running runtime: who is served what, what the answer, the status and the records say."""

from __future__ import annotations

import asyncio
import io
import json
import math
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from decimal import Decimal, localcontext

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import Log as LogSettings
from app.core import HistoryIds, Request
from app.errors import InvalidRequest
from app.policies.assign import Assignment, Decision, Facts, assign
from app.policies.load import Folder, compile_folder
from app.policies.source import Source
from app.runtime.contract import make_contract
from app.runtime.exposure import Counts, chi_square_p, sample_ratio_p
from app.runtime.jsonlines import Rotated, Writer
from app.runtime.loader import Loaded
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from app.runtime.recorder import Files
from app.runtime.runtime import Runtime
from tests import support
from tests.runtime.test_trouble import fill, small_disk

SIZES = (4, 5, 6)
LIMITS = support.deployment_of(SIZES)
TRAFFIC = """\
widebeam: 1
kind: traffic
default: base
holdout: {share: 5%, salt: holdout/1, policy: base}
layers:
  ranking: {salt: ranking/1}
"""
COLOR = """\
widebeam: 1
kind: experiment
layer: ranking
slots: [0, 8000]
salt: color/1
arms:
  control: {weight: 50, policy: base}
  tuned:   {weight: 25, policy: tuned}
  strong:  {weight: 25, policy: tuned, params: {weight: 0.5}}
stop_if:
  - {metric: underfill_rate, above: 0.5, for: 1m}
"""
TUNED = """\
widebeam: 1
extends: base
params:
  weight: {value: 1, range: [0.1, 2]}
steps:
  all:
    score: parent + param.weight * logp
"""


def policies(contract, traffic=TRAFFIC, running=None, **experiments):
    experiments = experiments or {"color": COLOR}
    folder = Folder(
        {name: Source(f"{name}.yaml", text.encode()) for name, text in (("base", support.BASE), ("tuned", TUNED))},
        Source("traffic.yaml", traffic.encode()),
        (),
        {name: Source(f"experiments/{name}.yaml", text.encode()) for name, text in experiments.items()},
    )
    loaded = compile_folder(folder, contract, running=running, now=1e9)
    assert not loaded.rejections(), loaded.rejections()
    return loaded


class World:
    def __init__(self, tmp_path, server=None, log=None, wall=lambda: 1e9):
        deployment = support.deployment_of(SIZES)
        self.deployment = replace_server(deployment, **(server or {}))
        engine = support.onerec_engine(SIZES, deployment.limits)
        vocab = support.catalogue(support.random_sids(SIZES, 40), SIZES)
        snapshot = support.snapshot_of(engine, vocab, deployment)
        self.snapshot = replace(snapshot, policies=policies(snapshot.contract))
        self.metrics, self.logged, self.state = Metrics(), io.BytesIO(), tmp_path
        self.clock = Clock()
        log = LogSettings(unit_salt="s") if log is None else log
        self.files = Files(log, tmp_path, self.metrics, make_log(self.logged), self.clock)
        self.runtime = Runtime(
            self.deployment, self.metrics, make_log(self.logged), time.monotonic, recorder=self.files, wall=wall
        )

    @property
    def traffic(self):
        return self.snapshot.policies.traffic

    async def ask(self, user=None, **fields):
        now = time.monotonic()
        request = Request(
            **{"request_id": f"r-{user}", "context": HistoryIds(("i1",)), "k": 3, "user_id": user, "received": now}
            | fields
        )
        return await self.runtime.admit(request).outcome()

    def sample(self, name, **labels):
        return self.metrics.registry.get_sample_value(name, labels) or 0

    def lines(self, kind="exposures"):
        self.files.close()
        files = sorted((self.state / kind).glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def replace_server(deployment, **server):
    changed = msgspec.structs.replace(deployment.server, **server)
    return msgspec.structs.replace(deployment, server=changed)


@asynccontextmanager
async def started(tmp_path, **options):
    world = World(tmp_path, **options)
    await world.runtime.start(lambda: Loaded(snapshot=world.snapshot))
    assert world.runtime.reasons() == ()
    try:
        yield world
    finally:
        assert await world.runtime.drained(60)
        world.runtime.close()


def units_of(world, arm, count, reason="assigned"):
    """User ids that assignment puts into an arm."""
    found = []
    for n in range(10_000):
        decisions = assign(world.traffic, facts(f"u{n}"), 1e9).decisions
        if decisions and (decisions[0].arm, decisions[0].reason) == (arm, reason):
            found.append(f"u{n}")
        if len(found) == count:
            return found
    raise AssertionError(arm)


def facts(unit):
    return Facts(unit, "r", {}, {})


def contract():
    return make_contract(support.onerec_engine(SIZES, LIMITS.limits), {}, LIMITS, "float32")


# ---- answers -------------------------------------------------------------------------------------------------------


async def test_each_user_gets_the_plan_of_the_arm_and_the_answer_says_so(tmp_path):
    async with started(tmp_path) as world:
        users = [f"u{n}" for n in range(60)]
        outcomes = await asyncio.gather(*(world.ask(user) for user in users))
        kinds = Counter()
        for user, outcome in zip(users, outcomes, strict=True):
            expected = assign(world.traffic, facts(user), 1e9)
            assert outcome.versions.policy_id == expected.plan.policy_id
            assert outcome.versions.policy == expected.plan.policy
            assert [one[:4] for one in outcome.experiments] == [
                (one.layer, one.name, one.arm, one.reason) for one in expected.decisions
            ]
            kinds[outcome.versions.policy_id] += 1
        assert len(kinds) == 3  # base, tuned, and tuned with another weight
        strong, tuned = [await world.ask(units_of(world, arm, 1)[0]) for arm in ("strong", "tuned")]
        assert strong.versions.policy == tuned.versions.policy == "tuned"
        direct = support.plan_of(world.snapshot.contract, TUNED.replace("value: 1,", "value: 0.5,"), name="tuned",
                                 others={"base": support.BASE})  # fmt: skip
        assert strong.versions.policy_id == direct.policy_id
        assert [one.score for one in strong.items] != [one.score for one in tuned.items]
        alone = replace(world.snapshot, policies=support.Policies({"base": direct}))
        (ranked,) = support.run_batch([support.job_of(alone, world.deployment, ("i1",), k=3)])
        assert [one.score for one in strong.items] == pytest.approx(ranked.scores.tolist()[:3], abs=1e-4)
        assert [one.id for one in strong.items] == world.snapshot.vocab.ids(ranked.items)[:3]


async def test_a_request_without_a_unit_gets_the_default_and_is_counted(tmp_path):
    async with started(tmp_path) as world:
        outcome = await world.ask(None)
        assert (outcome.versions.policy, outcome.experiments) == ("base", ())
        assert world.runtime.status()["experiments"]["color"]["unassigned"] == 1
        assert world.sample("widebeam_unassigned_total", experiment="color") == 1
    assert world.lines()[0]["unassigned"] == ["color"]


async def test_a_named_policy_is_in_no_experiment(tmp_path):
    async with started(tmp_path) as world:
        outcome = await world.ask(units_of(world, "strong", 1)[0], policy="base")
        assert (outcome.versions.policy, outcome.experiments) == ("base", ())
        assert sum(world.runtime.status()["experiments"]["color"]["served"].values()) == 0
    assert world.lines() == []


async def test_a_tester_may_force_an_arm_only_where_the_deployment_says_so(tmp_path):
    async with started(tmp_path / "no") as world:
        with pytest.raises(InvalidRequest) as refused:
            await world.ask("u1", arms={"color": "strong"})
        assert refused.value.path == "header x-widebeam-arm"
    async with started(tmp_path / "yes", server={"arm_override": True}) as world:
        user = units_of(world, "control", 1)[0]
        outcome = await world.ask(user, arms={"color": "strong"})
        assert outcome.experiments[0][2:4] == ("strong", "forced")
        assert outcome.versions.policy == "tuned"
        for arms, word in (({"color": "pink"}, "pink"), ({"colour": "strong"}, "colour")):
            with pytest.raises(InvalidRequest, match=word):
                await world.ask("u1", arms=arms)
        with pytest.raises(InvalidRequest, match="not both"):
            await world.ask("u1", arms={"color": "strong"}, policy="base")
        shown = world.runtime.status()["experiments"]["color"]
        assert sum(shown["served"].values()) == sum(shown["units"].values()) == 0
        assert shown["other"] == {"forced": 1}
    line = world.lines()[0]["experiments"][0]
    assert (line["forced"], line["served"], line["reason"]) == (True, "strong", "forced")


async def test_the_kill_list_of_the_snapshot_wins_and_is_no_control(tmp_path):
    async with started(tmp_path) as world:
        user = units_of(world, "strong", 1)[0]
        world.snapshot = replace(world.snapshot, killed=frozenset({"color"}))
        world.runtime._pins.active = world.snapshot
        outcome = await world.ask(user)
        assert (outcome.versions.policy, outcome.experiments[0][2:4]) == ("base", ("control", "killed"))
        shown = world.runtime.status()["experiments"]["color"]
        assert (shown["served"]["control"], shown["other"]) == (0, {"killed": 1})
    line = world.lines()[0]["experiments"][0]
    assert (line["assigned"], line["served"], line["reason"]) == ("strong", "control", "killed")


async def test_a_ramp_follows_the_wall_clock_that_is_handed_in(tmp_path):
    now = [0.0]
    async with started(tmp_path, wall=lambda: now[0]) as world:
        ramp = COLOR + "ramp:\n  - {from: 2026-11-01T00:00Z, coverage: 100%}\n"
        world.snapshot = replace(world.snapshot, policies=policies(world.snapshot.contract, color=ramp))
        world.runtime._pins.active = world.snapshot
        user = units_of(world, "default", 1, "not_covered")[0]
        assert (await world.ask(user)).experiments[0][2:] == ("default", "not_covered", 0.0)
        now[0] = 1.8e9
        assert (await world.ask(user)).experiments[0][3:] == ("assigned", 1.0)


async def test_one_unit_is_explained_without_being_counted(tmp_path):
    async with started(tmp_path) as world:
        user = units_of(world, "strong", 1)[0]
        found = world.runtime.assignment("color", user, {}, {})
        assert (found["arm"], found["reason"], found["policy"]) == ("strong", "assigned", "tuned")
        assert world.runtime.assignment("nobody", user, {}, {}) is None
        assert sum(world.runtime.status()["experiments"]["color"]["served"].values()) == 0


# ---- records -------------------------------------------------------------------------------------------------------


async def test_every_request_of_an_experiment_leaves_one_line(tmp_path):
    async with started(tmp_path) as world:
        users = [f"u{n}" for n in range(30)]
        outcomes = await asyncio.gather(*(world.ask(user) for user in users))
    lines = {line["request_id"]: line for line in world.lines()}
    decided = [outcome for outcome in outcomes if outcome.experiments]
    assert set(lines) == {outcome.request_id for outcome in decided}
    assert len(decided) > 10
    for outcome in decided:
        line = lines[outcome.request_id]
        assert line["versions"] == outcome.versions._asdict()
        assert line["seed"] == outcome.seed
        assert [one["served"] for one in line["experiments"]] == [one.arm for one in outcome.experiments]
        unit = line["experiments"][0]["unit"]
        assert len(unit) == 32
        assert outcome.request_id.removeprefix("r-") not in unit


async def test_records_can_be_switched_off_and_users_named_plainly(tmp_path):
    async with started(tmp_path / "off", log=LogSettings(exposures=False)) as world:
        await world.ask(units_of(world, "control", 1)[0])
        assert world.runtime.status()["experiments"]["color"]["served"]["control"] == 1
    assert world.lines() == []
    async with started(tmp_path / "plain", log=LogSettings(units="plain")) as world:
        user = units_of(world, "control", 1)[0]
        await world.ask(user)
    assert world.lines()[0]["experiments"][0]["unit"] == user


async def test_a_disk_that_fails_or_is_slow_costs_lines_and_no_answer(tmp_path):
    blocker = tmp_path / "state"
    blocker.write_text("a file where a directory should be")
    async with started(blocker) as world:
        user = units_of(world, "control", 1)[0]
        for _ in range(3):
            assert (await world.ask(user)).status == "ok"
        world.files.close()
        assert world.sample("widebeam_records_lost_total", kind="exposures") == 3
    events = [json.loads(line)["event"] for line in world.logged.getvalue().splitlines()]
    assert events.count("records_unwritable") == 1


def test_a_full_queue_loses_the_newest_and_counts_them(tmp_path):
    lost, entered, go = [], threading.Event(), threading.Event()
    writer = Writer(make_log(io.BytesIO()), lost.append, limit=2)

    def slow():
        entered.set()
        assert go.wait(100)
        return 0

    file = Rotated(tmp_path)
    assert writer.put("x", file, slow)
    assert entered.wait(60)
    began = time.perf_counter()
    taken = [writer.put("x", file, lambda n=n: n) for n in range(1, 6)]
    assert time.perf_counter() - began < 30  # the writer is held for longer
    assert taken == [True, True, False, False, False]
    assert lost == ["x"] * 3
    go.set()
    writer.close()
    assert next(tmp_path.iterdir()).read_text() == "0\n1\n2\n"


def test_lines_are_made_and_written_on_the_writers_own_thread(tmp_path):
    writer, threads = Writer(make_log(io.BytesIO()), lambda _: None), []
    writer.put("x", Rotated(tmp_path), lambda: threads.append(threading.current_thread().name) or 1)
    writer.close()
    assert threads == ["widebeam-records"]


def test_files_rotate_by_size_and_the_oldest_go(tmp_path):
    file = Rotated(tmp_path, max_bytes=20, max_total=80)
    for n in range(20):
        file.write(b"%08d\n" % n)
    file.close()
    left = [path.read_text().split() for path in sorted(tmp_path.iterdir())]
    assert left == [[f"{n:08d}", f"{n + 1:08d}"] for n in (12, 14, 16, 18)]


def test_a_process_never_writes_into_the_lines_of_another(tmp_path):
    (tmp_path / "20200101T000000.000000Z-1.jsonl").write_bytes(b'{"half')
    one, two = Rotated(tmp_path), Rotated(tmp_path)
    for _ in range(3):
        one.write(b"1\n" * 5000)
        two.write(b"2\n" * 5000)
    one.close()
    two.close()
    found = [{*path.read_text().split()} for path in sorted(tmp_path.iterdir())]
    assert found[0] == {'{"half'}
    assert {frozenset(one) for one in found[1:]} == {frozenset("1"), frozenset("2")}


def test_a_full_disk_leaves_no_half_line_and_no_empty_file(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        file = Rotated(disk / "requests")
        file.write(b"1" * 99 + b"\n")
        ballast = fill(disk)
        for _ in range(100):
            with pytest.raises(OSError, match="No space"):
                for _ in range(100):  # what is left of a page that is the file's already
                    file.write(b"2" * 99 + b"\n")
            file.close()
        paths = list((disk / "requests").iterdir())
        assert len(paths) == 1
        assert {len(line) for path in paths for line in path.read_bytes().splitlines(keepends=True)} == {100}
        ballast.unlink()
        file.write(b"3" * 99 + b"\n")
        file.close()
        assert sorted((disk / "requests").iterdir())[-1].read_bytes() == b"3" * 99 + b"\n"


def test_servers_that_make_room_in_one_directory_do_not_disturb_each_other(tmp_path):
    broken = []

    def write(number):
        file = Rotated(tmp_path, max_bytes=20, max_total=80)
        try:
            for _ in range(300):
                file.write(b"%08d\n" % number)
        except OSError as error:
            broken.append(error)
        file.close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert broken == []


# ---- counts --------------------------------------------------------------------------------------------------------


@given(st.floats(0, 400), st.integers(1, 60))
@settings(max_examples=300, deadline=None)
def test_chi_square_is_the_incomplete_gamma_function(x, freedom):
    """Against torch, which is good to about 1e-6, and for even freedoms against the Poisson sum in 50 digits."""
    got = chi_square_p(x, freedom)
    want = float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(x / 2).double()))
    assert math.isclose(got, want, rel_tol=1e-4, abs_tol=1e-12)
    with localcontext() as context:
        context.prec = 50
        half, term, total = Decimal(x) / 2, Decimal(1), Decimal(0)
        for at in range(freedom // 2):
            total, term = total + term, term * half / (at + 1)
        exact = float(total * (-half).exp())
    assert freedom % 2 or math.isclose(got, exact, rel_tol=1e-11)


def test_the_sample_ratio_of_the_specification():
    assert round(sample_ratio_p([50_500, 24_800, 24_700], [50, 25, 25]), 3) == 0.006
    assert sample_ratio_p([500_000, 250_000, 250_000], [50, 25, 25]) == 1.0
    assert sample_ratio_p([52_000, 24_000, 24_000], [50, 25, 25]) < 1e-9
    assert sample_ratio_p([3, 4], [50, 50]) is None
    assert sample_ratio_p([100], [100]) is None


def test_a_lost_arm_is_flagged_and_a_sound_experiment_is_not():
    traffic = policies(contract()).traffic
    sound, broken = Counts(), Counts()
    for n in range(20_000):
        found = assign(traffic, facts(f"u{n}"), 1e9)
        sound.add(traffic, found)
        lost = found.decisions and found.decisions[0].arm == "strong" and n % 10 == 0
        broken.add(traffic, found if not lost else Assignment(found.plan))
    good, bad = (one.document(traffic, 1e9)["color"] for one in (sound, broken))
    assert (good["srm"], bad["srm"]) == (False, True)
    assert bad["srm_p"] < 0.001 < good["srm_p"]
    assert abs(sum(good["served"].values()) / 20_000 - 0.8 * 0.95) < 0.02
    assert abs(sound.held_out / 20_000 - 0.05) < 0.01


def test_one_busy_user_is_one_unit():
    """Requests of a user are not independent: counted one by one they would cry wolf."""
    counts, traffic = Counts(), policies(contract()).traffic
    for n in range(2000):
        counts.add(traffic, assign(traffic, facts(f"u{n}"), 1e9))
    busy = Decision("ranking", "color", "robot", "strong", "strong", "assigned", 1.0)
    for _ in range(5000):
        counts.add(traffic, Assignment(None, (busy,)))
    shown = counts.document(traffic, 1e9)["color"]
    assert shown["served"]["strong"] > 5000
    assert not shown["srm"]


def test_counts_follow_the_experiment_and_start_anew_with_a_new_split():
    deployed = contract()
    first = policies(deployed).traffic
    counts = Counts()
    for n in range(200):
        counts.add(first, assign(first, facts(f"u{n}"), 1e9))
    before = counts.document(first, 1e9)["color"]["served"]
    assert sum(before.values()) > 100
    same = policies(deployed, color=COLOR.replace("weight: 0.5", "weight: 0.6")).traffic
    assert counts.document(same, 1e9)["color"]["served"] == before
    salted = policies(deployed, color=COLOR.replace("color/1", "color/2")).traffic
    assert sum(counts.document(salted, 1e9)["color"]["served"].values()) == 0


# ---- guards --------------------------------------------------------------------------------------------------------


async def test_a_guard_raises_an_alert_and_stops_nobody(tmp_path):
    async with started(tmp_path) as world:
        users = units_of(world, "strong", 60)
        for n, user in enumerate(users):
            world.clock.now = float(n)
            outcome = await world.ask(user, k=41)  # the catalogue has 40 items
            assert outcome.status == "underfilled"
        alerts = world.runtime.status()["experiments"]["color"]["alerts"]
        assert alerts == [{"arm": "strong", "metric": "underfill_rate", "value": 1.0, "above": 0.5}]
        labels = {"experiment": "color", "arm": "strong", "metric": "underfill_rate"}
        assert world.sample("widebeam_experiment_alert", **labels) == 1
        assert (await world.ask(users[0])).experiments[0].arm == "strong"
        world.clock.now = 1000.0
        assert world.runtime.status()["experiments"]["color"]["alerts"] == []
        assert world.sample("widebeam_experiment_alert", **labels) == 0
    events = [json.loads(line)["event"] for line in world.logged.getvalue().splitlines()]
    assert (events.count("experiment_alert"), events.count("experiment_alert_over")) == (1, 1)
