"""The registered operators on a CPU: the definition, and one node of torch's graphs. tests/gpu has the GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from app.ops import attention, cuda
from app.ops.attention import launch, operators, reference

SCALE = 0.3
OPERATORS = torch.ops.widebeam


def operands(n=9, h=4, hkv=2, d=8, steps=3, slots=12, dtype=torch.float32):
    torch.manual_seed(n)
    q, k, v = (torch.randn(n, heads, d).to(dtype) for heads in (h, hkv, hkv))
    k_slots, v_slots = (torch.randn(steps, slots, hkv, d).to(dtype) for _ in range(2))
    return (q, k, v, k_slots, v_slots), torch.randint(0, slots, (n, steps), dtype=torch.int32)


def context(n=9, h=4, hkv=2, d=8):
    torch.manual_seed(n)
    q = torch.randn(n, h, d)
    k, v = (torch.randn(3, 6, hkv, d) for _ in range(2))
    return q, k, v, torch.tensor([6, 0, 3], dtype=torch.int32), torch.tensor([0, 4, 5, n], dtype=torch.int32)


@pytest.mark.parametrize("how", [{}, {"first": 1}, {"compact": True}, {"bias": torch.ones(4, 4)}])
def test_an_operator_is_its_definition(how):
    given, tree = operands()
    expected = reference.prefix_attention(*given, ancestry=tree, scale=SCALE, **how)
    found = attention.prefix_attention_with_lse(*given, ancestry=tree, scale=SCALE, **how)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(attention.prefix_attention(*given, ancestry=tree, scale=SCALE, **how), expected[0])
    shared = attention.context_attention(*context(), widest=4, scale=SCALE)
    whole = reference.context_attention(*context(), scale=SCALE)
    assert all(torch.equal(a, b) for a, b in zip(shared, whole, strict=True))
    how = {key: value for key, value in how.items() if key != "bias"}
    out = attention.extend_attention(shared, *given, ancestry=tree, scale=SCALE, **how)
    assert torch.equal(out, reference.extend_attention(shared, *given, ancestry=tree, scale=SCALE, **how))


@pytest.mark.parametrize(
    ("rows", "keys", "alone"), [((0, 9), 6, True), ((0, 9), 0, False), ((0, 5, 9), 6, False), ((0, 8), 6, False)]
)
def test_the_beams_of_one_request_take_one_matrix_of_scores_and_any_others_the_parts(rows, keys, alone, monkeypatch):
    (q, k, v, *slots), tree = operands()
    context_of_all = tuple(torch.randn(len(rows) - 1, 6, 2, 8) for _ in range(2))
    length, start = torch.full((len(rows) - 1,), keys, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32)
    shared = attention.context_attention(q, *context_of_all, length, start, widest=9, scale=SCALE)
    parts = attention.extend_attention(shared, q, k, v, *slots, ancestry=tree, scale=SCALE)
    how = {"ancestry": tree, "widest": 9, "scale": SCALE}
    asked = (q, k, v, context_of_all, length, start, *slots)
    torch.testing.assert_close(attention.beam_attention(*asked, **how), parts)
    calls, real = [], reference.alone_attention
    monkeypatch.setattr(reference, "alone_attention", lambda *a, **k: calls.append(1) or real(*a, **k))
    attention.beam_attention(*asked, **how)
    monkeypatch.setattr(operators, "ALONE", 9 * 4 * 6 - 1)
    assert torch.equal(attention.beam_attention(*asked, **how), parts)
    assert calls == [1] * alone


def test_a_row_alone_is_its_value():
    given, tree = operands(h=2, hkv=2)
    assert attention.prefix_attention(*given, ancestry=tree[:, :0], scale=SCALE) is given[2]
    given, tree = operands(h=4, hkv=2)
    assert torch.equal(
        attention.prefix_attention(*given, ancestry=tree[:, :0], scale=SCALE), given[2].repeat_interleave(2, 1)
    )


def test_bounds_that_the_rows_do_not_keep_are_refused():
    with pytest.raises(ValueError, match="widest: 3, but a request has 4"):
        attention.context_attention(*context(), widest=3, scale=SCALE)
    q = torch.randn(7, 2, 8)
    with pytest.raises(ValueError, match="longest: 4, but a request has 5"):
        attention.causal_attention(q, q, q, torch.tensor([0, 2, 7]), longest=4, scale=SCALE)


def test_shapes_that_torch_is_told_are_those_that_come():
    given, tree = operands()
    shared = OPERATORS.context_attention(*context(), 4, SCALE, None)
    q = given[0]
    start = torch.tensor([0, 4, 9])
    for operator, arguments in (
        (OPERATORS.prefix_attention, (*given, tree, SCALE, 0, None, False)),
        (OPERATORS.prefix_attention_with_lse, (*given, tree, SCALE, 1, None, True)),
        (OPERATORS.extend_attention, (*shared, *given, tree, SCALE, 0, False)),
        (OPERATORS.context_attention, (*context(), 4, SCALE, None)),
        (OPERATORS.causal_attention, (q, q, q, start, 5, SCALE)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


class Toy(nn.Module):
    """A step with everything: a context, slots that it writes, a prefix."""

    def forward(self, q, context_k, context_v, length, row_start, k_slots, v_slots, ancestry):
        shared = attention.context_attention(q, context_k, context_v, length, row_start, widest=64, scale=SCALE)
        k, v = q[:, :2] * 2, q[:, 2:] + 1
        out = attention.extend_attention(shared, q, k, v, k_slots, v_slots, ancestry=ancestry, scale=SCALE)
        k_slots[2, : q.shape[0]] = k
        v_slots[2, : q.shape[0]] = v
        return out + attention.prefix_attention(q, k, v, k_slots, v_slots, ancestry=ancestry, scale=SCALE)


def arguments(n=9):
    (_, _, _, k_slots, v_slots), tree = operands(n=n, slots=80)
    q, k, v, length, start = context(n=n)
    return (q, k, v, length, start, k_slots, v_slots, tree[:, :2])


def test_a_step_exports_with_dynamic_rows_and_runs_the_same():
    rows = Dim("rows", min=1, max=64)
    dynamic = ({0: rows}, None, None, None, None, None, None, {0: rows})
    program = torch.export.export(Toy(), arguments(), dynamic_shapes=dynamic)
    nodes = {str(node.target) for node in program.graph.nodes if "widebeam" in str(node.target)}
    assert nodes == {
        "widebeam.context_attention.default", "widebeam.extend_attention.default", "widebeam.prefix_attention.default",
    }  # fmt: skip
    for n in (9, 64):
        mine, theirs = arguments(n), arguments(n)
        assert torch.equal(program.module()(*mine), Toy()(*theirs))
        assert torch.equal(mine[5], theirs[5])


def test_a_step_compiles_without_a_break():
    compiled = torch.compile(Toy(), backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (9, 23):
        assert torch.equal(compiled(*arguments(n)), Toy()(*arguments(n)))


@pytest.mark.parametrize(
    ("how", "positions", "reason"),
    [
        ({"dtype": torch.float32}, 1, "q: torch.float32"),
        ({"d": 12}, 1, "head dim 12"),
        ({"d": 264}, 1, "head dim 264"),
        ({}, 9, "9 positions; at most 8"),
        ({}, 8, None),
        ({"d": 256, "dtype": torch.float16}, 1, None),
    ],
)
def test_what_the_kernel_does_not_take_is_told(how, positions, reason, monkeypatch):
    given, _ = operands(**{"dtype": torch.bfloat16, **how})
    assert launch.unfit(given[0], given[2], positions) == "cpu is no NVIDIA GPU of compute capability 8.0"
    monkeypatch.setattr(cuda, "unfit", lambda _: None)
    found = launch.unfit(given[0], given[2], positions)
    assert found is None if reason is None else reason in found


def test_a_launch_covers_every_row_and_head(monkeypatch):
    """The grid, without a GPU."""
    launched = []

    class Kernel:
        def launch(self, blocks, threads, *arguments):
            launched.append((blocks, threads, len(arguments)))

    names = []
    monkeypatch.setattr(cuda, "unfit", lambda _: None)
    monkeypatch.setattr(cuda, "load", lambda source, name, device, **define: names.append((name, define)) or Kernel())
    launch._shape.cache_clear()
    for d, positions, compact in ((64, 4, False), (64, 8, False), (256, 8, False), (64, 8, True), (8, 1, True)):
        given, tree = operands(n=37, h=8, hkv=4, d=d, steps=positions - 1, slots=40, dtype=torch.bfloat16)
        launch.attend(*given, tree, scale=1.0, first=0, compact=compact)
    launch._shape.cache_clear()
    assert [name for name, _ in names] == ["slots_4", "walk_8", "walk_8", "compact_8", "slots_1"]
    assert [blocks for blocks, _, _ in launched] == [19, 3, 10, 19, 3]
    parameters = (
        Path(launch.__file__).with_name("kernel.cu").read_text().partition("name##_##S(")[2].partition(") {")[0]
    )
    assert {count for *_, count in launched} == {parameters.count("i64 ") + parameters.count("float ")}


def inside_products(k_slots, v_slots, heads=4):
    """The same slots as parts of products that hold q, k and v; what else is there is NaN."""
    steps, slots, hkv, d = k_slots.shape
    whole = k_slots.new_full((steps, slots, heads + 2 * hkv, d), torch.nan)
    parts = whole[:, :, heads : heads + hkv], whole[:, :, heads + hkv :]
    for part, given in zip(parts, (k_slots, v_slots), strict=True):
        part.copy_(given)
    return parts


@pytest.mark.parametrize("hkv", [1, 2, 4])
def test_slots_inside_of_products_are_slots(hkv):
    (q, k, v, *slots), tree = operands(hkv=hkv)
    parts, how = inside_products(*slots), {"ancestry": tree, "scale": SCALE}
    shared = torch.randn_like(q), torch.randn(len(q), 4)
    one = torch.tensor([9], dtype=torch.int32), torch.tensor([0, 9], dtype=torch.int32)
    context = tuple(torch.randn(1, 9, hkv, 8) for _ in range(2))
    for compact in (False, True):
        for found, expected in (
            (attention.prefix_attention(q, k, v, *each, **how, compact=compact) for each in (parts, slots)),
            (attention.extend_attention(shared, q, k, v, *each, **how, compact=compact) for each in (parts, slots)),
            (
                attention.beam_attention(q, k, v, context, *one, *each, **how, widest=9, compact=compact)
                for each in (parts, slots)
            ),
        ):
            assert torch.equal(found, expected)


def test_a_launch_is_told_how_far_apart_slots_are_and_refuses_what_it_cannot_read(monkeypatch):
    launched = []

    class Kernel:
        def launch(self, blocks, threads, *arguments):
            launched.append(arguments)

    monkeypatch.setattr(cuda, "unfit", lambda _: None)
    monkeypatch.setattr(cuda, "load", lambda *_, **__: Kernel())
    launch._shape.cache_clear()
    (q, k, v, *slots), tree = operands(dtype=torch.bfloat16)
    parts = inside_products(*slots)
    for each in (slots, parts):
        launch.attend(q, k, v, *each, tree, scale=SCALE, first=0, compact=False)
    launch._shape.cache_clear()
    whole, part = launched
    assert whole[14:16] == (12 * 2 * 8, 2 * 8)  # slot_step, slot_row
    assert part[14:16] == (12 * 8 * 8, 8 * 8)
    assert part[4] - part[3] == 2 * 2 * 8
    odd = torch.zeros(3, 12, 2, 9, dtype=torch.bfloat16)[..., :8]
    off = torch.zeros(3 * 12 * 2 * 8 + 1, dtype=torch.bfloat16)[1:].view(3, 12, 2, 8)
    for pair, reason in (
        ((parts[0], slots[1]), "strides [768, 64, 8, 1] of keys, [192, 16, 8, 1] of values; equal are served"),
        ((slots[0], parts[1]), "strides [192, 16, 8, 1] of keys, [768, 64, 8, 1] of values; equal are served"),
        ((slots[0][1:], slots[1]), "[2, 12, 2, 8] of keys, [3, 12, 2, 8] of values; equal ones are served"),
        ((slots[0].transpose(2, 3).contiguous().transpose(2, 3), slots[1]), "k_slots: strides [192, 16, 1, 2]; whole"),
        ((slots[0], odd), "v_slots: strides [216, 18, 9, 1]; whole rows"),
        ((off, slots[1]), "k_slots: strides [192, 16, 8, 1]; whole rows of 16-byte pieces"),
    ):
        with pytest.raises(ValueError, match=re.escape(reason)):
            launch.attend(q, k, v, *pair, tree, scale=SCALE, first=0, compact=False)


def test_the_library_has_every_operator_once():
    assert operators.prefix_attention is attention.prefix_attention
    with pytest.raises(RuntimeError, match="widebeam::prefix_attention"):
        operators.register("prefix_attention(Tensor q) -> Tensor", lambda q: q, lambda q: q)
