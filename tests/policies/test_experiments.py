"""Traffic and experiment files: what they mean together, what is refused and where, and what goes on running."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.policies.assign import Facts, assign
from app.policies.diagnostics import Findings, Span
from app.policies.last_good import Kept
from app.policies.load import Folder, compile_folder, snapshot
from app.policies.source import Scalar, Source
from app.policies.where import compile_where
from tests.policies.contracts import BASE, contract

TRAFFIC = """\
widebeam: 1
kind: traffic
default: feed_base
unit: user_id
missing_unit: default
holdout: {share: 2%, salt: holdout/2026h2, policy: feed_base}
layers:
  ranking: {salt: ranking/1, surfaces: [feed, search]}
  explore: {salt: explore/1, params: [temp]}
"""
EXPERIMENT = """\
widebeam: 1
kind: experiment
about: does a heavier last step raise session depth?
owner: feed-ranking
layer: ranking
slots: [0, 2000]
state: running
salt: feed_diversity/1
where: ctx.country in ["BR", "MX"] and user.age_days > 7
arms:
  control: {weight: 50, policy: feed_base}
  diverse: {weight: 25, policy: feed_tuned}
  strong:  {weight: 25, policy: feed_tuned, params: {spread: 0.8}}
ramp:
  - {from: 2026-11-01T00:00Z, coverage: 1%}
  - {from: 2026-11-02T00:00Z, coverage: 10%}
  - {from: 2026-11-05T00:00Z, coverage: 100%}
stop_if:
  - {metric: underfill_rate, above: 0.01, for: 2m}
  - {metric: p99_ms, above: 35, for: 2m}
"""
TUNED = """\
widebeam: 1
params:
  spread: {value: 0.4, range: [0.1, 10]}
  temp: {value: 1, range: [0.1, 5]}
steps:
  all:
    score: parent + param.spread * logp
    rank: score * param.temp
