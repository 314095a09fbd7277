"""What torch.export says of the shipped families, and of families that do otherwise than they declare."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.config import Limits, SidConfig
from app.core import HeadSpec, StateSpec
from app.engine.export import export_family
from app.engine.families.base import ModelFiles
from app.engine.functions import Function, Link, TensorFact, check_functions, check_stored, links
from app.engine.registry import family
from app.errors import Rejected
from tests import support
from tests.engine import hybrid, tiny
from tests.engine.toy import Toy

SIZES, BASES = (5, 6), (10, 15)
SID = SidConfig(sizes=SIZES, token_base=BASES, prefix=(2,))
LIMITS = Limits(widths=(16, 16), rows=64, batch=4, context=24)
KINDS = {
    "onerec": (support.onerec_config(SIZES, layers=1), SidConfig(sizes=SIZES), torch.float32),
    "qwen3": (tiny.config("qwen3", num_hidden_layers=1), SID, torch.bfloat16),
    "qwen2": (tiny.config("qwen2", num_hidden_layers=1), SID, torch.float16),
    "qwen3_5": (
        hybrid.config(num_hidden_layers=2, layer_types=[hybrid.LINEAR, hybrid.FULL]), SID, torch.bfloat16,
    ),
}  # fmt: skip


def built(kind, dtype=torch.float32, **changes):
    config, sid, own = KINDS[kind]
    return family(kind).build(ModelFiles(config | changes, Path(), {}), sid, LIMITS, own)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # each export is a second or two on an idle machine


@pytest.fixture(scope="module", params=KINDS)
def exported(request):
    return request.param, built(request.param), export_family(built(request.param), SIZES)


def test_every_function_of_a_shipped_family_is_exported(exported):
    kind, model, found = exported
    assert [(one.name, one.exported, one.reason) for one in found] == [
        (name, True, None) for name in (["encode"] if model.log_norm else ["encode", "step 1"]) + ["step 2"]
    ]
    width = str(KINDS[kind][2]).removeprefix("torch.")
    outputs = {one.name: (one.dtype, one.shape) for one in found[-1].outputs}
    assert outputs["logits"] == (width, ("rows", 6))
    assert (outputs.get("log_norm") == ("float32", ("rows",))) is model.log_norm
    given = {one.name: one.shape for one in found[-1].inputs}
    assert given == {
        "codes": ("rows",), "request": ("rows",), "row_start": ("requests + 1",), "ancestry": ("rows", 1),
    }  # fmt: skip
    for spec in model.input_specs():
        own = {one.name: one.shape for one in found[0].inputs}
        assert own[spec.name] == (f"positions of {spec.name}", *spec.shape)
        assert own[f"{spec.name}.start"] == ("requests + 1",)


def test_all_declared_state_is_written_by_somebody_and_linked_to_who_reads_it(exported):
    kind, model, found = exported
    written = {state for one in found for state in one.writes}
    request = {spec.name for spec in model.state_specs() if spec.scope == "request"}
    rows = {spec.name for spec in model.state_specs() if spec.scope == "row"}
    assert set(found[0].writes) == request
    assert {link.state for link in links(found)} >= request
    if kind == "onerec":  # its second step reads what its first has written; token models start with the second
        assert written == request | rows
        assert Link("k.0", "step 1", "step 2") in links(found)
    else:
        assert found[-1].writes == ()  # nothing reads what the last step would write


def test_what_was_found_is_believed_when_it_is_read_again_and_nothing_else_is(exported):
    _, model, found = exported
    check_stored(model, found, SIZES)
    for other in (found[:-1], found[1:], (found[0], *found[2:], found[1]) if len(found) > 2 else (*found, found[-1])):
        with pytest.raises(Rejected, match="other functions"):
            check_stored(model, other, SIZES)


def test_a_product_that_is_written_where_it_stays_is_written_state_with_its_links():
    found = export_family(built("onerec", self_groups=2), SIZES)
    assert [(one.name, one.exported, one.writes) for one in found] == [
        ("encode", True, ("cross_k.0", "cross_length")), ("step 1", True, ("qkv.0",)), ("step 2", True, ()),
    ]  # fmt: skip
    assert "qkv.0" in found[2].reads
    assert [link for link in links(found) if link.state == "qkv.0"] == [Link("qkv.0", "step 1", "step 2")]


class Static(Toy):
    """Looks at values while it decides what to do."""

    def step(self, t, rows, arena):
        if rows.codes.tolist()[0] > 1:
            return super().step(t, rows, arena)
        return super().step(t, rows, arena)


def toy(kind=Toy, sizes=SIZES):
    return kind.build(ModelFiles({"width": 4}, Path(), {}), SidConfig(sizes=sizes), LIMITS, torch.float32)


def test_a_family_of_ones_own_is_exported_with_its_links():
    found = export_family(toy(), SIZES)
    assert [one.name for one in found] == ["encode", "step 1", "step 2"]
    assert links(found) == (
        Link("context", "encode", "step 1"),
        Link("context", "encode", "step 2"),
        Link("vector", "step 1", "step 2"),
    )


def test_a_function_that_cannot_be_followed_says_so_and_why():
    encode, step = export_family(toy(Static, (5,)), (5,))
    assert (encode.exported, step.exported) == (True, False)
    assert "DataDependent" in step.reason
    assert (step.inputs, step.outputs, step.writes) == ((), (), ())


class Declared(Toy):
    """Declares a head, and a state beside its own."""

    def head_specs(self):
        return (HeadSpec("value", "row"),)

    def state_specs(self):
        return (*super().state_specs(), StateSpec("ghost", (self.width,), self.dtype, "request"))


LOGITS = TensorFact("logits", "float32", ("rows", 5))
VALUE, OTHER = (TensorFact(f"head.{name}", "float32", ("rows",)) for name in ("value", "x"))


@pytest.mark.parametrize(
    ("outputs", "reads", "message"),
    [
        ((TensorFact("logits", "float32", ("rows", 4)), VALUE), (), "`logits` is ['rows', 4], expected ['rows', 5]"),
        ((TensorFact("logits", "float32", (7, 5)), VALUE), (), "`logits` is [7, 5], expected ['rows', 5]"),
        ((TensorFact("logits", "int64", ("rows", 5)), VALUE), (), "`logits` is int64, no float"),
        ((LOGITS,), (), "gives no `head.value`, which the family declares"),
        ((LOGITS, VALUE, OTHER), (), "gives `head.x`, which the family does not declare"),
        ((LOGITS, VALUE), ("context", "ghost"), "reads the state `ghost`, which nothing has written before"),
    ],
)  # fmt: skip
def test_a_family_that_does_otherwise_than_it_declares_is_refused_with_the_place(outputs, reads, message):
    functions = [
        Function("encode", exported=True, writes=("context",)),
        Function("step 1", exported=True, outputs=outputs, reads=reads),
    ]
    with pytest.raises(Rejected) as refused:
        check_functions(toy(Declared), functions, SIZES)
    assert (refused.value.code, refused.value.location) == ("bad_family", "Declared, step 1")
    assert refused.value.message == message
