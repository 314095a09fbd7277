"""Differences by meaning: comments and no-op overrides are none, everything that changes an answer is one."""

from __future__ import annotations

from app.policies.difference import Change, changes, folder_changes
from app.policies.load import Folder, compile_folder
from app.policies.source import Source
from tests.policies.contracts import BASE, contract, plan_of
from tests.policies.test_experiments import EXPERIMENT, NOW, TRAFFIC, change, load

RICH = """\
widebeam: 1
extends: base
params:
  weight: {value: 0.8, range: [0.1, 2]}
widths: [64, 128, 256]
steps:
  all:
    score: parent + param.weight * logp
  2:
    mask: trie and not seen
final:
  limit: 50
"""


def of(before, after):
    return [tuple(one) for one in changes(plan_of(before), plan_of(after))]


def test_what_changes_no_answer_is_no_difference():
    assert of(RICH, "# hello\n" + RICH.replace("extends: base\n", "extends: base\nabout: other words\n")) == []
    assert of(BASE, "widebeam: 1\nextends: base\n") == []


def test_each_value_is_named_by_its_place_and_neighbouring_steps_are_one_line():
    assert of(RICH, RICH.replace("0.8", "1.5").replace("64, 128", "32, 128").replace("limit: 50", "limit: 60")) == [
        ("widths", [64, 128, 256], [32, 128, 256]),
        ("param weight value", "0.8", "1.5"),
        ("final limit", 50, 60),
    ]
    assert of(BASE, RICH) == [
        ("widths", [256, 512, 512], [64, 128, 256]),
        ("final limit", 512, 50),
        ("param weight value", None, "0.8"),
        ("param weight range", None, ["0.1", "2"]),
        ("all steps score", "parent + logp", "parent + param.weight * logp"),
        ("step 2 mask", "trie", "trie and not seen"),
    ]
    pair = "widebeam: 1\nsteps:\n  1:\n    normalize: valid\n  2:\n    normalize: valid\n"
    assert of(BASE, pair) == [("steps 1-2 normalize", "full", "valid")]


def test_operators_are_compared_as_lines():
    one = "widebeam: 1\nsteps:\n  last:\n    keep:\n      - top_k(5)\n"
    assert of(BASE, one) == [("step 3 keep", None, ["top_k(5)"])]


def compiled(**texts):
    sources = {name: Source(f"policies/{name}.yaml", text.encode()) for name, text in texts.items()}
    return compile_folder(Folder(sources), contract())


def test_a_folder_says_what_became_of_each_policy():
    before = compiled(base=BASE, a=RICH, b=RICH, c=RICH, gone=BASE)
    after = compiled(
        base=BASE + "# a comment\n",
        a=RICH,
        b=RICH.replace("0.8", "1"),
        c="widebeam: 1\nstep: 1\n",
        new="widebeam: 1\nsteps:\n  last:\n    rank: score - 1.0 * step\n",
    )
    found = folder_changes(before, after, 0.0)
    assert {one.name: (one.what, one.compile) for one in found.policies} == {
        "base": ("edited", False),
        "a": ("same", False),
        "b": ("changed", False),
        "c": ("rejected", False),
        "gone": ("removed", False),
        "new": ("added", True),
    }
    [b] = [one for one in found.policies if one.name == "b"]
    assert b.changes == (Change("param weight value", "0.8", "1"),)
    assert b.before != b.after == after.plan("b").policy_id
    [users] = found.users
    assert (users.arm, users.policy) == (0, 0)


def test_experiments_and_traffic_are_compared_and_users_counted():
    before = load(feed_diversity=EXPERIMENT)
    after = load(
        change(TRAFFIC, "share: 2%", "share: 5%"),
        feed_diversity=change(EXPERIMENT, "slots: [0, 2000]", "slots: [0, 3000]"),
    )
    found = folder_changes(before, after, NOW)
    assert found.traffic == (Change("holdout share", "2%", "5%"),)
    assert [(one.name, one.what, one.changes) for one in found.experiments] == [
        ("feed_diversity", "changed", (Change("slots", [0, 2000], [0, 3000]),))
    ]
    surfaces = {one.surface: one for one in found.users}
    assert set(surfaces) == {None, "feed", "search"}
    assert abs(surfaces[None].arm - 0.03) < 1e-12
    covered = before.traffic.experiments["feed_diversity"].coverage(NOW) / 1e6
    assert abs(surfaces["feed"].arm - (0.03 + 0.95 * 0.1 * covered)) < 1e-9
    gone = folder_changes(before, load(), NOW)
    assert [(one.name, one.what) for one in gone.experiments] == [("feed_diversity", "removed")]


def test_a_folder_without_a_default_has_no_users_and_says_so():
    before, after = compiled(base=BASE), compiled(base="widebeam: 1\nstep: 1\n")
    found = folder_changes(before, after, 0.0)
    assert found.users == ()
    assert found.notes == ("without a default policy there is nothing to compare",)
