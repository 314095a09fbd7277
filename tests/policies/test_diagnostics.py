from __future__ import annotations

import pytest

from app.policies.diagnostics import CROP, Findings, Span, listing, suggest


def findings(line: str) -> Findings:
    return Findings(lambda _: [line])


def shown(line: str, col: int, end: int, hint: str = "") -> list[str]:
    found = findings(line)
    found.add("T001", Span("f.yaml", 1, col, end), "unknown name `x`", hint)
    return found.text().split("\n")


def test_a_finding_shows_place_line_caret_and_help():
    assert shown("score: parent + logpp", 17, 22, "did you mean `logp`?") == [
        "f.yaml:1:17: error T001: unknown name `x`",
        "     1 | score: parent + logpp",
        "       |                 ^^^^^",
        "  help: did you mean `logp`?",
    ]


def test_carets_stand_under_wide_and_combining_characters():
    assert shown("x: 漢字 é bad", 9, 12)[2] == "       | " + " " * 10 + "^^^"
    assert shown("x: e\u0301 bad", 7, 10)[2] == "       | " + " " * 5 + "^^^"


def test_control_characters_are_not_sent_to_the_terminal():
    assert shown("a\x1b[31m\tb", 1, 2)[1] == "     1 | a [31m b"


@pytest.mark.parametrize("col", [1, 60, 150, 299])
def test_long_lines_are_cropped_round_the_place(col):
    line = "".join(chr(ord("a") + at % 26) for at in range(300))
    _, text, caret = shown(line, col, col + 1)
    assert len(text) <= CROP + 11
    assert text[caret.index("^")] == line[col - 1]


def test_findings_are_sorted_by_place_and_count_once():
    found = findings("abc")
    for col in (3, 1, 2, 1):
        found.add("T001", Span("f", 1, col, col + 1), "m")
    found.add("W004", Span("f", 1, 1, 2), "w")
    assert [(one.rule.code, one.span.col) for one in found] == [("T001", 1), ("W004", 1), ("T001", 2), ("T001", 3)]
    assert len(found) == 4
    assert [one.rule.code for one in found.errors] == ["T001"] * 3


def test_the_data_of_a_finding_has_the_fields_that_editors_use():
    found = findings("abc")
    found.add("W004", Span("f", 1, 1, 3), "m", "h")
    assert found.data() == [
        {
            "file": "f",
            "line": 1,
            "col": 1,
            "end_col": 3,
            "code": "W004",
            "severity": "warning",
            "message": "m",
            "help": "h",
            "source": "abc",
        }
    ]


def test_a_place_without_a_line_shows_none():
    found = Findings(lambda _: [])
    found.add("S010", Span("f", 1, 1, 2), "the file is empty")
    assert found.text() == "f:1:1: error S010: the file is empty"


def test_suggestions_are_close_or_absent():
    assert suggest("logpp", ["logp", "prob"]) == "did you mean `logp`?"
    assert suggest("zzz", ["logp"]) == ""
    assert listing(["a", "b"]) == "`a`, `b`"
