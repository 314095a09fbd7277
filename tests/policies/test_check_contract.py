from __future__ import annotations

import itertools

import pytest

from app.policies.check_contract import Catalogue, planned, truth
from app.policies.compile import compile_policy
from app.policies.diagnostics import Findings, Span
from app.policies.parse import parse_expression
from app.policies.source import Scalar
from tests.policies.contracts import compiled, contract, places, sources


def test_planned_rows_follow_width_candidates_and_catalogue():
    assert planned((128, 256, 512), (64, 64, 64), (None, None, None)) == (64, 256, 512)
    assert planned((128, 256, 512), (64, 64, 64), (10, 200, 300)) == (10, 200, 300)
    assert planned((1, 7, 512), (4, 4, 4), (None, None, None)) == (1, 4, 16)


def test_the_catalogue_bounds_a_step_only_while_every_step_is_confined_to_it():
    def notes(mask: str) -> list[str]:
        text = f"widebeam: 1\nwidths: [8, 64, 64]\nsteps: {{2: {{mask: {mask}}}}}\n"
        found = compile_policy("feed", sources(text), contract((8, 8, 8), (64, 64, 64)), Catalogue((8, 20, 30)))[1]
        return [one.message for one in found if one.rule.code == "K004"]

    assert notes("trie and not seen") == [
        "width 64 of step 2 is above what the step can hold, 20 (20 prefixes in the catalogue)",
        "width 64 of step 3 is above what the step can hold, 30 (30 prefixes in the catalogue)",
    ]
    assert notes("none") == []


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("widths: [256, 512]", [("K002", 2, 9)]),
        ("widths: [256, 512, 512, 512]", [("K002", 2, 9)]),
        ("widths: [257, 513, 512]", [("K003", 2, 10), ("K003", 2, 15)]),
        ("widths: [65, 512, 512]", [("K004", 2, 10)]),
        ("widths: [64, 512, 512]", []),
    ],
)
def test_widths_are_held_against_the_contract(text, codes):
    assert places(compiled(f"widebeam: 1\n{text}\n")[1]) == codes


def condition(text: str):
    return parse_expression(Scalar(text, Span("x", 1, 1, 2), "plain", ((1, 1),)), Findings(lambda _: ()))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("trie", None),
        ("trie and not trie", False),
        ("seen or not seen", True),
        ("step == 2", True),
        ("not step < 5", False),
        ("trie and step > 2", False),
        ("trie or 1 < 2", True),
        ("trie and 1 < 2", None),
        ("param.x > 0", None),
    ],
)
def test_constant_conditions_are_known(text, value):
    assert truth(condition(text), 2) is value


def test_truth_never_contradicts_the_truth_table():
    names = ("trie", "seen")
    texts = ["trie", "seen", "not trie", "not seen", "step == 2", "step == 3"]
    for a, b, c in itertools.product(texts, repeat=3):
        for text in (
            f"{a} and {b} and {c}",
            f"{a} or {b} or {c}",
            f"({a} or {b}) and {c}",
            f"not ({a} and {b}) or {c}",
        ):
            known = truth(condition(text), 2)
            table = [
                eval(text, {}, {"step": 2, **dict(zip(names, values, strict=True))})
                for values in itertools.product([True, False], repeat=2)
            ]
            assert known is None or set(table) == {known}, text