"""
SHIPPED = Path(__file__).parents[2] / "policies"
NOW = datetime.fromisoformat("2026-11-20T00:00Z").timestamp()


def folder(traffic=TRAFFIC, policies=None, **experiments):
    texts = {"feed_base": BASE, "feed_tuned": TUNED, **(policies or {})}
    return Folder(
        {name: Source(f"policies/{name}.yaml", text.encode()) for name, text in texts.items()},
        Source("policies/traffic.yaml", traffic.encode()) if traffic else None,
        (),
        {name: Source(f"policies/experiments/{name}.yaml", text.encode()) for name, text in experiments.items()},
    )


def load(*args, running=None, now=NOW, last_good=None, **experiments):
    return compile_folder(folder(*args, **experiments), contract(), running=running, now=now, last_good=last_good)


def codes(loaded, file=None):
    return [
        (one.rule.code, one.span.line, one.span.col) for one in loaded.findings if file is None or file in one.span.file
    ]


def change(text, old, new):
    assert text.count(old) == 1, old
    return text.replace(old, new)


# ---- the specification's own files ----------------------------------------------------------------------------------


def test_the_files_of_the_specification_load_as_they_stand():
    loaded = load(feed_diversity=EXPERIMENT)
    assert codes(loaded) == [("W101", 10, 1)]
    assert loaded.default == "feed_base"
    traffic = loaded.traffic
    assert traffic.holdout[:3] == (200, "holdout/2026h2", "user_id")
    assert [(layer.name, layer.surfaces, layer.params) for layer in traffic.layers] == [
        ("ranking", ("feed", "search"), None), ("explore", (), ("temp",)),
    ]  # fmt: skip
    one = traffic.experiments["feed_diversity"]
    assert (one.slots, one.state, one.salt, one.where.text) == (
        (0, 2000), "running", "feed_diversity/1", 'ctx.country in ["BR", "MX"] and user.age_days > 7',
    )  # fmt: skip
    assert [(arm.name, arm.home) for arm in one.arms] == [
        ("control", (0, 500_000)), ("diverse", (500_000, 750_000)), ("strong", (750_000, 1_000_000)),
    ]  # fmt: skip
    assert [arm.plan.policy for arm in one.arms] == ["feed_base", "feed_tuned", "feed_tuned"]
    diverse, strong = one.arms[1].plan, one.arms[2].plan
    assert strong.structure is diverse.structure
    assert dict(zip(strong.structure.params, strong.params, strict=True)) == {"spread": 0.8, "temp": 1.0}
    assert strong.policy_id != diverse.policy_id
    assert [one.coverage(datetime.fromisoformat(f"2026-{day}T00:00Z").timestamp()) for day in
            ("10-31", "11-01", "11-03", "11-05")] == [0, 10_000, 100_000, 1_000_000]  # fmt: skip
    assert [tuple(guard) for guard in one.guards] == [("underfill_rate", 0.01, 120.0), ("p99_ms", 35.0, 120.0)]
    facts = Facts("user-1", "r", {"country": "BR", "surface": "feed"}, {"age_days": 8})
    assert assign(traffic, facts, NOW).plan in (one.plan for one in (*one.arms, one.arms[0]))


def test_without_a_traffic_file_there_are_no_layers():
    loaded = load(None, policies={"base": BASE}, x=EXPERIMENT)
    assert codes(loaded) == [("S011", 5, 8)]
    assert loaded.default == "base"
    assert loaded.traffic.default is loaded.plan("base")
    assert loaded.experiments["x"].standing == "rejected"


def test_the_id_of_the_set_follows_the_traffic():
    first = load(x=EXPERIMENT)
    assert load(x="# a comment\n" + EXPERIMENT).id == first.id
    for text in (
        change(EXPERIMENT, "state: running", "state: paused"),
        change(EXPERIMENT, "spread: 0.8", "spread: 0.9"),
    ):
        assert load(x=text).id != first.id
    assert load(change(TRAFFIC, "share: 2%", "share: 3%"), x=EXPERIMENT).id != first.id


# ---- what is refused, and where -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("weight: 50", "weight: 49", ("E001", 10, 1)),
        ("weight: 50", "weight: 0", ("E001", 11, 21)),
        ("weight: 50", "weight: -50", ("E001", 11, 21)),
        ("weight: 50", "weight: 50.00001", ("S011", 11, 21)),
        ("weight: 50", 'weight: "50"', ("S011", 11, 21)),
        ("owner: feed", "ownr: feed", ("S007", 4, 1)),
        ("policy: feed_base", "policy: feed_bass", ("E002", 11, 33)),
        ("policy: feed_base", "policy: root", ("E002", 11, 33)),
        ("policy: feed_base", "policy: wrong", ("E002", 11, 33)),
        (", policy: feed_base", "", ("S009", 11, 3)),
        ("spread: 0.8", "spread: 80", ("E004", 13, 62)),
        ("spread: 0.8", "sprad: 0.8", ("T001", 13, 54)),
        ("spread: 0.8", "temp: 0.8", ("E006", 13, 54)),
        ("salt: feed_diversity/1", "salt: ranking/1", ("E007", 8, 7)),
        ("salt: feed_diversity/1", "salt: explore/1", ("E007", 8, 7)),
        ("salt: feed_diversity/1", "salt: holdout/2026h2", ("E007", 8, 7)),
        ("salt: feed_diversity/1", "salt: a b", ("S011", 8, 7)),
        ("2026-11-02T00:00Z", "2026-11-01T00:00Z", ("E010", 16, 12)),
        ("2026-11-02T00:00Z", "2026-11-02", ("S011", 16, 12)),
        ("2026-11-02T00:00Z", "tomorrow", ("S011", 16, 12)),
        ("coverage: 10%", "coverage: 0.5%", ("E009", 16, 41)),
        ("coverage: 10%", "coverage: 110%", ("S011", 16, 41)),
        ("coverage: 10%", "coverage: 10", ("S011", 16, 41)),
        ("control:", "plain:  ", ("E011", 10, 1)),
        ("control:", "default:", ("S011", 11, 3)),
        ("state: running", "state: runing", ("S011", 7, 8)),
        ("state: running", "unit: device_id", ("E012", 7, 7)),
        ("state: running", "unit: ctx", ("S011", 7, 7)),
        ("slots: [0, 2000]", "slots: [2000, 2000]", ("S011", 6, 15)),
        ("slots: [0, 2000]", "slots: [0, 10001]", ("S011", 6, 12)),
        ("slots: [0, 2000]", "slots: 2000", ("S008", 6, 8)),
        ("layer: ranking", "layer: rankin", ("S011", 5, 8)),
        ("kind: experiment", "kind: traffic", ("S011", 2, 7)),
        ("metric: p99_ms", "metric: p99", ("S011", 20, 14)),
        ("above: 35, for: 2m", "above: 35, for: 2 minutes", ("S011", 20, 38)),
        ("above: 35, for: 2m", "above: 35", ("S009", 20, 5)),
        ("user.age_days > 7", "user.age_days", ("T005", 9, 40)),
        ("user.age_days > 7", "usr.age_days > 7", ("T001", 9, 40)),
        ("user.age_days > 7", "param.temp > 7", ("T001", 9, 40)),
        ("user.age_days > 7", "ctx.age > 7", ("T011", 9, 40)),
        ("user.age_days > 7", "lg(user.age) > 7", ("T007", 9, 40)),
        ("user.age_days > 7", "__import__('os')", ("T007", 9, 40)),
    ],
)  # fmt: skip
def test_a_fault_has_its_code_and_place(old, new, found):
    policies = {"root": "widebeam: 1\nabstract: true\n", "wrong": "widebeam: 1\nwidths: [9999, 1, 1]\n"}
    loaded = load(TRAFFIC, policies, x=change(EXPERIMENT, old, new))
    mine = [one for one in codes(loaded, "/x.yaml") if one[0] != "W101"]
    assert mine == [found], [one.text() for one in loaded.findings]
    rejected = found[0] != "E009"
    assert (loaded.experiments["x"].standing == "rejected") == rejected
    assert ("x" in loaded.traffic.experiments) != rejected


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("params: [temp]", "params: [temp, temp]", ("S003", 9, 45)),
        ("params: [temp]", "params: []", ("S010", 9, 38)),
        ("salt: explore/1, params: [temp]", "salt: ranking/1, params: [temp]", ("E007", 9, 19)),
        ("salt: explore/1, params: [temp]", "salt: explore/1", ("E006", 9, 3)),
        ("share: 2%", "share: 2.005%", ("S011", 6, 18)),
        ("share: 2%", "share: 2", ("S011", 6, 18)),
        ("policy: feed_base}", "policy: nobody}", ("E002", 6, 52)),
        ("missing_unit: default", "missing_unit: random", ("S011", 5, 15)),
        ("unit: user_id", "unit: user", ("S011", 4, 7)),
        ("surfaces: [feed, search]", "surface: feed", ("S007", 8, 30)),
    ],
)  # fmt: skip
def test_a_fault_of_traffic_has_its_code_and_place(old, new, found):
    old = old if TRAFFIC.count(old) == 1 else f"\n{old}"
    new = new if not old.startswith("\n") else f"\n{new}"
    loaded = load(change(TRAFFIC, old, new), x=EXPERIMENT)
    assert codes(loaded, "traffic") == [found], [one.text() for one in loaded.findings]
    assert codes(loaded, "/x.yaml") in ([], [("W101", 10, 1)])  # no follow-up
    assert loaded.traffic.layers == ()  # half a traffic plan would put people where they do not belong
    assert loaded.traffic.holdout is None


def test_all_faults_of_a_file_are_reported_at_once():
    text = EXPERIMENT
    for old, new in [
        ("weight: 50", "weight: 40"), ("control:", "plain:  "), ("coverage: 10%", "coverage: x"),
        ("spread: 0.8", "spread: 80"), ("age_days > 7", "age_days"), ("state: running", "stat: running"),
    ]:  # fmt: skip
        text = change(text, old, new)
    found = {code for code, _, _ in codes(load(x=text))}
    assert {"E001", "E011", "S011", "T005", "S007"} <= found


def test_two_layers_never_touch_the_same_thing():
    both = TRAFFIC + "  again: {salt: again/1, params: [temp]}\n"
    assert codes(load(both)) == [("E006", 10, 35)]
    apart = TRAFFIC + "  home: {salt: home/1, surfaces: [home]}\n"
    assert codes(load(apart)) == []
    meet = TRAFFIC + "  home: {salt: home/1, surfaces: [home, feed]}\n"
    assert codes(load(meet)) == [("E006", 10, 3)]
    everywhere = TRAFFIC + "  home: {salt: home/1}\n"
    assert codes(load(everywhere)) == [("E006", 10, 3)]


TUNING = """\
widebeam: 1
kind: experiment
layer: explore
slots: [0, 10000]
salt: tuning/1
arms:
  control: {weight: 50}
  hot: {weight: 50, params: {temp: 2}}
