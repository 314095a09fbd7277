"""A mixture of experts against its definition, a loop over experts; what it is bound to, and how it follows a refit."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu
from torch.utils._python_dispatch import TorchDispatchMode

from app.engine.facts import weight_facts
from app.engine.fp8 import install
from app.engine.moe import Mixture, Routing, pieces
from app.engine.slots import Slots
from app.errors import Rejected
from app.ops.fp8 import quantise_rows
from tests.engine import hybrid, tiny

WIDTH = 16


@st.composite
def routings(draw):
    experts = draw(st.integers(1, 9))
    shared = draw(st.sampled_from([0, 8]))
    sigmoid = draw(st.booleans())
    return Routing(
        experts, draw(st.integers(1, experts)), 12, shared=shared, shared_gate=bool(shared) and draw(st.booleans()),
        sigmoid=sigmoid, normalise=draw(st.booleans()), factor=draw(st.sampled_from([1.0, 2.5])),
        bias=sigmoid and draw(st.booleans()),
    )  # fmt: skip


def mixture(of, seed=0):
    made = Mixture(of, WIDTH)
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.requires_grad_(requires_grad=False).normal_(generator=generator)
    return made


def swiglu(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def by_definition(part, x):
    """Each row, expert by expert, in double precision."""
    of, x = part.of, x.double()
    named = {name: parameter.double() for name, parameter in part.named_parameters()}
    logits = linear(x, named["router"])[:, : of.experts]
    score = logits.sigmoid() if of.sigmoid else logits.softmax(1)
    compared = score + named["bias"] if of.bias else score
    out = torch.zeros_like(x)
    for row in range(len(x)):
        chosen = sorted(range(of.experts), key=lambda e: -float(compared[row, e]))[: of.top]
        total = sum(float(score[row, e]) for e in chosen) if of.normalise else 1.0
        for e in chosen:
            gate, up = named["gate_up"].view(of.experts, 2, of.hidden, WIDTH)[e]
            down = named["down"].view(of.experts, WIDTH, of.hidden)[e]
            out[row] += float(score[row, e]) / total * of.factor * swiglu(x[row], gate, up, down)
    if of.shared:
        shared = swiglu(x, *named["shared_gate_up"].chunk(2), named["shared_down"])
        out += shared * linear(x, named["shared_weight"]).sigmoid() if of.shared_gate else shared
    return out


@settings(max_examples=60, deadline=None)
@given(routings(), st.integers(0, 12), st.integers(0, 2**31))
def test_it_is_the_sum_of_its_experts(of, rows, seed):
    part = mixture(of, seed)
    generator = torch.Generator().manual_seed(seed)
    x, onto = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    expected = onto.double() + by_definition(part, x)
    torch.testing.assert_close(part(x, onto).double(), expected, rtol=2e-5, atol=2e-5 * 16)


def test_in_8_bits_rows_are_rounded_once_and_go_to_the_same_experts():
    of = Routing(5, 2, 32, shared=16)
    part = mixture(of).bfloat16()
    x, onto = (torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    expected = by_definition(part, x)
    for name in part.projections():
        install(part, name, *quantise_rows(getattr(part, name)))
    apart = part(x, onto.clone()).double() - onto.double() - expected
    assert apart.norm() < 0.08 * expected.norm()
    assert apart.norm() > 0.005 * expected.norm(), "it is in 8 bits"


def test_experts_that_are_no_whole_units_stay_as_they_are():
    assert mixture(Routing(5, 2, 12, shared=16)).projections() == ("shared_gate_up", "shared_down")
    assert mixture(Routing(5, 2, 32)).projections() == ("gate_up", "down")


def test_its_pieces_are_its_parameters():
    of = Routing(3, 2, 12, shared=8, shared_gate=True, sigmoid=True, bias=True)
    rows = {}
    for piece in pieces(of, WIDTH):
        rows[piece.parameter] = rows.get(piece.parameter, 0) + piece.height
    assert rows == {name: len(parameter) for name, parameter in mixture(of).named_parameters()}


class Counted(TorchDispatchMode):
    """How many operators run."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_more_rows_are_no_more_operators():
    part = mixture(Routing(4, 2, 12, shared=8))
    found = []
    for rows in (64, 4096):
        x, onto = torch.randn(rows, WIDTH), torch.zeros(rows, WIDTH)
        with Counted() as counted:
            part(x, onto)
        found.append(counted.calls)
    assert found[0] == found[1]


def stored(directory):
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(("module", "kind"), [(tiny, "qwen3_moe"), (hybrid, "qwen3_next")])
def test_experts_lie_behind_one_another_as_the_checkpoint_has_them_and_follow_a_refit(module, kind, tmp_path):
    changes = {} if module is tiny else hybrid.EXPERTS
    slots, found = Slots(), []
    for seed in (1, 2):
        directory = module.write(tmp_path / str(seed), kind, seed=seed, **changes)
        engine = tiny.engine(directory, kind, slots=slots) if module is tiny else hybrid.engine(directory, slots=slots)
        held, tensors = dict(engine._family.named_parameters()), stored(directory)
        mlp = "model.layers.1.mlp"
        gate_up = [tensors[f"{mlp}.experts.{e}.{x}_proj.weight"] for e in range(4) for x in ("gate", "up")]
        assert torch.equal(held["blocks.1.experts.gate_up"], torch.cat(gate_up))
        down = [tensors[f"{mlp}.experts.{e}.down_proj.weight"] for e in range(4)]
        assert torch.equal(held["blocks.1.experts.down"], torch.cat(down))
        router = held["blocks.1.experts.router"]
        assert torch.equal(router[:4], tensors[f"{mlp}.gate.weight"])
        assert router.shape == (8, 16)
        assert not router[4:].any(), "in whole pieces of 8"
        assert "blocks.0.gate_up" in held, "a dense layer beside them"
        found.append(engine)
    assert found[0].slot is not found[1].slot


@pytest.mark.parametrize("fault", ["shape", "missing", "extra", "nan"])
def test_a_fault_of_one_experts_tensor_is_named_with_it(fault, tmp_path):
    directory = tiny.write(tmp_path, "qwen3_moe")
    tensors, name = stored(directory), "model.layers.1.mlp.experts.2.up_proj.weight"
    if fault == "shape":
        tensors[name] = torch.zeros(12, 15)
    elif fault == "missing":
        del tensors[name]
    elif fault == "extra":
        name = "model.layers.1.mlp.experts.4.up_proj.weight"
        tensors[name] = torch.zeros(12, 16)
    else:
        tensors[name][3, 5] = torch.nan
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(Rejected) as caught:
        tiny.engine(directory, "qwen3_moe")
    assert name in f"{caught.value.location} {caught.value}"


def test_the_contract_names_every_source_and_how_they_are_put_together(tmp_path):
    engine = tiny.engine(tiny.write(tmp_path, "qwen3_moe"), "qwen3_moe")
    fact = {one["parameter"]: one for one in weight_facts(engine._family, torch.float32)}["blocks.1.experts.down"]
    assert [source["name"] for source in fact["sources"]] == [
        f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(4)
    ]
    assert fact["transform"] == [{"op": "cast", "dtype": "float32"}, {"op": "concatenate", "dim": 0}]
    assert json.dumps(fact["shape"]) == "[64, 12]"
