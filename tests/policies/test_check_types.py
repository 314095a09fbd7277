from __future__ import annotations

import pytest

from app.policies.facts import Catalogue, Column
from tests.policies.contracts import compiled


def faults(phase: str, text: str) -> list[tuple[str, str]]:
    """(code, the marked text) of every finding of an expression."""
    params = "params:\n  pos: {value: 1, range: [0.1, 2]}\n  any: {value: 1, range: [-1, 2]}\n"
    line = f"    {phase}: {text}"
    plan, found = compiled(f"widebeam: 1\n{params}steps:\n  all:\n{line}\n")
    assert (plan is None) == bool(found.errors)
    rows = [one for one in found if one.rule.severity == "error"]
    return [(one.rule.code, line[one.span.col - 1 : one.span.end - 1]) for one in rows]


@pytest.mark.parametrize(
    ("phase", "text", "expected"),
    [
        ("score", "parent + logp", []),
        ("score", "parnt + logp", [("T001", "parnt")]),
        ("score", "score + logp", [("T003", "score")]),
        ("score", "logit", [("T003", "logit")]),
        ("mask", "trie and logp > 1", [("T003", "logp")]),
        ("rank", "trie", [("T003", "trie")]),
        ("rank", "score + seen", [("T004", "seen")]),
        ("rank", "score - not seen", [("S014", "not")]),
        ("rank", "-(seen)", [("T004", "seen")]),
        ("mask", "trie and 1", [("T005", "1")]),
        ("mask", "step", [("T005", "step")]),
        ("mask", "not (step + 1)", [("T005", "step + 1")]),
        ("mask", "trie == seen", [("T004", "trie"), ("T004", "seen")]),
        ("rank", "where(score, 1, 2)", [("T005", "score")]),
        ("rank", "where(seen, 1)", [("T006", "where(seen, 1)")]),
        ("rank", "min(score)", [("T006", "min(score)")]),
        ("rank", "log(score, 2)", [("T006", "log(score, 2)")]),
        ("rank", "logg(score)", [("T007", "logg")]),
        ("rank", "score / 0", [("T008", "0")]),
        ("rank", "score / (1 - 1)", [("T008", "1 - 1")]),
        ("rank", "score / param.any", [("T008", "param.any")]),
        ("rank", "score / (param.any + 2)", []),
        ("rank", "score / param.pos", []),
        ("rank", "score / -param.pos", []),
        ("rank", "score / (param.pos * param.any)", [("T008", "param.pos * param.any")]),
        ("rank", "score ** score", [("T009", "score")]),
        ("rank", "score ** -2", []),
        ("rank", "score ** param.pos", [("T009", "param.pos")]),
        ("rank", "score + param.poss", [("T001", "poss")]),
        ("rank", "score + pram.pos", [("T001", "pram")]),
        ("rank", "score + blocked.ads", [("T003", "blocked.ads")]),
        ("rank", 'score + "a"', [("T011", '"a"')]),
        ("mask", 'trie and step == "a"', [("T011", '"a"')]),
        ("rank", "token[1]", [("T003", "token[1]")]),
        ("rank", "foo + bar * baz(qux)", [("T001", "foo"), ("T001", "bar"), ("T007", "baz")]),
    ],
)
def test_each_fault_is_marked_where_it_stands(phase, text, expected):
    assert faults(phase, text) == expected


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("sid()", None),
        ("sid(2)", None),
        ("sid(max_items=1000)", None),
        ("sid(max_items=1001)", "T013"),
        ("sid(max_items=1.5)", "T013"),
        ("sid(max_items=-1)", "T013"),
        ("sid(max_items=seen)", "T013"),
        ("sid(2, max_items=2)", "T012"),
        ("sid(1, 2, 3)", "T012"),
        ("sid(min=1)", "T012"),
        ("top()", "P002"),
        ("sidd()", "P001"),
    ],
)
def test_arguments_of_operators_are_checked(call, code):
    _, found = compiled(f"widebeam: 1\nfinal:\n  expand: {call}\n")
    codes = {one.rule.code for one in found.errors}
    assert code in codes if code else codes == set()


@pytest.mark.parametrize(
    ("by", "code"),
    [
        ("item.quality", None),
        ("item.qualty", "T002"),
        ("item.genre", "T013"),
        ("item.flag", "T013"),
        ("item.id", "T013"),
        ("attr.quality", "T013"),
        ("3", "T013"),
        ("score", "T013"),
    ],
)
def test_items_of_an_sid_are_ordered_by_a_number_of_theirs(by, code):
    columns = (
        Column("item", "quality"),
        Column("attr", "quality"),
        Column("item", "genre", "text", labels=("a",)),
        Column("item", "flag", "condition"),
    )
    plan, found = compiled(
        f"widebeam: 1\nfinal:\n  expand: sid(max_items=2, by={by})\n", catalogue=Catalogue((64, 64, 64), columns)
    )
    assert {one.rule.code for one in found.errors} == ({code} if code else set()), found.text()
    assert (plan is None) == (code is not None)
    assert plan is None or (plan.by, plan.per_sid) == ("item.quality", 2)


def test_lists_are_read_in_the_final_phases_and_boosted_ones_are_groups():
    columns = (Column("blocked", "ads", "condition"), Column("boosted", "ads", "condition"))
    text = (
        "widebeam: 1\nsteps: {all: {quota: ['floor(boosted.ads, min=2)']}}\n"
        "final: {mask: not blocked.ads, score: 'score + where(boosted.ads, 1, 0)'}\n"
    )
    plan, found = compiled(text, catalogue=Catalogue((64, 64, 64), columns))
    assert plan is not None, found.text()
    assert plan.final.uses == {"blocked.ads", "boosted.ads"}
    _, found = compiled(text.replace("floor(boosted", "floor(blocked"), catalogue=Catalogue((64, 64, 64), columns))
    assert [one.rule.code for one in found.errors] == ["T013"]


def test_a_broken_parameter_stays_in_scope_so_that_its_uses_are_not_faults():
    text = "widebeam: 1\nparams: {x: {value: oops, range: [0, 1]}}\nsteps: {all: {score: parent + param.x * logp}}\n"
    assert [one.rule.code for one in compiled(text)[1]] == ["S011"]


def test_an_unused_parameter_of_the_parent_is_not_the_childs_fault():
    parent = "widebeam: 1\nabstract: true\nparams: {x: {value: 1, range: [0, 1]}}\n"
    assert len(compiled("widebeam: 1\nextends: father\n", father=parent)[1]) == 0
