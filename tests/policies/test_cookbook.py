"""The cookbook compiles on the demo, but for what its model has not; every plan proves itself (C101)."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from app.cli.policy_files import deployed
from app.core import HeadSpec
from app.policies.compile import compile_policy
from app.policies.format import fmt
from app.policies.load import compile_folder, snapshot
from app.policies.source import Source

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "policies" / "cookbook"
FILES = sorted(FOLDER.glob("*.yaml"))
DEMO = deployed(ROOT)
HEADS = (HeadSpec("cf", "code"), HeadSpec("ctr", "code"), HeadSpec("value", "code"))
ON, CATALOGUE = replace(DEMO.contract, heads=HEADS), DEMO.catalogue
NEEDS_HEADS = {
    "feed": {"head.ctr"},
    "multi_objective": {"head.ctr"},
    "v16_assistant": {"head.cf"},
    "v19_objectives": {"head.ctr"},
    "v20_look_ahead": {"head.value"},
}
"""Recipes that read outputs which the demo's model has not."""
FIRST_VERSION = {
    1,
    2,
    3,
    4,
    5,
    6,
    8,
    9,
    10,
    11,
    *range(12, 21),
    *range(22, 28),
    *range(29, 34),
    *range(37, 44),
    45,
    46,
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_recipe_compiles_without_a_word(path):
    source = Source(path.name, path.read_bytes())
    plan, found = compile_policy(path.stem, {path.stem: source}, ON, CATALOGUE)
    assert plan is not None, found.text()
    assert found.text() == ""
    assert fmt(source) == path.read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/policies/README.md", "docs/policies/guide.md"])
def test_whole_policies_on_pages_can_be_copied_into_the_demo_without_a_word(page):
    texts = re.findall(r"```yaml\n(widebeam: 1\b.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    texts = [text for text in texts if "kind:" not in text]
    sources = {path.stem: Source(path.name, path.read_bytes()) for path in (ROOT / "policies").glob("*.yaml")}
    for text in texts:
        plan, found = compile_policy(
            "copied", {**sources, "copied": Source("copied.yaml", text.encode())}, ON, CATALOGUE
        )
        assert (plan is not None, found.text()) == (True, "")
    assert texts


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_recipe_checks_on_the_demo_or_names_the_heads_that_its_model_has_not(path):
    _, found = compile_policy(
        path.stem, {path.stem: Source(path.name, path.read_bytes())}, DEMO.contract, DEMO.catalogue
    )
    missing = {one.message for one in found.errors}
    wanted = {
        f"head has no `{name[5:]}` in the active contract {DEMO.contract.id}" for name in NEEDS_HEADS.get(path.stem, ())
    }
    assert missing == wanted


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


@pytest.mark.parametrize("level", ["busy", "quiet"])
def test_a_level_is_the_policy_with_its_widths_written_plainly(level):
    text = (FOLDER / "v03_load_levels.yaml").read_text()
    loaded, _ = compile_policy("v03", {"v03": Source("v03.yaml", text.encode())}, ON, CATALOGUE)
    widths = list(loaded.at(level).widths)
    plain = f"widebeam: 1\nwidths: {widths}\n"
    alone, _ = compile_policy("plain", {"plain": Source("plain.yaml", plain.encode())}, ON, CATALOGUE)
    own = loaded.at(level)
    assert (own.widths, own.limit, own.params) == (alone.widths, alone.limit, alone.params)
    assert own.structure.id == alone.structure.id == loaded.structure.id
    assert own.policy_id == loaded.policy_id != alone.policy_id


def test_the_page_lists_every_recipe_with_what_it_is_about():
    page = (FOLDER / "README.md").read_text()
    for path in FILES:
        about = re.search(r"^about: (.*)", path.read_text(), re.MULTILINE)[1]
        assert f"| [{path.name}]({path.name}) | {about} |\n" in page


def test_the_experiment_of_the_page_runs_with_its_policy_and_the_demos_traffic(tmp_path):
    for path in (ROOT / "policies").glob("*.yaml"):
        shutil.copy(path, tmp_path)
    shutil.copy(FOLDER / "multi_objective.yaml", tmp_path)
    shutil.copytree(FOLDER / "experiments", tmp_path / "experiments")
    loaded = compile_folder(snapshot(tmp_path), ON, CATALOGUE)
    assert [one.message for one in loaded.findings] == []
    arms = loaded.traffic.experiments["ctr_weight"].arms
    assert [arm.name for arm in arms] == ["control", "more"]
