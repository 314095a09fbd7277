"""Shares of users that a change moves: by hand where that is easy, by asking 20,000 users where it is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from app.policies.assign import HOLDOUT, POINTS, Facts, Holdout, Layer, RampStep, Traffic, assign
from app.policies.users import moved, notes
from tests.policies.test_assign import NARROW, PLAIN, TUNED, arms, experiment, traffic

UNITS = [f"user-{n}" for n in range(20_000)]


def shares(before, after, now=0.0):
    [users] = moved(before, after, now)
    return users


def test_nothing_moves_nobody():
    made = traffic(experiment(slots=(0, 2000)), holdout=Holdout(200, "h/1", "user_id", PLAIN))
    found = shares(made, made)
    assert (found.arm, found.least, found.policy) == (0, 0, 0)
    assert set(found.layers) == {HOLDOUT, "ranking"}


def test_a_ramp_moves_what_it_adds_and_nobody_else():
    ramp = (RampStep(0.0, POINTS // 10), RampStep(10.0, POINTS // 5))
    made = traffic(experiment(slots=(0, 2000), ramp=ramp))
    wider = traffic(experiment(slots=(0, 2000), ramp=ramp[1:]))
    found = shares(made, wider, 5.0)  # 10 % against none yet
    assert found.arm == found.least == pytest.approx(0.2 * 0.1, abs=1e-12)
    at_once = traffic(experiment(slots=(0, 2000)))
    found = shares(made, at_once, 20.0)
    assert found.arm == found.least == pytest.approx(0.2 * 0.8, abs=1e-12)
    assert found.policy == pytest.approx(0.2 * 0.8 * 0.5, abs=1e-12)  # the control's policy is the default's


def test_a_new_salt_moves_more_than_it_must():
    before = traffic(experiment())
    after = traffic(experiment(salt="x/2"))
    found = shares(before, after)
    assert found.arm == pytest.approx(1 - (0.5**2 + 0.25**2 + 0.25**2), abs=1e-12)
    assert found.least == pytest.approx(0, abs=1e-12)


def test_an_edited_policy_moves_its_arm_to_another_id_and_to_no_other_arm():
    after = traffic(experiment(of=arms(50, 25, 25, plans=(PLAIN, TUNED, TUNED))))
    found = shares(traffic(experiment()), after)
    assert (found.arm, found.least) == (0, 0)
    assert found.policy == pytest.approx(0.25, abs=1e-12)


def test_moved_slots_move_those_who_left_and_those_who_came():
    found = shares(traffic(experiment(slots=(0, 2000))), traffic(experiment(slots=(1000, 3000))))
    assert found.arm == pytest.approx(0.2, abs=1e-12)
    assert found.least == pytest.approx(0, abs=1e-12)
    assert found.layers["ranking"].arm == pytest.approx(0.2, abs=1e-12)


def test_a_larger_holdout_takes_people_out_of_their_arms():
    one, two = (Holdout(slots, "h/1", "user_id", PLAIN) for slots in (200, 500))
    found = shares(traffic(experiment(), holdout=one), traffic(experiment(), holdout=two))
    assert found.arm == found.least == pytest.approx(0.03, abs=1e-12)
    assert found.policy == pytest.approx(0.03 * 0.5, abs=1e-12)
    assert found.layers[HOLDOUT].arm == pytest.approx(0.03, abs=1e-12)
    assert found.layers["ranking"].arm == 0


def test_a_layer_of_some_surfaces_moves_only_their_users():
    layer = {"surfaces": ("feed",)}
    before = traffic(experiment(slots=(0, 2000)), **layer)
    others, feed = moved(before, traffic(experiment(slots=(0, 4000)), **layer), 0.0)
    assert (others.surface, others.arm) == (None, 0)
    assert (feed.surface, feed.arm) == ("feed", pytest.approx(0.2, abs=1e-12))


def test_what_shares_cannot_say_is_said():
    before = traffic(experiment("x"))
    after = traffic(experiment("y", salt="ranking/1"), salt="ranking/2")
    assert notes(before, before) == []
    assert notes(before, after) == [
        "salt ranking/1 moves from layer ranking to experiments of ranking: taken as independent of itself"
    ]
    with pytest.raises(ValueError, match="default policy"):
        moved(Traffic(None), before, 0.0)


def random_traffic(rng):
    """A traffic of few salts, so that two of them share some; a layer of parameters over one that chooses."""

    def some(layer, names, parameters):
        out, at = [], 0
        for name in names:
            first = at + int(rng.integers(0, 1500))
            at = first + int(rng.integers(500, 3500))
            if rng.random() < 0.2:
                continue
            weights = [(50, 25, 25), (10, 80, 10), (34, 33, 33)][rng.integers(3)]
            given = ({}, {"weight": 0.5}, {"weight": 2.0}) if parameters else ({}, {}, {})
            plans = (None,) * 3 if parameters else (PLAIN, NARROW, TUNED)
            ramp = () if rng.random() < 0.5 else (RampStep(0.0, int(rng.integers(1, POINTS))),)
            made = experiment(
                f"{layer}_{name}",
                (first, min(at, 10_000)),
                arms(*weights, plans=plans, params=given),
                ramp=ramp,
                salt=f"{layer}_{name}/{rng.integers(1, 3)}",
                state="paused" if rng.random() < 0.15 else "running",
            )
            out.append(replace(made, layer=layer))
        return tuple(out)

    tuned = Layer("tuned", "tuned/1", "user_id", (), ("weight",), some("tuned", "ab", True))
    held = Holdout(int(rng.integers(1, 2000)), f"h/{rng.integers(1, 3)}", "user_id", [PLAIN, NARROW][rng.integers(2)])
    salt = f"ranking/{1 if rng.random() < 0.8 else 2}"
    made = traffic(
        *some("ranking", "abc", False), holdout=held if rng.random() < 0.6 else None, more=(tuned,), salt=salt
    )
    return replace(made, default=[PLAIN, TUNED][rng.integers(2)])


@pytest.mark.parametrize("seed", range(6))
def test_shares_are_those_of_asked_users(seed):
    rng = np.random.default_rng(seed)
    before, after = random_traffic(rng), random_traffic(rng)
    found = shares(before, after, 1.0)
    arm = policy = 0
    for unit in UNITS:
        sides = [assign(side, Facts(unit, "r", {}, {}), 1.0) for side in (before, after)]
        picks = [
            [(one.name, one.arm) for one in side.decisions if one.reason in ("assigned", "holdout")] for side in sides
        ]
        arm += picks[0] != picks[1]
        policy += sides[0].plan.policy_id != sides[1].plan.policy_id
    for counted, share in ((arm, found.arm), (policy, found.policy)):
        error = 4.5 * np.sqrt(max(share * (1 - share), 1e-6) / len(UNITS))
        assert abs(counted / len(UNITS) - share) < error
    assert 0 <= found.least <= found.arm <= 1
    assert all(0 <= one.least <= one.arm + 1e-12 for one in found.layers.values())
