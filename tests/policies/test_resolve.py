from __future__ import annotations

import pytest

from app.policies.resolve import Library, resolve
from app.policies.source import Source
from tests.policies.contracts import compiled, places, plan_of, sources

FATHER = """\
widebeam: 1
params:
  w: {value: 1, range: [0.5, 2]}
widths: [8, 16, 32]
steps:
  all: {score: parent + param.w * logp, mask: trie}
  first: {score: logp}
  last: {mask: trie and not seen}
final: {limit: 7}
"""


def phases(text: str, phase: str, **others: str) -> list[object]:
    return [step[phase] for step in plan_of(text, **others).resolved["steps"]]


def test_a_number_wins_over_first_and_last_and_these_over_all():
    steps = "all: {score: logp}, first: {score: 1 * logp}, last: {score: 2 * logp}, 3: {score: 3 * logp}"
    text = f"widebeam: 1\nsteps: {{{steps}}}\n"
    assert phases(text, "score") == ["1 * logp", "logp", "3 * logp"]


def test_a_child_overrides_phase_by_phase_and_keeps_what_is_more_specific_in_the_parent():
    child = "widebeam: 1\nextends: father\nsteps: {all: {score: parent + 2 * logp, mask: not seen}}\n"
    assert phases(child, "score", father=FATHER) == ["logp", "parent + 2 * logp", "parent + 2 * logp"]
    assert phases(child, "mask", father=FATHER) == ["not seen", "not seen", "trie and not seen"]
    plan = plan_of(child, father=FATHER)
    assert (plan.widths, plan.limit) == ((8, 16, 32), 7)


def test_none_removes_what_is_inherited():
    child = "widebeam: 1\nextends: father\nsteps: {last: {mask: none}, first: {score: none}}\nfinal: {limit: none}\n"
    assert phases(child, "mask", father=FATHER) == ["trie", "trie", None]
    assert phases(child, "score", father=FATHER) == [
        "parent + logp",
        "parent + param.w * logp",
        "parent + param.w * logp",
    ]
    assert plan_of(child, father=FATHER).limit == 32


def test_a_parameter_is_merged_field_by_field():
    child = "widebeam: 1\nextends: father\nparams: {w: {value: 2}}\n"
    assert plan_of(child, father=FATHER).params == (2.0,)
    assert places(compiled("widebeam: 1\nextends: father\nparams: {w: {value: 3}}\n", father=FATHER)[1]) == [
        ("S013", 3, 21)
    ]


def test_about_owner_and_abstract_are_not_inherited():
    assert plan_of("widebeam: 1\nextends: father\n", father="widebeam: 1\nabstract: true\nabout: x\n") is not None


@pytest.mark.parametrize(
    ("others", "circle"),
    [
        ({}, "feed -> feed"),
        ({"a": "widebeam: 1\nextends: feed\n"}, "feed -> a -> feed"),
        ({"a": "widebeam: 1\nextends: b\n", "b": "widebeam: 1\nextends: a\n"}, "a -> b -> a"),
    ],
)
def test_circles_are_found_and_shown(others, circle):
    plan, found = compiled(f"widebeam: 1\nextends: {'a' if others else 'feed'}\n", **others)
    assert plan is None
    assert [one.rule.code for one in found] == ["X001"]
    assert found.errors[0].message.endswith(circle)


def test_an_override_that_repeats_its_parent_is_a_warning_in_the_child_only():
    child = "widebeam: 1\nextends: father\nsteps: {all: {mask: (trie)}}\n"
    plan, found = compiled(child, father=FATHER)
    assert plan is not None
    assert places(found) == [("W003", 3, 21)]
    assert places(compiled("widebeam: 1\nextends: mid\n", mid=child, father=FATHER)[1]) == []


def test_each_value_remembers_where_it_came_from():
    library = Library(sources("widebeam: 1\nextends: father\nsteps:\n  all:\n    mask: not seen\n", father=FATHER))
    policy = resolve("feed", library, 3, library.findings())
    assert (policy.steps[0]["mask"].key, policy.steps[0]["mask"].span.file) == ("all", "policies/feed.yaml")
    assert (policy.steps[2]["mask"].key, policy.steps[2]["mask"].span.line) == ("last", 8)
    assert policy.steps[0]["select"].span is None
    assert policy.chain == ("feed", "father")


def test_a_file_is_read_once_however_many_policies_extend_it(monkeypatch):
    import app.policies.resolve as module

    read, reads = module.read, []
    monkeypatch.setattr(module, "read", lambda name, source, found: reads.append(name) or read(name, source, found))
    library = Library(
        {"base": Source("b", b"widebeam: 1\n"), **{n: Source(n, b"widebeam: 1\nextends: base\n") for n in "xyz"}}
    )
    for name in "xyz":
        resolve(name, library, 3, library.findings())
    assert sorted(reads) == ["base", "x", "y", "z"]
