from __future__ import annotations

import pytest

from app.policies.diagnostics import Findings, Span
from app.policies.source import Scalar
from app.policies.values import Values


def scalar(text: str, style: str = "plain") -> Scalar:
    return Scalar(text, Span("f", 1, 1, 2), style, ((1, 1),))


@pytest.mark.parametrize(
    ("text", "value"),
    [("64", 64), ("0", 0), ("-3", None), ("010", None), ("1e3", None), ("1.0", None), ("+1", None), ("1_0", None),
     ("0x1", None), ("", None), ("9" * 40, None), ("١", None)],
)  # fmt: skip
def test_whole_numbers_are_decimal_digits(text, value):
    found = Findings(lambda _: ())
    got = Values(found).integer(scalar(text), "x")
    assert (got.value if got else None) == value
    assert bool(found.errors) == (value is None)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.5", 0.5), ("-3", -3.0), ("1e-6", 1e-6), ("2E+3", 2000.0), (".5", None), ("5.", None), ("1e", None),
     ("nan", None), (".inf", None), ("1e31", None), ("1e999", None), ("-1e999", None), ("0x1p3", None), ("00.5", None)],
)  # fmt: skip
def test_numbers_are_finite_decimals(text, value):
    found = Findings(lambda _: ())
    got = Values(found).decimal(scalar(text), "x")
    assert (got.value if got else None) == value
    assert bool(found.errors) == (value is None)


def test_quoted_numbers_and_words_are_text():
    found = Findings(lambda _: ())
    values = Values(found)
    assert values.integer(scalar("64", "quoted"), "widths") is None
    assert values.choice((scalar("k"), scalar("true", "quoted")), ("true", "false")) is None
    assert [one.rule.code for one in found] == ["S011", "S011"]
