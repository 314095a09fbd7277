"""Assignment: the published vectors, and what must hold for every unit, salt and ramp."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.policies.assign import (
    POINTS,
    SLOTS,
    Arm,
    Condition,
    Experiment,
    Facts,
    Holdout,
    Layer,
    RampStep,
    Traffic,
    assign,
    overlay,
    point,
    slot,
    u64,
)
from app.policies.assignment import explain
from tests.policies.contracts import BASE, plan_of

WEIGHTED = """\
widebeam: 1
extends: base
params:
  weight: {value: 1, range: [0.1, 2]}
steps:
  all:
    score: parent + param.weight * logp
"""
PLAIN = plan_of(BASE.replace("widebeam: 1\n", "widebeam: 1\nwidths: [9, 9, 9]\n"))
NARROW = replace(plan_of("widebeam: 1\nextends: base\nwidths: [3, 3, 3]\n"), policy="narrow")
TUNED = replace(plan_of(WEIGHTED), policy="tuned")
UNITS = [f"user-{n}" for n in range(40_000)]


def arms(*weights, plans=(PLAIN, NARROW, TUNED), params=({}, {}, {})):
    out, at = [], 0
    for name, weight, plan, given_ in zip(("control", "b", "c"), weights, plans, params, strict=False):
        out.append(Arm(name, weight * 10_000, (at, at + weight * 10_000), plan, given_))
        at += weight * 10_000
    return tuple(out)


def experiment(name="x", slots=(0, SLOTS), of=None, **fields):
    made = Experiment(name, "ranking", slots, "running", f"{name}/1", None, of or arms(50, 25, 25))
    return replace(made, **fields)


def traffic(*experiments, holdout=None, more=(), **layer):
    fields = {"salt": "ranking/1", "unit": "user_id", "surfaces": (), "params": None, **layer}
    return Traffic(PLAIN, holdout, (Layer("ranking", experiments=experiments, **fields), *more))


def user(unit, ctx=None, numbers=None, request="r"):
    return Facts(unit, request, ctx or {}, numbers or {})


def arm_of(found):
    return found.decisions[0].arm if found.decisions else None


# ---- the hash ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("salt", "unit", "number", "at_slot", "at_point"),
    [
        ("ranking/1", "user-1", 9007744519577462053, 4883, None),
        ("ranking/1", "user-2", 13091587648106247109, 7096, None),
        ("feed_diversity/1", "user-1", 11988738017002242817, None, 649910),
        ("feed_diversity/1", "ü", 1574541825417244272, None, 85356),
    ],
)
def test_the_published_vectors(salt, unit, number, at_slot, at_point):
    assert u64(salt, unit) == number
    assert at_slot is None or slot(salt, unit) == at_slot
    assert at_point is None or point(salt, unit) == at_point


@given(st.text(max_size=20), st.text(min_size=1, max_size=20))
def test_the_hash_is_the_written_one(salt, unit):
    if any(0xD800 <= ord(char) < 0xE000 for char in salt + unit):
        return
    digest = hashlib.sha256("\x1f".join(("widebeam-bucket/1", salt, unit)).encode()).hexdigest()
    assert u64(salt, unit) == int(digest[:16], 16)
    assert 0 <= slot(salt, unit) < SLOTS
    assert point(salt, unit) // 100 == slot(salt, unit)


def test_slots_and_arms_are_uniform():
    """Chi-square of 100 cells over 40,000 units, with torch's incomplete gamma as the distribution."""
    for salt in ("ranking/1", "explore/7", "x"):
        cells = torch.bincount(torch.tensor([slot(salt, unit) // 100 for unit in UNITS]), minlength=100).double()
        expected = len(UNITS) / 100
        statistic = ((cells - expected) ** 2 / expected).sum()
        p = torch.special.gammaincc(torch.tensor(99 / 2).double(), statistic / 2)
        assert p > 0.001, (salt, float(p))


def test_arms_have_their_weights_inside_any_slots():
    for slots in ((0, 2000), (8000, 10_000), (0, 10_000)):
        made = traffic(experiment(slots=slots))
        found = [arm_of(assign(made, user(unit), 0.0)) for unit in UNITS]
        enrolled = [arm for arm in found if arm]
        assert abs(len(enrolled) / len(UNITS) - (slots[1] - slots[0]) / SLOTS) < 0.01
        for name, share in (("control", 0.5), ("b", 0.25), ("c", 0.25)):
            assert abs(enrolled.count(name) / len(enrolled) - share) < 0.02


def test_one_salt_for_slots_and_arms_puts_everybody_into_the_first_arm():
    """Why E007 exists."""
    made = traffic(experiment(slots=(0, 2000), salt="ranking/1"))
    assert {arm_of(assign(made, user(unit), 0.0)) for unit in UNITS[:5000]} == {None, "control"}


def test_layers_are_independent():
    one, two = experiment("x"), replace(experiment("y"), layer="other")
    other = Layer("other", "other/1", "user_id", (), None, (two,))
    both = first = second = 0
    for unit in UNITS:
        a, b = (one_.arm == "control" for one_ in assign(traffic(one, more=(other,)), user(unit), 0.0).decisions)
        both, first, second = both + (a and b), first + a, second + b
    assert abs(both / len(UNITS) - (first / len(UNITS)) * (second / len(UNITS))) < 0.01


# ---- ramps ---------------------------------------------------------------------------------------------------------


def ramp(*coverage):
    return tuple(RampStep(float(n), one) for n, one in enumerate(coverage))


def test_a_ramp_moves_nobody_between_arms_and_only_adds():
    made = traffic(experiment(ramp=ramp(10_000, 50_000, 200_000, 500_000, POINTS)))
    before: dict[str, str] = {}
    sizes = []
    for now in range(5):
        arms_now = {unit: arm_of(assign(made, user(unit), float(now))) for unit in UNITS[:20_000]}
        enrolled = {unit: arm for unit, arm in arms_now.items() if arm != "default"}
        assert before.items() <= enrolled.items()
        before = enrolled
        sizes.append(len(enrolled) / 20_000)
    assert all(abs(size - share) < 0.01 for size, share in zip(sizes, (0.01, 0.05, 0.2, 0.5, 1), strict=True))


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=6),
    st.integers(0, POINTS),
    st.integers(0, POINTS),
    st.integers(0, POINTS - 1),
)
@settings(max_examples=300, deadline=None)
def test_whatever_the_weights_more_coverage_never_takes_an_arm_away(weights, low, high, at):
    low, high = sorted((low, high))
    edges = [sum(weights[:n]) * POINTS // sum(weights) for n in range(len(weights) + 1)]
    made = tuple(Arm(f"a{n}", 1, (edges[n], edges[n + 1]), PLAIN, {}) for n in range(len(weights)))
    few = [arm.name for arm in made if arm.covers(at, low)]
    many = [arm.name for arm in made if arm.covers(at, high)]
    everything = [arm.name for arm in made if arm.covers(at, POINTS)]
    assert few in (many, [])
    assert many in (everything, [])
    assert len(everything) == 1
    assert not any(arm.covers(at, 0) for arm in made)


def test_naive_cumulative_ranges_would_move_half_of_the_enrolled():
    """The counter-example that home ranges exist for, so that the test above can tell the two apart."""

    def naive(at, coverage):
        edges = [0.5 * coverage, 0.75 * coverage, coverage]
        return next((n for n, edge in enumerate(edges) if at < edge), None)

    points = [point("x/1", unit) for unit in UNITS[:20_000]]
    enrolled = [at for at in points if naive(at, 0.2 * POINTS) is not None]
    moved = sum(naive(at, 0.2 * POINTS) != naive(at, 0.5 * POINTS) for at in enrolled)
    assert 0.4 < moved / len(enrolled) < 0.6


def test_a_ramp_is_a_matter_of_the_clock_that_is_handed_in():
    one = experiment(ramp=(RampStep(100.0, 10_000), RampStep(200.0, POINTS)))
    assert [one.coverage(now) for now in (99.9, 100.0, 199.9, 200.0, 1e12)] == [0, 10_000, 10_000, POINTS, POINTS]
    assert assign(traffic(one), user("user-1"), 50.0).plan is PLAIN
    assert assign(traffic(one), user("user-1"), 50.0).decisions[0][3:6] == (None, "default", "not_covered")


def test_the_published_unit_is_in_its_arm_at_full_coverage_only():
    one = experiment(salt="feed_diversity/1")
    assert one.arm_at("user-1", POINTS).name == "b"
    assert one.arm_at("user-1", POINTS // 10) is None


# ---- the order of the rules ----------------------------------------------------------------------------------------


def test_without_a_unit_the_default_is_served_and_counted():
    found = assign(traffic(experiment()), user(None), 0.0)
    assert (found.plan, found.decisions, found.unassigned) == (PLAIN, (), ("x",))
    device = traffic(experiment(), unit="device_id")
    assert assign(device, user("user-1"), 0.0).unassigned == ("x",)
    assert assign(device, user(None, {"device_id": ""}), 0.0).unassigned == ("x",)
    assert assign(device, user(None, {"device_id": "d"}), 0.0).decisions[0].unit == "d"
    assert assign(traffic(experiment(), unit="request_id"), user(None, request="q"), 0.0).decisions[0].unit == "q"
    assert assign(traffic(experiment(), unit="ctx.shop"), user(None, {"shop": "s"}), 0.0).decisions[0].unit == "s"


def test_the_holdout_is_in_no_experiment_and_of_its_size():
    made = traffic(experiment(), holdout=Holdout(200, "holdout/1", "user_id", NARROW))
    held = [unit for unit in UNITS if assign(made, user(unit), 0.0).decisions[0].reason == "holdout"]
    assert abs(len(held) / len(UNITS) - 0.02) < 0.004
    assert set(held) == {unit for unit in UNITS if slot("holdout/1", unit) < 200}
    found = assign(made, user(held[0]), 0.0)
    assert found.plan is NARROW
    assert [one.name for one in found.decisions] == ["holdout"]
    assert assign(made, user(held[0]), 0.0, {"narrow"}).plan is PLAIN


def test_eligibility_is_asked_before_the_arms_so_that_these_stay_in_balance():
    odd = Condition("odd", lambda facts: facts.user["n"] % 2 == 1)
    made = traffic(experiment(where=odd))
    found = [assign(made, user(unit, numbers={"n": n}), 0.0).decisions[0] for n, unit in enumerate(UNITS[:8000])]
    assert {one.reason for one in found[0::2]} == {"where"}
    assert {one.reason for one in found[1::2]} == {"assigned"}
    assert abs(sum(one.arm == "control" for one in found[1::2]) / 4000 - 0.5) < 0.03


def test_a_layer_is_for_its_surfaces_only():
    made = traffic(experiment(), surfaces=("feed", "search"))
    assert assign(made, user("u", {"surface": "feed"}), 0.0).decisions
    assert not assign(made, user("u", {"surface": "home"}), 0.0).decisions
    assert not assign(made, user("u"), 0.0).decisions


def test_experiments_of_a_layer_exclude_each_other():
    made = traffic(experiment("x", (0, 5000)), experiment("y", (5000, 10_000)))
    found = [assign(made, user(unit), 0.0).decisions for unit in UNITS[:2000]]
    assert {len(one) for one in found} == {1}
    assert {one[0].name for one in found} == {"x", "y"}


@pytest.mark.parametrize(("state", "reason"), [("paused", "paused"), ("draft", None), ("stopped", None)])
def test_what_does_not_run_serves_the_default(state, reason):
    found = assign(traffic(experiment(state=state)), user("user-1"), 0.0)
    assert found.plan is PLAIN
    assert [one.reason for one in found.decisions] == ([reason] if reason else [])
    assert found.unassigned == ()


def test_the_kill_list_wins_over_everything():
    made = traffic(experiment())
    unit = next(unit for unit in UNITS if assign(made, user(unit), 0.0).plan is NARROW)
    killed = assign(made, user(unit), 0.0, {"x"})
    assert killed.plan is PLAIN
    assert killed.decisions[0][3:6] == ("b", "control", "killed")
    policy = assign(made, user(unit), 0.0, {"narrow"})
    assert policy.plan is PLAIN
    assert policy.decisions[0][3:6] == ("b", "default", "killed")
    assert assign(made, user(unit), 0.0, {"*"}, {"x": "b"}) == (PLAIN, (), ())
    assert assign(made, user(unit), 0.0, {"x"}, {"x": "b"}).decisions[0][3:6] == ("b", "control", "killed")
    assert assign(made, user(unit), 0.0, {PLAIN.policy}).plan is NARROW  # the default cannot be killed


def test_a_forced_arm_is_served_whoever_asks_and_says_so():
    made = traffic(experiment(state="draft"), holdout=Holdout(SLOTS, "holdout/1", "user_id", PLAIN), surfaces=("feed",))
    for unit in (None, "user-1"):
        found = assign(made, user(unit), 0.0, (), {"x": "b"})
        assert found.plan is NARROW
        assert found.decisions[0][2:6] == (unit, "b", "b", "forced")
    assert assign(made, user("user-1"), 0.0).decisions[0].reason == "holdout"


# ---- parameters ----------------------------------------------------------------------------------------------------


def test_an_overlay_is_the_same_structure_with_other_values_and_another_id():
    more = overlay(TUNED, {"weight": 1.5})
    assert more.structure is TUNED.structure
    assert more.params == (1.5,)
    assert more.plan_id == TUNED.plan_id
    compiled = plan_of(WEIGHTED.replace("value: 1,", "value: 1.5,"))
    assert more.policy_id == compiled.policy_id != TUNED.policy_id
    assert more.resolved == compiled.resolved
    assert overlay(TUNED, {"weight": 1.0}) is TUNED


def test_parameters_of_another_layer_are_laid_over_the_chosen_policy():
    tuning = experiment("t", of=arms(50, 50, plans=(None, None), params=({}, {"weight": 0.5})))
    layer = Layer("tuning", "tuning/1", "user_id", (), ("weight",), (replace(tuning, layer="tuning"),))
    ranking = experiment(of=arms(50, 50, plans=(PLAIN, TUNED)))
    made = traffic(ranking, more=(layer,))
    seen = set()
    for unit in UNITS[:400]:
        found = assign(made, user(unit), 0.0)
        chosen, laid = found.decisions
        seen.add((chosen.arm, laid.arm, laid.reason, found.plan.policy, found.plan.params))
    assert seen == {
        ("control", "default", "params", "feed", ()),  # a policy without the parameter is not part of the experiment
        ("b", "control", "assigned", "tuned", (1.0,)),
        ("b", "b", "assigned", "tuned", (0.5,)),
    }
    again = [assign(made, user(unit), 0.0).plan for unit in UNITS[:400]]
    assert len({id(plan) for plan in again}) == 3  # made once


@given(st.text(min_size=1, max_size=12), st.floats(0, 10, allow_nan=False))
@settings(max_examples=200, deadline=None)
def test_assignment_is_a_function(unit, now):
    if any(0xD800 <= ord(char) < 0xE000 for char in unit):
        return
    made = traffic(experiment(ramp=ramp(1000, 300_000, POINTS)), holdout=Holdout(500, "h", "user_id", PLAIN))
    assert assign(made, user(unit), now) == assign(made, user(unit), now)


def test_a_request_costs_microseconds():
    made = traffic(*(experiment(f"x{n}", (n * 100, n * 100 + 100)) for n in range(100)))
    spent = []
    for _ in range(5):
        start = time.thread_time()
        for unit in UNITS[:400]:
            assign(made, user(unit), 0.0)
        spent.append((time.thread_time() - start) / 400)
    assert min(spent) < 500e-6


# ---- explaining ----------------------------------------------------------------------------------------------------


def test_an_explanation_says_what_assignment_does():
    made = traffic(experiment(slots=(0, 5000)), holdout=Holdout(2000, "holdout/1", "user_id", PLAIN))
    reasons = set()
    for unit in UNITS[:300]:
        why = explain(made, "x", unit, user(None), 0.0)
        found = assign(made, user(unit), 0.0)
        one = next((each for each in found.decisions if each.name == "x"), None)
        assert why["arm"] == (one.arm if one else "default")
        assert why["policy_id"] == found.plan.policy_id
        assert why["slot"] == slot("ranking/1", unit)
        reasons.add(why["reason"])
    assert reasons == {"assigned", "holdout", "slots"}
    assert explain(made, "nobody", "u", user(None), 0.0) is None
    assert explain(traffic(experiment(state="draft")), "x", "u", user(None), 0.0)["reason"] == "draft"
