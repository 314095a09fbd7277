from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from app.policies.facts import Column
from app.policies.names import FINAL_PHASES, STEP_PHASES
from app.policies.schema import schema

SHIPPED = sorted(one for one in (Path(__file__).parents[2] / "policies").glob("*.yaml") if one.stem != "traffic")


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(schema())


def test_hover_texts_name_what_the_deployment_declares_where_it_can_be_read():
    columns = (
        Column("attr", "fresh", low=0, high=1, first=2, about="share of what is new"),
        Column("item", "genre", "text", labels=("a", "b"), about="attribute of the items"),
    )
    made = schema(facts={one.key: one for one in columns})
    [step] = made["properties"]["steps"]["patternProperties"].values()
    final = made["properties"]["final"]["properties"]
    line = "attr.fresh (number 0 to 1 from step 2: share of what is new)"
    assert {name for name, one in step["properties"].items() if line in one["description"]} == {
        "mask", "score", "rank", "quota",
    }  # fmt: skip
    line = "item.genre (text, 2 values: attribute of the items)"
    assert {name for name, one in final.items() if line in one["description"]} == {
        "expand", "mask", "score", "dedupe", "quota",
    }  # fmt: skip


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_policies_fit_the_schema(path):
    # an editor's YAML plug-in reads keys as text
    text = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    numbers = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key != "steps"}
    jsonschema.validate({**numbers, **({"steps": text["steps"]} if "steps" in text else {})}, schema())


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"widebeam": 2},
        {"widebeam": 1, "width": [1]},
        {"widebeam": 1, "widths": [0]},
        {"widebeam": 1, "steps": {"frist": {}}},
        {"widebeam": 1, "steps": {"all": {"maks": "trie"}}},
        {"widebeam": 1, "steps": {"all": {"normalize": "some"}}},
        {"widebeam": 1, "params": {"a": {"valeu": 1}}},
        {"widebeam": 1, "final": {"limit": 0}},
    ],
)
def test_slips_are_red_in_an_editor(bad):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bad, schema())


def test_every_phase_that_is_compiled_is_in_the_schema():
    step = schema()["properties"]["steps"]["patternProperties"]["^(all|first|last|[1-9][0-9]?)$"]["properties"]
    assert set(step) == {one.name for one in STEP_PHASES.values() if one.available}
    final = schema()["properties"]["final"]["properties"]
    assert set(final) == {one.name for one in FINAL_PHASES.values() if one.available}
