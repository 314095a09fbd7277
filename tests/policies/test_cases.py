"""Test files: what they mean, and what is refused where."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core import HistoryIds, TokenIds
from app.policies.cases import Asked, RequestCase, StepCase, read_cases
from app.policies.diagnostics import Findings
from app.policies.source import Source

HEAD = "widebeam: 1\nkind: tests\ntests:\n"
STEP = HEAD + (
    "  one:\n    policy: base\n    step: 2\n    width: 3\n    seed: 7\n    params: {w: 0.5}\n"
    "    columns: {user.age: 31}\n"
    "    parents:\n"
    "      - {score: -1, prefix: [4], logits: {0: 2, 5: -1e-3}, seen: [5], carry: 1}\n"
    "      - {prefix: [9], logits: [1, 0], trie: [0], exclude: [1], "
    "columns: {attr.cold: {0: true}, attr.genre: drama}}\n"
    "    expect:\n      survivors: [[0, 5], [1, 0]]\n      scores: [-1.5, -2]\n"
)
REQUEST = HEAD + (
    '  two:\n    policy: base\n    request: {history: ["007", 7], k: 5, exclude: [a], '
    "ctx: {c: BR}, user: {age: 31}, seed: 3}\n"
    "    expect: {items: none, first: [a], present: [b], absent: [c], least: 2, status: ok}\n"
)


def read(text):
    source = Source("policies/tests/t.yaml", text.encode())
    found = Findings(lambda _: source.lines())
    return read_cases(source, found), [(one.rule.code, one.span.line, one.span.col) for one in found]


def test_a_step_case_holds_what_is_written():
    [case], found = read(STEP)
    assert found == []
    assert isinstance(case, StepCase)
    one, two = case.parents
    assert (case.name, case.policy.value, case.step.value, case.width, case.seed) == ("one", "base", 2, 3, 7)
    assert (one.score, one.prefix, one.logits, one.trie, one.carry) == (-1, (4,), {0: 2, 5: -0.001}, {0, 5}, 1)
    assert (two.logits, two.trie, two.exclude, two.seen) == ({0: 1, 1: 0}, {0}, {1}, frozenset())
    assert two.columns == {"attr.cold": {0: True}, "attr.genre": "drama"}
    assert (case.columns, case.params["w"].value) == ({"user.age": 31}, 0.5)
    assert case.survivors.value == ((0, 5), (1, 0))
    assert (case.survivors.span.line, case.survivors.span.col) == (15, 18)
    assert case.scores.value == (-1.5, -2)


def test_a_request_case_holds_what_is_written():
    [case], found = read(REQUEST)
    assert found == []
    assert isinstance(case, RequestCase)
    assert case.asked == Asked(HistoryIds(("007", "7")), 5, ("a",), {"c": "BR"}, {"age": 31}, 3)
    assert [one.value for one in (case.items, case.first, case.present, case.absent)] == [(), ("a",), ("b",), ("c",)]
    assert (case.least.value, case.status.value) == (2, "ok")
    [tokens], _ = read(REQUEST.replace('history: ["007", 7]', "tokens: [1, 2]"))
    assert tokens.asked.context == TokenIds((1, 2))
    [record], _ = read(HEAD + "  r:\n    policy: base\n    record: log.jsonl#r-1\n    expect: {least: 1}\n")
    assert (record.record.value, record.asked) == ("log.jsonl#r-1", None)


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("", [("S010", 1, 1)]),
        ("widebeam: 1\nkind: tests\n", [("S009", 1, 1)]),
        (STEP.replace("kind: tests", "kind: test"), [("S011", 2, 7)]),
        (STEP.replace("step: 2", "step: two"), [("S011", 6, 11)]),
        (STEP.replace("width", "widht"), [("S007", 7, 5)]),
        (STEP.replace("    step: 2\n", ""), [("S009", 4, 3)]),
        (STEP.replace("logits: [1, 0], ", ""), [("S009", 13, 9)]),
        (STEP.replace("5: -1e-3", "five: 1"), [("S011", 12, 49)]),
        (STEP.replace("[1, 0]]", "[1]]"), [("S008", 15, 27)]),
        (STEP.replace("survivors: [[0, 5], [1, 0]]\n      ", ""), [("S009", 14, 5)]),
        (REQUEST.replace("    request:", "    step: 1\n    request:"), [("S007", 6, 5)]),
        (REQUEST.replace("status: ok", "status: fine"), [("S011", 7, 84)]),
        (REQUEST.replace("k: 5, ", ""), [("S009", 6, 5)]),
        (HEAD + "  r:\n    policy: base\n    expect: {least: 1}\n", [("S009", 4, 3)]),
        (HEAD + "  r:\n    policy: base\n    record: log.jsonl\n    expect: {least: 1}\n", [("S011", 6, 13)]),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text, codes):
    cases, found = read(text)
    assert found == codes
    assert not any(isinstance(case, StepCase) for case in cases) or "kind: test\n" in text


def test_a_bad_test_leaves_the_others():
    both = STEP + REQUEST.removeprefix(HEAD)
    cases, found = read(both.replace("step: 2", "step: two"))
    assert [case.name for case in cases] == ["two"]
    assert len(found) == 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_edit_of_a_file_is_a_crash(data):
    text = data.draw(st.sampled_from([STEP, REQUEST]))
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, min(len(text), at + 12)))
    new = data.draw(st.text(alphabet="abk:{}[],-#\n '\"019.e!&*|", max_size=6))
    read(text[:at] + new + text[end:])
