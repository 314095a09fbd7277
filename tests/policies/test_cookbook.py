"""The cookbook compiles on a deployment that declares what it reads, and every plan proves itself (C101)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from app.core import HeadSpec
from app.policies.compile import compile_policy
from app.policies.facts import Catalogue, Column
from app.policies.format import fmt
from app.policies.source import Source
from tests.policies.contracts import contract

FOLDER = Path(__file__).parents[2] / "docs" / "policies" / "cookbook"
FILES = sorted(FOLDER.glob("*.yaml"))
HEADS = (HeadSpec("cf", "code"), HeadSpec("ctr", "code"), HeadSpec("value", "code"))
ON = replace(contract((64, 64, 64), (512, 512, 512)), heads=HEADS)
CATALOGUE = Catalogue(
    (64, 4000, 200_000),
    (
        Column("prior", "popularity", low=-20, high=0),
        Column("attr", "fresh", low=0, high=1),
        Column("attr", "any_fresh", "condition"),
        Column("attr", "category", "text", labels=("drama", "comedy", "crime")),
        Column("attr", "cold", "condition"),
        Column("blocked", "ads", "condition"),
        Column("item", "author", "text", labels=tuple(f"a{at}" for at in range(50))),
        Column("item", "stock"),
        Column("item", "fresh", low=0, high=1),
        Column("item", "cold", "condition"),
    ),
)
FIRST_VERSION = {
    1,
    2,
    4,
    5,
    6,
    8,
    9,
    10,
    11,
    *range(12, 21),
    *range(22, 26),
    27,
    *range(29, 34),
    *range(37, 44),
    45,
    46,
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_recipe_compiles_without_a_word_but_notes(path):
    source = Source(path.name, path.read_bytes())
    plan, found = compile_policy(path.stem, {path.stem: source}, ON, CATALOGUE)
    assert plan is not None, found.text()
    assert [one.message for one in found if one.rule.severity != "note"] == []
    assert fmt(source) == path.read_text()


def test_the_variants_of_the_first_version_are_there():
    numbers = {int(number) for path in FILES for number in re.findall(r"^v(\d+)", path.stem)}
    assert numbers == FIRST_VERSION


def test_recipes_of_different_structures_have_different_ids_and_share_where_only_numbers_differ():
    plans = {
        path.stem: compile_policy(path.stem, {path.stem: Source(path.name, path.read_bytes())}, ON, CATALOGUE)[0]
        for path in FILES
    }
    assert len({plan.policy_id for plan in plans.values()}) == len(plans)
    assert plans["v02_progressive"].structure.id == plans["v22_catalogue"].structure.id
