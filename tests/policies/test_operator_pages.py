from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.policies.builtin import BUILT_IN
from app.policies.operator_pages import describe, overview, reference

PAGE = Path(__file__).parents[2] / "docs" / "policies" / "operators.md"


def test_the_page_of_the_documentation_is_what_the_declarations_say():
    assert PAGE.read_text("utf-8") == reference(BUILT_IN)


@pytest.mark.parametrize("operator", list(BUILT_IN), ids=lambda one: one.name)
def test_each_operator_is_described_with_its_ranges(operator):
    text = describe(operator)
    assert text.splitlines()[0].startswith(operator.name + "(")
    assert operator.about in text
    for arg in operator.args:
        if arg.form in ("int", "number") and arg.low < arg.high:
            assert f"  {arg.name}: " in text


def test_an_argument_that_can_only_have_one_value_is_shown_nowhere():
    assert BUILT_IN["diverse"].signature == "diverse(groups, penalty)"
    assert "history" not in describe(BUILT_IN["diverse"])


def test_the_overview_has_what_can_be_used_with_whose_it_is_and_what_cannot_with_the_reason():
    own = replace(BUILT_IN["top_p"], name="mine", source="some-package")
    operators = replace(BUILT_IN, known={**BUILT_IN.known, "mine": own}, broken={"theirs": "it is broken"})
    lines = overview(operators).splitlines()
    assert [line for line in lines if "some-package" in line] == [
        f"keep     {'mine(p)':<36} {own.about}  [some-package]"
    ]
    assert lines[-1].split() == ["-", "theirs", "cannot", "be", "used:", "it", "is", "broken"]
    assert not any("dpp" in line for line in lines)
