"""Products as the engine calls them: torch's own, wherever no algorithm was chosen."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional

from app.ops.product import Scales, choice, lt, product, product_into, product_onto, reference, scaled
from app.ops.product.operators import _whole
from tests.ops import nodes


def operands(n, k, m, dtype=torch.float32):
    made = torch.Generator().manual_seed(n)
    return tuple(torch.randn(*shape, generator=made).to(dtype) for shape in ((n, k), (m, k)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [0, 1, 7, 1500])
def test_without_a_choice_products_are_torchs_bit_by_bit(n, dtype):
    x, weight = operands(n, 24, 40, dtype)
    expected = functional.linear(x, weight)
    assert torch.equal(product(x, weight), expected)
    assert torch.equal(product(x.view(1, n, 24), weight), expected.view(1, n, 40))
    begin = torch.ones(n, 40, dtype=dtype)
    added = product_onto(begin, x, weight)
    assert added is begin
    assert torch.equal(added, torch.ones(n, 40, dtype=dtype).addmm_(x, weight.t()))
    out = torch.full((n + 2, 64), 7.0, dtype=dtype)
    product_into(out[1:-1, 8:48], x, weight)
    torch.testing.assert_close(out[1:-1, 8:48], expected)
    out[1:-1, 8:48] = 7.0
    assert (out == 7.0).all()


def test_8_bits_are_left_to_whoever_asks_where_no_algorithm_was_chosen():
    x, weight = (one.to(torch.float8_e4m3fn) for one in operands(2000, 32, 48))
    out = torch.full((2000, 48), 7.0, dtype=torch.bfloat16)
    scales = Scales(torch.ones(2000), torch.ones(48))
    assert scaled(x, weight, scales) is None
    assert scaled(x, weight, scales, out, onto=True) is None
    assert (out == 7.0).all()


def test_wrong_shapes_are_torchs_errors():
    x, weight = operands(3, 8, 5)
    for wrong in (
        lambda: product(x, weight[:, :7]),
        lambda: product_into(x, x, weight),
        lambda: product_onto(torch.zeros(3, 6), x, weight),
        lambda: product(x, weight.double()),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            wrong()


def test_an_export_sees_torchs_own_operators():
    class Model(torch.nn.Module):
        def forward(self, x, weight, state):
            product_into(state[0, : x.shape[0]], x, weight)
            return product_onto(product(x, weight), x, weight)

    rows = torch.export.Dim("rows", min=1, max=1 << 20)
    given = [torch.empty(*shape, device="meta") for shape in ((7, 8), (5, 8), (3, 1 << 20, 5))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own export, about itself
        program = torch.export.export(Model(), tuple(given), dynamic_shapes=({0: rows}, {}, {}), strict=False)
        graph = program.run_decompositions({}).graph
    names = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert any("mm" in name for name in names)
    assert not any("widebeam" in name for name in names)


def model(x, weight, state):
    """Products of each kind; state is changed."""
    product_into(state[0, : x.shape[0], 2:7], x, weight)
    added = product_onto(product(x, weight), x, weight)
    return added, product(x.view(1, *x.shape), weight)


def model_by_torch(x, weight, state):
    state[0, : x.shape[0], 2:7] = functional.linear(x, weight)
    added = functional.linear(x, weight).addmm_(x, weight.t())
    return added, functional.linear(x.view(1, *x.shape), weight)


def test_a_compiled_graph_has_one_node_each_and_looks_for_no_algorithm_before_it_runs(monkeypatch):
    monkeypatch.setattr(lt, "library", lambda: pytest.fail("of a CPU, and of a tracer, nobody asks"))
    given = (*operands(7, 8, 5), torch.zeros(3, 20, 9))
    assert nodes.compiled(model, given, model_by_torch) == ["product_into", "product", "product_onto", "product"]
    rows = {0: torch.export.Dim("rows", min=1, max=20)}
    assert nodes.exported(model, given, (rows, None, None), model_by_torch) == [], "torch's own, one each as well"


@pytest.mark.parametrize("rows", [0, 7])
def test_torch_finds_them_to_be_what_they_say(rows):
    x, weight = operands(rows, 8, 5)
    nodes.check("product", x, weight)
    nodes.check("product", x.view(1, rows, 8), weight)
    for out in (torch.zeros(rows, 5), torch.zeros(rows, 9)[:, 2:7]):
        nodes.check("product_into", out, x, weight)
        nodes.check("product_onto", out, x, weight)


def test_the_reference_adds_or_replaces():
    x, weight = operands(3, 8, 5)
    out = torch.ones(3, 5)
    reference.multiply(out, x, weight, None, onto=True)
    torch.testing.assert_close(out, 1 + x @ weight.t())
    reference.multiply(out, x, weight, None, onto=False)
    torch.testing.assert_close(out, x @ weight.t())


def test_rows_are_whole_where_each_begins_on_16_bytes():
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert _whole(x)
    assert _whole(x[:, 8:16])
    assert not _whole(x[:, 4:12]), "begins on 8 bytes"
    assert not _whole(torch.zeros(4, 60, dtype=torch.bfloat16)), "the second row does"
    assert not _whole(x.t())
    assert not _whole(x[:, ::2])


def test_nothing_is_chosen_where_there_is_no_library(monkeypatch):
    monkeypatch.setattr(choice.lt, "library", lambda: None)
    assert choice.choose([lambda: pytest.fail("nothing need be run")]) == ()
