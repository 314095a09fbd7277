"""Precision fp8: which parameters it holds in 8 bits, what stands in their place, and what a family computes then."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from app.config import Limits, SidConfig
from app.core import History, Rows
from app.engine import fp8 as engine_fp8
from app.engine.facts import weight_facts
from app.engine.families.base import ModelFiles
from app.engine.fp8 import (
    Quantised,
    QuantisedRows,
    carrier,
    gated_for,
    gated_product_for,
    install,
    normed_after,
    normed_for,
    product,
    product_into,
    quantised,
)
from app.engine.registry import family
from app.engine.slots import Slots
from app.engine.weights import layout, load, read_entries, resolve_precision
from app.errors import Rejected
from app.ops import fp8
from app.ops.fp8 import FP8
from app.ops.gated import gated, gated_product
from app.runtime.contexts import batch_inputs
from tests import support
from tests.engine import hybrid, tiny

CPU = torch.device("cpu")
WIDE = {"hidden_size": 32, "intermediate_size": 48}
SIZES = (4, 5, 6)
LIMITS = Limits(widths=(16,) * 3, rows=64, batch=4, context=24)


def onerec(directory, **changes):
    """A random onerec all of whose projections have sizes that are multiples of 16."""
    sizes = {"d_model": 32, "heads": 2, "head_dim": 16, "cross_groups": 2, "self_groups": 1, "ffn": 48}
    config = support.onerec_config(SIZES, **{**sizes, **changes})
    weights = support.onerec_weights(config)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    return directory


def loaded(directory, kind, sid, precision="fp8", limits=LIMITS, slots=None):
    return load(directory, family(kind), sid, limits, precision=precision, device=CPU, slots=slots)


def built(directory, kind, sid, dtype=torch.bfloat16):
    config = json.loads((directory / "config.json").read_text())
    shapes = {name: entry.shape for name, entry in read_entries(directory).items()}
    return family(kind).build(ModelFiles(config, directory, shapes), sid, LIMITS, dtype)


def models(tmp_path):
    """A model of each dense family, with experts and without: (directory, kind, sid)."""
    experts, all_of_them = {"routed": 5, "top": 5, "hidden": 32, "shared": 1, "dense": 1}, {"num_experts_per_tok": 4}
    return [
        (onerec(tmp_path / "onerec"), "onerec", SidConfig(sizes=SIZES)),
        (onerec(tmp_path / "onerec_experts", experts=experts), "onerec", SidConfig(sizes=SIZES)),
        (tiny.write(tmp_path / "moe", "qwen3_moe", **WIDE, **all_of_them, moe_intermediate_size=32), "qwen3", tiny.SID),
        (tiny.write(tmp_path / "qwen3", **WIDE), "qwen3", tiny.SID),
        (tiny.write(tmp_path / "qwen2", "qwen2", **WIDE), "qwen2", tiny.SID),
    ]


def test_every_family_holds_its_projections_in_8_bits_and_nothing_else(tmp_path):
    for directory, kind, sid in models(tmp_path):
        engine = loaded(directory, kind, sid)
        plain = dict(built(directory, kind, sid).named_parameters())
        eight = quantised(built(directory, kind, sid), FP8)
        held = dict(engine._family.named_parameters())
        assert eight
        assert all(plain[name].dim() == 2 for name in eight)
        assert not any("norm" in name or "embed" in name or "head" in name for name in eight)
        for name in plain:
            if name in eight:
                assert held[f"{name}.data"].dtype == FP8
                assert held[f"{name}.scale"].dtype == torch.float32
            else:
                assert held[name].dtype == torch.bfloat16
        assert engine.dtype == torch.bfloat16
        assert {spec.dtype for spec in engine.state_specs()} <= {torch.bfloat16, torch.int32}


def steps_of(engine, arena):
    """Logits of three steps for two requests."""
    prepared = [engine.prepare(History(np.array([[1, 2, 3], [0, 4, 5]], np.int32)[:n])) for n in (2, 1)]
    engine.encode(batch_inputs(engine.input_specs(), prepared, CPU), arena)
    found = []
    for t, n in ((1, 2), (2, 5), (3, 4)):
        codes, tree = torch.arange(n, dtype=torch.int32) % SIZES[t - 2], torch.zeros(n, t - 1, dtype=torch.int32)
        start = torch.tensor([0, 1, n], dtype=torch.int32)
        request = (torch.arange(n) > 0).int()
        found.append(engine.step(t, Rows(codes, request, start, tree, compact=False, full=False), arena).logits)
    return found


def test_products_in_8_bits_are_kept_where_they_are_written(tmp_path):
    engine = loaded(onerec(tmp_path / "onerec", self_groups=2), "onerec", SidConfig(sizes=SIZES))
    inside, apart = engine.new_arena(LIMITS), engine.new_arena(LIMITS)
    found = [steps_of(engine, inside)]
    slots = engine._family.slots
    engine._family.slots = lambda *asked: slots(*asked)._replace(product=None)  # as grouped heads: copies of a product
    found.append(steps_of(engine, apart))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for spec in engine.state_specs():
        assert bool(inside[spec.name].any())
        if spec.scope == "row":
            assert torch.equal(inside[spec.name][:, :, spec.first :], apart[spec.name][:, :, spec.first :])


def test_weights_in_8_bits_are_the_stored_ones_quantised_row_by_row(tmp_path):
    directory = tiny.write(tmp_path, **WIDE)
    stored = tiny.tensors(json.loads((directory / "config.json").read_text()))
    family_ = loaded(directory, "qwen3", tiny.SID)._family
    gate_up = torch.cat([stored[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up")])
    data, scale = fp8.quantise_rows(gate_up)
    held = family_.blocks[1].gate_up
    assert torch.equal(held.data.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(held.scale, scale)


def encoded(engine, tokens):
    return engine.encode(tiny.contexts(engine, [tokens]), engine.new_arena(tiny.LIMITS)).logits.float()


def test_what_a_family_computes_is_close_to_float32_and_not_equal_to_bfloat16(tmp_path):
    for directory, kind, sid in models(tmp_path)[2:]:
        exact, half, eight = (
            encoded(loaded(directory, kind, sid, p, tiny.LIMITS), (3, 4, 5)) for p in ("float32", "bfloat16", "fp8")
        )
        assert not torch.equal(half, eight)
        assert functional.cosine_similarity(eight, exact).min() > 0.9


def test_a_family_without_projections_or_with_sizes_that_do_not_fit_is_refused(tmp_path):
    directory = tiny.write(tmp_path, hidden_size=24, head_dim=6, intermediate_size=24)
    with pytest.raises(Rejected, match="multiples of 16") as caught:
        loaded(directory, "qwen3", tiny.SID)
    assert (caught.value.code, caught.value.location) == ("unsupported_precision", "deployment.toml: precision")


def test_a_contract_names_what_is_quantised(tmp_path):
    directory = tiny.write(tmp_path, **WIDE)
    facts = {one["parameter"]: one["transform"] for one in weight_facts(built(directory, "qwen3", tiny.SID), FP8)}
    quantise = {"op": "quantise", "dtype": "float8_e4m3fn", "scale": "float32", "per": "row"}
    assert facts["blocks.0.qkv"] == [quantise, {"op": "concatenate", "dim": 0}]
    assert facts["blocks.0.down"] == [quantise]
    assert facts["blocks.0.input_norm"] == [{"op": "cast", "dtype": "bfloat16"}]


def test_a_slot_of_8_bits_is_taken_again_by_the_next_version_at_the_same_addresses(tmp_path):
    directory, slots = tiny.write(tmp_path, **WIDE), Slots(1)
    first = loaded(directory, "qwen3", tiny.SID, slots=slots)
    addresses = first.addresses
    size = layout(built(directory, "qwen3", tiny.SID), FP8, CPU).size
    assert size == sum(one.nbytes for one in first.slot.tensors.values())
    assert size < layout(built(directory, "qwen3", tiny.SID), torch.bfloat16, CPU).size
    del first
    assert loaded(directory, "qwen3", tiny.SID, slots=slots).addresses == addresses


def test_bad_values_are_refused_as_in_any_precision(tmp_path):
    directory = tiny.write(tmp_path, **WIDE)
    data = bytearray((directory / "model.safetensors").read_bytes())
    data[-4:] = b"\x00\x00\xc0\x7f"
    (directory / "model.safetensors").write_bytes(data)
    with pytest.raises(Rejected, match="NaN or infinite"):
        loaded(directory, "qwen3", tiny.SID)


def test_what_stands_for_a_weight_multiplies_and_does_nothing_else():
    torch.manual_seed(0)
    weight, x = torch.randn(32, 48), torch.randn(5, 48).bfloat16()
    data, scale = fp8.quantise_rows(weight)
    layer = nn.Linear(48, 32)
    layer.bias = nn.Parameter(layer.bias.bfloat16(), requires_grad=False)
    install(layer, "weight", data, scale)
    held = layer.weight
    assert isinstance(held, Quantised)
    expected = fp8.linear(x, data, scale)
    assert torch.equal(functional.linear(x, held), expected)
    assert torch.equal(functional.linear(x.view(1, 5, 48), held), expected.view(1, 5, 32))
    assert torch.equal(layer(x), fp8.linear(x, data, scale, layer.bias))
    added = torch.ones(5, 32).bfloat16()
    assert added.addmm_(x, held.t()) is added
    assert torch.equal(added, 1 + expected)
    for wrong in (lambda: torch.mm(x, held.t()), lambda: torch.cat([held, held]), lambda: x @ held):
        with pytest.raises(TypeError):
            wrong()


def test_a_gated_product_is_one_operator_where_that_is_one_launch_unless_either_weight_is_in_8_bits(monkeypatch):
    torch.manual_seed(0)
    one = []
    monkeypatch.setattr(engine_fp8, "gated_product", lambda *operands: one.append(operands) or gated_product(*operands))
    x = torch.randn(5, 48).bfloat16()
    entry, down = nn.Linear(48, 64, bias=False).bfloat16(), nn.Linear(32, 48, bias=False).bfloat16()
    plain, out = entry.weight, down.weight
    expected = gated_product(x, plain)
    assert torch.equal(expected, gated(*functional.linear(x, plain).chunk(2, 1)))
    assert torch.equal(gated_product_for(x, plain, out), expected)
    assert not one  # a CPU has a product and a gate
    monkeypatch.setattr(engine_fp8, "gates_itself", lambda *_: True)
    assert torch.equal(gated_product_for(x, plain, out), expected)
    assert len(one) == 1
    install(down, "weight", *fp8.quantise_rows(out))
    rows = gated_product_for(x, plain, down.weight)
    assert isinstance(rows, QuantisedRows)
    assert torch.equal(rows.rows.q.float(), fp8.quantise_gated(*functional.linear(x, plain).chunk(2, 1)).q.float())
    install(entry, "weight", *fp8.quantise_rows(plain))
    product = functional.linear(x, entry.weight)
    assert torch.equal(gated_product_for(x, entry.weight, out), gated(*product.chunk(2, 1)))
    both = gated_product_for(x, entry.weight, down.weight)
    assert torch.equal(
        functional.linear(both, down.weight), fp8.linear(gated(*product.chunk(2, 1)), *down.weight.parameters())
    )
    assert len(one) == 1


def test_rows_made_for_weights_in_8_bits_are_made_once_and_take_the_place_of_a_tensor_in_their_products_only():
    torch.manual_seed(0)
    both, norm = torch.randn(5, 96).bfloat16(), nn.RMSNorm(48, 1e-6).bfloat16()
    gate, up = both.chunk(2, 1)
    layer = nn.Linear(48, 32, bias=False).bfloat16()
    assert torch.equal(gated_for(gate, up, layer.weight), gated(gate, up))
    assert torch.equal(normed_for(gate, norm, layer.weight), norm(gate))
    plain = layer.weight
    install(layer, "weight", *fp8.quantise_rows(layer.weight))
    for rows, alone in (
        (gated_for(gate, up, layer.weight), gated(gate, up)),
        (normed_for(gate, norm, layer.weight, layer.weight), norm(gate)),
    ):
        expected = layer(alone)
        assert torch.equal(layer(rows), expected)
        assert torch.equal(torch.ones(5, 32).bfloat16().addmm_(rows, layer.weight.t()), 1 + expected)
        for wrong in (lambda rows=rows: rows + 1, lambda rows=rows: functional.linear(rows, plain)):
            with pytest.raises(TypeError):
                wrong()
    assert torch.equal(normed_for(gate, norm, layer.weight, plain), norm(gate)), "one of them is not in 8 bits"


def test_a_product_goes_where_rows_lie_apart_and_touches_nothing_beside_them():
    random = torch.Generator().manual_seed(8)
    x, weight = (torch.randn(*shape, generator=random).bfloat16() for shape in ((5, 32), (48, 32)))
    eight = Quantised(*fp8.quantise_rows(weight))
    rows = normed_for(x, nn.RMSNorm(32, 1e-6).bfloat16(), eight)
    for given, by in ((x, weight), (x.float(), weight.float()), (x, eight), (rows, eight)):
        expected = functional.linear(given, by)
        slots = torch.full((2, 7, 64), 7.0, dtype=expected.dtype)
        product_into(slots[1, :5, 8:56], given, by)
        torch.testing.assert_close(slots[1, :5, 8:56], expected)
        slots[1, :5, 8:56] = 7.0
        assert (slots == 7.0).all()


@pytest.mark.parametrize("eight", [(), ("first",), ("first", "second"), ("second",)])
def test_a_norm_behind_a_sum_is_the_norm_of_the_sum_whatever_is_in_8_bits(eight):
    torch.manual_seed(0)
    x, y, norm = torch.randn(5, 48).bfloat16(), torch.randn(5, 32).bfloat16(), nn.RMSNorm(48, 1e-6).bfloat16()
    layers = {"first": nn.Linear(32, 48, bias=False).bfloat16(), "second": nn.Linear(48, 32, bias=False).bfloat16()}
    for name in eight:
        install(layers[name], "weight", *fp8.quantise_rows(layers[name].weight))
    total = x.clone().addmm_(y, layers["first"].weight.t())
    normed = normed_after(x, y, layers["first"].weight, norm, layers["second"].weight)
    assert torch.equal(x, total)
    assert torch.equal(layers["second"](normed), layers["second"](norm(total)))


def test_a_product_by_a_chosen_algorithm_takes_the_place_of_the_product_and_of_the_sum_behind_it(monkeypatch):
    torch.manual_seed(0)
    asked = []

    def chosen(x, weight, scales, out=None, *, onto=False):
        asked.append((out is not None, onto))
        made = fp8.linear(fp8.EightBits(x, scales.x), weight, scales.weight)
        return made if out is None else out.add_(made) if onto else out.copy_(made)

    norm, plain = nn.RMSNorm(32, 1e-6).bfloat16(), torch.randn(5, 32).bfloat16()
    weight = Quantised(*fp8.quantise_rows(torch.randn(32, 32)))
    rows, x = normed_for(plain, norm, weight), torch.randn(5, 32).bfloat16()

    def answers():
        out = torch.zeros(7, 48, dtype=torch.bfloat16)
        product_into(out[1:6, 8:40], rows, weight)
        total = x.clone()
        behind = normed_after(total, rows, weight, norm, weight)
        onto = x.clone().addmm_(rows, weight.t())
        return product(rows, weight), out, total, behind.rows.q.float(), behind.rows.scale, onto

    before = answers()
    monkeypatch.setattr("app.engine.fp8.products.scaled", chosen)
    for one, other in zip(answers(), before, strict=True):
        assert torch.equal(one, other)
    assert asked == [(True, False), (True, True), (True, True), (False, False)]


def test_precisions():
    assert resolve_precision("fp8", CPU) == FP8
    assert carrier(FP8) == torch.bfloat16
    assert carrier(torch.float16) == torch.float16


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_a_gated_delta_net_holds_its_projections_in_8_bits_whatever_their_order_on_the_disk(kind, tmp_path):
    directory = hybrid.write(tmp_path, kind, **WIDE, linear_value_head_dim=8)
    exact = dict(loaded(directory, "qwen3_5", hybrid.SID, "float32")._family.named_parameters())
    held = dict(loaded(directory, "qwen3_5", hybrid.SID)._family.named_parameters())
    eight = quantised(built(directory, "qwen3_5", hybrid.SID), FP8)
    assert {name.rpartition(".")[2] for name in eight} == {"qkvz", "qkv", "out", "gate_up", "down"}
    for name in eight:
        rounded = held[f"{name}.data"].float() * held[f"{name}.scale"].unsqueeze(1)
        room = exact[name].abs() * 2.0**-4 + exact[name].abs().amax(1, keepdim=True) * 2.0**-16
        assert ((rounded - exact[name]).abs() <= room).all(), name
