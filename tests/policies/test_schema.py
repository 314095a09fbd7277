from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from app.policies.names import FINAL_PHASES, STEP_PHASES
from app.policies.schema import schema

SHIPPED = sorted(one for one in (Path(__file__).parents[2] / "policies").glob("*.yaml") if one.stem != "traffic")


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(schema())


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
