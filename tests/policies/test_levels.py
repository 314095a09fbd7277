"""`load:` of a policy: read, merged, checked at each level, and shown."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.policies.assign import overlay
from app.policies.difference import changes
from app.policies.explain import explain, explain_text
from app.policies.format import fmt
from app.policies.resolve import Library, resolve
from app.policies.schema import schema
from app.policies.source import Source
from tests.policies.contracts import compiled, contract, places, plan_of, sources

HEAD = "widebeam: 1\nwidths: [64, 256, 512]\n"
LOAD = "load:\n  busy: {widths: [32, 96, 192]}\n  quiet: {widths: [64, 512, 512]}\n"


def levels_of(text, **others):
    plan = plan_of(text, **others)
    return plan.widths, {level: one.widths for level, one in plan.levels.items()}


def test_a_level_is_another_row_of_widths_of_the_same_structure():
    plan = plan_of(HEAD + LOAD)
    assert plan.at("busy").widths == (32, 96, 192)
    assert plan.at("quiet").widths == (64, 512, 512)
    assert plan.at("normal") is plan
    assert (plan.limit, plan.at("busy").limit, plan.at("quiet").limit) == (512, 192, 512)
    for level in ("busy", "quiet"):
        one = plan.at(level)
        assert one.structure is plan.structure
        assert (one.policy_id, one.plan_id, one.params) == (plan.policy_id, plan.plan_id, plan.params)
        assert one.levels == {}


def test_a_level_that_is_not_given_has_the_policys_own_widths():
    plan = plan_of(HEAD + "load: {busy: {widths: [32, 96, 192]}}\n")
    assert plan.at("quiet") is plan
    bare = plan_of("widebeam: 1\nload: {busy: {widths: [32, 96, 192]}}\n")
    assert (bare.widths, bare.at("busy").widths) == (contract().widths, (32, 96, 192))


def test_levels_merge_by_name_and_none_takes_one_back():
    mother = HEAD + LOAD
    child = "widebeam: 1\nextends: mother\n"
    whole = {"busy": (32, 96, 192), "quiet": (64, 512, 512)}
    assert levels_of(child, mother=mother) == ((64, 256, 512), whole)
    other = levels_of(child + "load: {busy: {widths: [8, 16, 24]}}\n", mother=mother)[1]
    assert other == {**whole, "busy": (8, 16, 24)}
    assert levels_of(child + "load: {busy: none}\n", mother=mother)[1] == {"quiet": (64, 512, 512)}
    back = "widebeam: 1\nextends: other\nload: {busy: {widths: [1, 2, 3]}}\n"
    taken = child + "load: {busy: none}\n"
    assert levels_of(back, other=taken, mother=mother)[1]["busy"] == (1, 2, 3)


def test_a_policy_without_levels_keeps_its_id_and_each_level_changes_it():
    ids = [
        plan_of(HEAD + text).policy_id
        for text in (
            "",
            LOAD,
            "load: {busy: {widths: [32, 96, 192]}}\n",
            "load: {busy: {widths: [32, 96, 193]}}\n",
            "load: {quiet: {widths: [32, 96, 192]}}\n",
        )
    ]
    assert len(set(ids)) == len(ids)
    assert "load" not in plan_of(HEAD).resolved
    assert plan_of(HEAD + LOAD).resolved["load"] == {"busy": [32, 96, 192], "quiet": [64, 512, 512]}
    assert plan_of(HEAD + "# a comment\n" + LOAD).policy_id == ids[1]


@pytest.mark.parametrize(
    ("load", "found"),
    [
        ("  busi: {widths: [1, 2, 3]}\n", [("S007", 4, 3)]),
        ("  normal: {widths: [1, 2, 3]}\n", [("S007", 4, 3)]),
        ("  busy: {}\n", [("S010", 4, 3)]),
        ("  busy: {width: [1, 2, 3]}\n", [("S009", 4, 3), ("S007", 4, 10)]),
        ("  busy: [1, 2, 3]\n", [("S008", 4, 9)]),
        ("  busy:\n", [("S010", 4, 3)]),
        ("  busy: {widths: [1, 2]}\n", [("K002", 4, 18)]),
        ("  busy: {widths: [1, 2, 513]}\n", [("K003", 4, 25)]),
        ("  busy: {widths: [1, 0, 3]}\n", [("S011", 4, 22)]),
        ("  busy: {widths: [1, 2.5, 3]}\n", [("S011", 4, 22)]),
        ("  busy: {widths: [128, 2, 3]}\n", [("K004", 4, 19)]),
        ("  busy: {widths: [64, 256, 512]}\n", [("W002", 4, 18)]),
        ("  busy: {widths: [1, 2, 3]}\n  busy: {widths: [1, 2, 3]}\n", [("S003", 5, 3)]),
    ],
)
def test_what_is_wrong_with_a_level_is_said_with_its_place(load, found):
    assert places(compiled(HEAD + "load:\n" + load)[1]) == found


def test_a_word_that_is_no_level_gets_a_suggestion():
    _, found = compiled(HEAD + "load: {busi: {widths: [1, 2, 3]}, normal: {widths: [1, 2, 3]}, busy: {width: 3}}\n")
    assert [one.help for one in found if one.rule.code != "S007" or "level" in one.message] == [
        "did you mean `busy`?",
        "`normal` is the policy's own `widths`",
        "write `{widths: [64, 128, 256]}`",
    ]


def test_operators_are_checked_at_every_level_and_one_finding_a_place_is_enough():
    groups = HEAD + LOAD.replace("96", "90") + "steps: {all: {select: 'diverse(groups=4, penalty=0.4)'}}\n"
    _, found = compiled(groups)
    assert [(one.rule.code, one.span.line, one.message) for one in found] == [
        ("K005", 6, "4 groups do not divide width 90 of step 2 under load busy")
    ]
    floor = HEAD + LOAD + "steps: {3: {quota: ['floor(token[1], min=4)']}}\n"
    assert [(one.rule.code, one.message) for one in compiled(floor)[1]] == [
        ("K008", "floors of 256 are above the width 192 of step 3 under load busy")
    ]
    capped = HEAD + LOAD + "steps: {3: {quota: ['cap(token[1], max=7)']}}\n"
    _, found = compiled(capped)
    assert [one.rule.code for one in found] == ["K006"]
    assert "under load" not in found.text()  # 64 x 7 = 448 is short of the policy's own 512
    quiet = "widebeam: 1\nwidths: [64, 96, 192]\nload: {quiet: {widths: [64, 512, 512]}}\n"
    _, found = compiled(quiet + "steps: {3: {quota: ['cap(token[1], max=7)']}}\n")
    assert [one.message for one in found] == [
        "64 groups of at most 7 hold fewer than the 512 survivors of step 3 under load quiet"
    ]


def test_what_has_an_effect_at_one_level_has_one():
    """A cap that a narrow level never reaches is idle there alone."""
    caps = "steps: {2: {quota: ['cap(parent, max=50)']}}\n"
    narrow = "widebeam: 1\nwidths: [32, 48, 64]\n"
    assert [one.rule.code for one in compiled(narrow + caps)[1]] == ["W002"]
    assert len(compiled(narrow + "load: {quiet: {widths: [32, 256, 256]}}\n" + caps)[1]) == 0


def test_an_arms_parameters_reach_the_plans_of_all_levels():
    text = HEAD + LOAD + "params: {w: {value: 1, range: [0.5, 2]}}\nsteps: {all: {score: 'parent + param.w * logp'}}\n"
    plan = plan_of(text)
    arm = overlay(plan, {"w": 1.5})
    assert {arm.at(level).params for level in ("quiet", "normal", "busy")} == {(1.5,)}
    assert {arm.at(level).policy_id for level in ("quiet", "normal", "busy")} == {arm.policy_id}
    assert arm.policy_id != plan.policy_id
    assert arm.at("busy").widths == (32, 96, 192)


def test_explain_names_each_level_and_where_it_comes_from():
    texts = sources("widebeam: 1\nextends: mother\nload: {busy: {widths: [8, 16, 24]}}\n", mother=HEAD + LOAD)
    library, on = Library(texts), contract()
    policy = resolve("feed", library, 3, library.findings())
    plan = plan_of("widebeam: 1\nextends: mother\nload: {busy: {widths: [8, 16, 24]}}\n", mother=HEAD + LOAD)
    document = explain(policy, plan, on)
    assert document["load"] == {
        "busy": {"widths": [8, 16, 24], "planned": [8, 16, 24], "limit": 24, "from": "policies/feed.yaml:3"},
        "quiet": {"widths": [64, 512, 512], "planned": [64, 512, 512], "limit": 512, "from": "policies/mother.yaml:5"},
    }
    shown = explain_text(policy, plan, on)
    assert "  load busy: widths [8, 16, 24], planned [8, 16, 24], limit 24 <- policies/feed.yaml:3\n" in shown
    assert json.dumps(document)


def test_a_difference_names_the_level():
    before, after = plan_of(HEAD + LOAD), plan_of(HEAD + LOAD.replace("[32, 96, 192]", "[16, 48, 96]"))
    assert [tuple(one) for one in changes(before, after)] == [("load busy widths", [32, 96, 192], [16, 48, 96])]
    assert [one.place for one in changes(plan_of(HEAD), before)] == ["load busy widths", "load quiet widths"]


def test_editors_know_the_levels():
    load = schema()["properties"]["load"]
    assert load["properties"].keys() == {"busy", "quiet"}
    assert load["additionalProperties"] is False


def test_levels_are_formatted_as_they_stand():
    source = Source("feed.yaml", (HEAD + LOAD + "steps: {all: {score: parent+logp}}\n").encode())
    assert fmt(source) == HEAD + LOAD + "steps: {all: {score: parent + logp}}\n"


WIDTHS = st.lists(st.integers(1, 256), min_size=3, max_size=3)


@settings(deadline=None, max_examples=40)
@given(WIDTHS, st.none() | WIDTHS, st.none() | WIDTHS)
def test_every_level_is_the_plan_of_its_widths_written_plainly(own, busy, quiet):
    given_levels = {"busy": busy, "quiet": quiet}
    load = "".join(f"  {level}: {{widths: {widths}}}\n" for level, widths in given_levels.items() if widths)
    plan = plan_of(f"widebeam: 1\nwidths: {own}\n" + (f"load:\n{load}" if load else ""))
    for level, widths in {"normal": own, **given_levels}.items():
        plain = plan_of(f"widebeam: 1\nwidths: {widths or own}\n")
        one = plan.at(level)
        assert (one.widths, one.limit, one.structure.id) == (plain.widths, plain.limit, plain.structure.id)