"""


def test_a_layer_of_parameters_sets_its_own_and_no_policy():
    assert codes(load(t=TUNING)) == []
    assert codes(load(t=change(TUNING, "temp: 2", "spread: 2"))) == [("E006", 8, 30)]
    assert codes(load(t=change(TUNING, "temp: 2", "temp: 20"))) == [("E004", 8, 36)]
    assert codes(load(t=change(TUNING, "{weight: 50}", "{weight: 50, policy: feed_base}"))) == [("E006", 7, 33)]
    nobody = TRAFFIC.replace("params: [temp]", "params: [tmp]")
    assert codes(load(nobody, t=change(TUNING, "temp: 2", "tmp: 2"))) == [("T001", 8, 30)]
    unused = TUNED.replace("    rank: score * param.temp\n", "")
    found = codes(load(TRAFFIC, {"feed_tuned": unused}, t=TUNING), "/t.yaml")
    assert found == [("E004", 8, 30)]


def test_salts_are_unique_over_all_files():
    other = change(change(EXPERIMENT, "slots: [0, 2000]", "slots: [2000, 4000]"), "layer: ranking", "layer: ranking")
    loaded = load(a=EXPERIMENT, b=other)
    assert codes(loaded, "/b.yaml")[0] == ("E005", 8, 7)
    assert [one.standing for one in loaded.experiments.values()] == ["live", "rejected"]
    gone = load(b=other, running=load(a=EXPERIMENT).traffic)  # a is deleted, its salt is not free
    assert codes(gone, "/b.yaml")[0] == ("E005", 8, 7)


# ---- slots ----------------------------------------------------------------------------------------------------------


def other(slots, salt="other/1", **changes):
    text = change(change(EXPERIMENT, "slots: [0, 2000]", f"slots: {slots}"), "feed_diversity/1", salt)
    for old, new in changes.values():
        text = change(text, old, new)
    return text


def test_slots_are_half_open_and_overlaps_are_refused():
    assert {one.standing for one in load(a=EXPERIMENT, b=other("[2000, 2001]")).experiments.values()} == {"live"}
    assert codes(load(a=EXPERIMENT, b=other("[1999, 4000]")), "/b.yaml")[0] == ("E003", 6, 8)


def test_what_runs_keeps_its_slots_against_newcomers():
    running = load(b=EXPERIMENT).traffic
    loaded = load(a=other("[0, 10]"), b=EXPERIMENT, running=running)
    assert {name: one.standing for name, one in loaded.experiments.items()} == {"a": "rejected", "b": "live"}
    moved = load(a=other("[3000, 4000]"), b=EXPERIMENT).traffic
    loaded = load(a=other("[1000, 4000]", "other/2"), b=EXPERIMENT, running=moved)
    assert {name: one.standing for name, one in loaded.experiments.items()} == {"a": "stale", "b": "live"}
    assert loaded.traffic.experiments["a"].slots == (3000, 4000)


def test_what_was_served_never_comes_back_onto_taken_slots():
    """a moves to b's slots, b moves away in the same save, and b's file is bad: nobody gets two experiments."""
    running = load(a=other("[3000, 4000]"), b=EXPERIMENT).traffic
    bad = change(change(EXPERIMENT, "slots: [0, 2000]", "slots: [5000, 6000]"), "weight: 50", "weight: 40")
    loaded = load(a=other("[0, 1000]", "other/2"), b=bad, running=running)
    assert {name: one.standing for name, one in loaded.experiments.items()} == {"a": "live", "b": "rejected"}
    assert set(loaded.traffic.experiments) == {"a"}


def test_a_stopped_experiment_keeps_its_slots_for_a_day():
    stopped = change(EXPERIMENT, "state: running", "state: stopped\nstopped_at: 2026-11-19T12:00Z")
    assert codes(load(a=stopped, b=other("[0, 100]")), "/b.yaml")[0] == ("E003", 6, 8)
    later = load(a=stopped, b=other("[0, 100]"), now=NOW + 13 * 3600)
    assert {one.standing for one in later.experiments.values()} == {"live"}
    facts = Facts("user-1", "r", {"country": "BR", "surface": "feed"}, {"age_days": 8})
    assert assign(load(a=stopped).traffic, facts, NOW).decisions == ()
    for state in ("paused", "draft"):
        held = load(a=change(EXPERIMENT, "state: running", f"state: {state}"), b=other("[0, 100]"))
        assert codes(held, "/b.yaml")[0] == ("E003", 6, 8)


# ---- against what runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("slots: [0, 2000]", "slots: [0, 3000]", (6, 8)),
        ("age_days > 7", "age_days > 8", (9, 8)),
        ("  diverse: {weight: 25", "  diverse: {weight: 25.5", None),
        ("  diverse:", "  other:", (10, 1)),
    ],
)
def test_a_running_experiment_does_not_change_who_gets_what(old, new, place):
    running = load(x=EXPERIMENT).traffic
    text = change(EXPERIMENT, old, new)
    if "25.5" in new:
        text = change(text, "strong:  {weight: 25", "strong:  {weight: 24.5")
        place = (10, 1)
    loaded = load(x=text, running=running)
    assert [one for one in codes(loaded) if one[0] != "W101"] == [("E008", *place)]
    assert loaded.experiments["x"].standing == "stale"
    assert loaded.traffic.experiments["x"] is running.experiments["x"]
    again = load(x=change(text, "feed_diversity/1", "feed_diversity/2"), running=running)
    assert again.experiments["x"].standing == "live"
    anyway = load(x=text + "allow_reassign: true\n", running=running)
    assert [code for code, _, _ in codes(anyway) if code != "W101"] == ["W103"]
    assert anyway.experiments["x"].standing == "live"
    for before, after in (("running", "draft"), ("draft", "running"), ("stopped", "running")):
        earlier = load(x=change(EXPERIMENT, "state: running", f"state: {before}")).traffic
        assert (
            load(x=change(text, "state: running", f"state: {after}"), running=earlier).experiments["x"].standing
            == "live"
        )


def test_order_of_arms_is_part_of_who_gets_what():
    lines = EXPERIMENT.splitlines(keepends=True)
    lines[11], lines[12] = lines[12], lines[11]
    loaded = load(x="".join(lines), running=load(x=EXPERIMENT).traffic)
    assert ("E008", 10, 1) in codes(loaded)


def test_what_may_change_while_it_runs():
    running = load(x=EXPERIMENT).traffic
    for old, new in [("spread: 0.8", "spread: 0.9"), ("about: does", "about: Does"), ("above: 35", "above: 36"),
                     ("state: running", "state: paused"), ("2026-11-05T00:00Z", "2026-11-04T00:00Z")]:  # fmt: skip
        loaded = load(x=change(EXPERIMENT, old, new), running=running)
        assert [code for code, _, _ in codes(loaded)] == ["W101"], (old, new)
        assert loaded.experiments["x"].standing == "live"


def test_less_coverage_is_a_warning():
    running = load(x=EXPERIMENT).traffic
    text = change(EXPERIMENT, "  - {from: 2026-11-05T00:00Z, coverage: 100%}\n", "")
    loaded = load(x=text, running=running)
    assert ("E009", 15, 12) in codes(loaded)
    assert loaded.experiments["x"].standing == "live"
    assert loaded.traffic.experiments["x"].coverage(NOW) == 100_000


def test_a_layer_keeps_its_salt_and_unit_while_something_runs_in_it():
    running = load(x=EXPERIMENT).traffic
    for old, new, place in [
        ("salt: ranking/1", "salt: ranking/2", (8, 19)),
        ("unit: user_id", "unit: device_id", (8, 3)),
    ]:
        loaded = load(change(TRAFFIC, old, new), x=EXPERIMENT, running=running)
        assert ("E008", *place) in codes(loaded, "traffic")
        assert loaded.traffic.layers[0].salt == "ranking/1"
        assert loaded.traffic.layers[0].unit == "user_id"
        assert loaded.experiments["x"].standing == "live"
    idle = load(x=change(EXPERIMENT, "state: running", "state: draft")).traffic
    assert codes(load(change(TRAFFIC, "salt: ranking/1", "salt: ranking/2"), running=idle)) == []


def test_a_bad_traffic_file_leaves_the_traffic_as_it_was_but_policies_move_on():
    running = load(x=EXPERIMENT).traffic
    narrower = {"feed_base": BASE.replace("widebeam: 1\n", "widebeam: 1\nwidths: [2, 2, 2]\n")}
    loaded = load("widebeam: 1\nkind: trafic\ndefault: feed_tuned\n", narrower, x=EXPERIMENT, running=running)
    assert loaded.default == "feed_base"
    assert loaded.traffic.default.widths == (2, 2, 2)
    assert loaded.traffic.holdout.plan.widths == (2, 2, 2)
    assert [layer.name for layer in loaded.traffic.layers] == ["ranking", "explore"]
    assert loaded.experiments["x"].standing == "live"


def test_an_experiment_with_a_bad_arm_goes_on_as_a_whole():
    """One arm's policy is edited badly, another's well, in the same save: nothing of the experiment is half new."""
    before = load(x=EXPERIMENT)
    good = {name: one.kept for name, one in before.policies.items()}
    edits = {
        "feed_base": BASE.replace("widebeam: 1\n", "widebeam: 1\nwidths: [2, 2, 2]\n"),
        "feed_tuned": "widebeam: [\n",
    }
    after = load(TRAFFIC, edits, x=EXPERIMENT, running=before.traffic, last_good=good)
    assert after.plan("feed_base").widths == (2, 2, 2)
    assert after.experiments["x"].standing == "stale"
    assert after.traffic.experiments["x"] is before.traffic.experiments["x"]
    pausing = load(TRAFFIC, edits, x=change(EXPERIMENT, "state: running", "state: paused"), running=before.traffic,
                   last_good=good)  # fmt: skip
    assert pausing.traffic.experiments["x"].state == "paused"
    first = load(TRAFFIC, edits, x=EXPERIMENT)
    assert first.experiments["x"].standing == "rejected"
    assert ("E002", 12, 33) in codes(first)


def test_a_server_that_starts_over_a_bad_file_shares_users_as_its_neighbours_do():
    """The last good text, kept on the disk, is what the others still run; what moved people while it was down is
    refused as it is while it runs."""
    good = {
        "experiments/x": Kept(
            "experiments/x", {"experiments/x": Source("policies/experiments/x.yaml", EXPERIMENT.encode())}
        )
    }
    hot = load(x=EXPERIMENT).traffic
    for text, codes_ in (
        ("widebeam: [", ["S002"]),
        (change(EXPERIMENT, "weight: 50", "weight: 49"), ["E001", "E008", "W101"]),
        (change(EXPERIMENT, "slots: [0, 2000]", "slots: [0, 3000]"), ["E008", "W101"]),
    ):
        cold = load(x=text, last_good=good)
        assert sorted(one.rule.code for one in cold.findings) == codes_
        assert cold.experiments["x"].standing == "stale"
        assert cold.traffic.id == load(x=text, running=hot).traffic.id == hot.id
    newcomer = load(a=other("[0, 10]"), x="widebeam: [", last_good=good)
    assert {name: one.standing for name, one in newcomer.experiments.items()} == {"a": "rejected", "x": "stale"}
    assert load(x=change(EXPERIMENT, "feed_diversity/1", "n/2"), last_good=good).experiments["x"].standing == "live"
    assert load(last_good=good).traffic.experiments == {}


def test_an_old_experiment_is_reported():
    loaded = load(x=EXPERIMENT, now=NOW + 80 * 86_400)
    assert ("W102", 15, 12) in codes(loaded)
    assert loaded.experiments["x"].standing == "live"


# ---- where ----------------------------------------------------------------------------------------------------------


def where(text):
    found = Findings(lambda _: ())
    made = compile_where(Scalar(text, Span("x.yaml", 1, 1, 2), "plain", ((1, 1),)), found)
    return made, [one.rule.code for one in found]


FACTS = Facts("u", "r", {"country": "BR", "app": "ios"}, {"age": 30.0, "zero": 0.0, "big": 1e30})


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ('ctx.country == "BR"', True),
        ('ctx.country != "BR"', False),
        ('"BR" == ctx.country', True),
        ("ctx.country == ctx.app", False),
        ('ctx.country in ["MX", "BR"] and not (ctx.app == "android")', True),
        ("user.age >= 30 and user.age < 31", True),
        ("user.age / 2 + 1 == 16", True),
        ("-user.age ** 2 == -900", True),
        ("where(user.age > 18, 1, 0) > 0", True),
        ("min(user.age, 5, 7) == 5 and max(user.age, 5) == 30 and clip(user.age, 0, 9) == 9", True),
        ("abs(0 - user.age) == 30 and sqrt(user.age + 6) == 6 and sigmoid(user.zero) == 0.5", True),
        ("exp(user.zero) == 1 and log(user.age) > 3", True),
        # what a request does not say, or what is no number, is never a yes
        ('ctx.shop == "x"', False),
        ('not (ctx.shop == "x")', False),
        ('ctx.country == "BR" or ctx.shop == "x"', False),
        ("user.height > 1", False),
        ("not (1 / user.zero > 0)", False),
        ("user.age > 18 or log(user.zero) > 0", False),
        ("not (user.big * user.big > 0)", False),
        ("not (sqrt(0 - user.age) > 0)", False),
    ],
)
def test_conditions_on_a_request(text, truth):
    made, found = where(text)
    assert found == []
    assert made.test(FACTS) is truth


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("1", "T005"), ("user.a", "T005"), ("ctx.a", "T011"), ('"a"', "T011"), ("trie", "T001"),
        ("seen and 1 > 0", "T001"),
        ('ctx.a < "b"', "T011"), ('user.a == "b"', "T011"), ('"a" == "b"', "T011"), ('user.a in ["x"]', "T011"),
        ("(user.a > 1) > 0", "T004"), ("token[1] > 0", "T003"), ("log() > 0", "T006"), ("attr.x > 0", "T001"),
        ("user.a.b > 0", "S015"), ("user.a if 1 else 2", "S015"), ("(lambda: 1)() > 0", "T007"), ("", "S010"),
    ],
)  # fmt: skip
def test_what_is_no_condition_is_refused(text, code):
    made, found = where(text)
    assert made is None
    assert found == [code]


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_condition_text_breaks_the_reader(text):
    made, found = where(text)
    assert (made is None) == bool(found)
    if made is not None:
        made.test(FACTS)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_edit_of_good_files_breaks_the_loader(data):
    """Random cuts, copies and insertions in an experiment: findings or a live experiment, never a crash, and what runs
    goes on unless the new text is good."""
    text = EXPERIMENT
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(at, min(len(text), at + 20)))
        text = (
            text[:at]
            + data.draw(st.sampled_from(["", " ", "\n", ":", "- ", "{", "[", "0", "%", "x", "é"]))
            + text[end:]
        )
    loaded = load(x=text, running=RUNNING)
    one = loaded.experiments["x"]
    errors = [each for each in one.findings if each.rule.severity == "error"]
    assert (one.standing == "live") == (not errors)
    assert "x" in loaded.traffic.experiments
    assert loaded.traffic.default is not None


def test_the_shipped_example_runs_when_it_is_renamed(tmp_path):
    shutil.copytree(SHIPPED, tmp_path / "policies")
    assert "wider" not in compile_folder(snapshot(tmp_path / "policies"), contract(), now=NOW).experiments
    example = tmp_path / "policies" / "experiments" / "_wider.yaml"
    example.rename(example.with_name("wider.yaml"))
    loaded = compile_folder(snapshot(tmp_path / "policies"), contract(), now=NOW)
    assert loaded.experiments["wider"] == ("live", ())
    assert loaded.default == "unseen"


RUNNING = load(x=EXPERIMENT).traffic
