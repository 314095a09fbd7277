"""The product that gates itself: what it takes, and its text on a CPU."""

from __future__ import annotations

import pytest
import torch

from app.ops import cuda
from app.ops.gated import gated_product, gates_itself, product
from app.ops.gated.operators import _gated_product
from tests.ops.gated import emulated

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-10}


def operands(rows, width, depth, dtype, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, depth, generator=generator)
    weight = torch.randn(2 * width, depth, generator=generator) / depth**0.5
    return x.to(dtype), weight.to(dtype)


def definition(x, weight):
    gate, up = (x.double() @ weight.double().t()).chunk(2, 1)
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_silu_of_one_half_times_the_other(dtype):
    x, weight = operands(5, 24, 16, dtype)
    found = gated_product(x, weight)
    assert found.is_contiguous()
    torch.testing.assert_close(
        found.double(), definition(x, weight), rtol=0.03, atol=2e-2 if dtype != torch.float32 else 1e-5
    )
    assert torch.equal(found, _gated_product(x, weight))  # as a device without our kernels has it


def test_no_rows_give_no_rows():
    assert gated_product(torch.empty(0, 8), torch.empty(32, 8)).shape == (0, 16)


def test_an_export_keeps_it_as_one_node_for_any_number_of_rows():
    class Gate(torch.nn.Module):
        def forward(self, x, weight):
            return gated_product(x, weight)

    rows = {"x": {0: torch.export.Dim("rows")}, "weight": None}
    made = torch.export.export(Gate(), (torch.zeros(3, 8), torch.zeros(32, 8)), dynamic_shapes=rows)
    nodes = [node for node in made.graph.nodes if node.op == "call_function" and "widebeam" in str(node.target)]
    assert [str(node.target) for node in nodes] == ["widebeam.gated_product.default"]
    x, weight = operands(5, 16, 8, torch.float32)
    assert torch.equal(made.module()(x, weight), gated_product(x, weight))


def test_a_cpu_has_no_kernel():
    assert product.unfit(torch.zeros(1, 8), torch.zeros(2, 8)) is not None


@pytest.fixture
def hopper(monkeypatch):
    """Every device is one of sm_90 with our kernels."""
    monkeypatch.setattr(cuda, "unfit", lambda _: None)
    monkeypatch.setattr(cuda, "architecture", lambda _: "sm_90")


def test_what_it_takes(hopper, monkeypatch):
    x, weight = torch.zeros(2048, 64, dtype=torch.bfloat16), torch.zeros(256, 64, dtype=torch.bfloat16)
    unfit = product.unfit
    assert unfit(x, weight) is None
    assert unfit(x.half(), weight.half()) is None
    assert unfit(torch.zeros(2048, 72, dtype=x.dtype)[:, :64], weight) is None  # rows may lie apart
    assert "bfloat16 and float16" in unfit(x.float(), weight.float())
    assert "bfloat16 and float16" in unfit(x, weight.half())
    assert unfit(x[:1], weight) is None, "an answer does not depend on how many are in its batch"
    assert "0 rows" in unfit(x[:0], weight)
    assert "multiples of 128" in unfit(x, weight[:192])
    assert "multiples of 128 and 64" in unfit(x[:, :32], weight[:, :32])
    assert "belong together" in unfit(x[:, :32], weight)
    assert "16 bytes" in unfit(torch.zeros(2048, 68, dtype=x.dtype)[:, :64], weight)
    assert "16 bytes" in unfit(torch.zeros(2048, 72, dtype=x.dtype)[:, 1:65], weight)
    assert "16 bytes" in unfit(x, torch.zeros(64, 256, dtype=x.dtype).t())
    assert "16 bytes" in unfit(x[:1].expand(2048, 64), weight)
    assert "33554432 bytes of weights" not in (product.shape_unfit(2048, 2048, 4096) or "")
    assert "up to 33554432" in product.shape_unfit(2048, 2176, 4096)
    assert gates_itself(x, weight)
    assert not gates_itself(x[:0], weight)
    monkeypatch.setattr(cuda, "architecture", lambda _: "sm_100")
    assert "sm_90" in unfit(x, weight)


@pytest.mark.parametrize(("rows", "width", "processors", "blocks"), [
    (1, 128, 132, 2), (2048, 128, 132, 16), (2049, 128, 132, 18), (16384, 3584, 132, 132), (2048, 256, 7, 6),
])  # fmt: skip
def test_a_launch_has_a_block_for_each_processor_or_tile(rows, width, processors, blocks, monkeypatch):
    seen = []
    monkeypatch.setattr(
        product, "_kernel", lambda _, *, bf16: type("K", (), {"launch": lambda _, *given: seen.append(given)})()
    )
    monkeypatch.setattr(product, "_processors", lambda _: processors)
    monkeypatch.setattr(product, "tensor_map", lambda x, *box: (*x.shape, *box))
    x = torch.zeros(rows, 64, dtype=torch.bfloat16)
    out = product.gated_product(x, torch.zeros(2 * width, 64, dtype=torch.bfloat16))
    assert seen == [(blocks, 384, (rows, 64, 128, 64), (2 * width, 64, 128, 64), out.data_ptr(), rows, width, 64)]
    assert out.shape == (rows, width)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    if emulated.COMPILER is None:
        pytest.skip("there is no C++ compiler")
    return {
        dtype: emulated.compiled(tmp_path_factory.mktemp("emulated"), bf16=dtype == torch.bfloat16)
        for dtype in ROUNDING
    }


@pytest.mark.parametrize(("rows", "width", "depth", "blocks", "dtype"), [
    (260, 256, 128, 2, torch.bfloat16),  # four tiles a cluster; the last rows are four
    (40, 128, 320, 2, torch.float16),  # the second block of the cluster has no row
    (200, 640, 64, 2, torch.bfloat16),  # a stage a tile, and more tiles than the ring has places
    (300, 128, 192, 6, torch.bfloat16),  # the third cluster has no tile
    (10, 256, 320, 4, torch.bfloat16),  # a step of few requests
])  # fmt: skip
def test_the_kernels_text_is_the_definition_in_whatever_order_threads_and_copies_come(
    programs, rows, width, depth, blocks, dtype
):
    x, weight = operands(rows, width, depth, dtype, seed=rows)
    x[3] *= torch.nan
    x[9, 0] = torch.inf
    found = emulated.gated_product(programs[dtype], x, weight, blocks=blocks, seed=depth)
    expected = definition(x, weight)
    assert not found[3].isfinite().any()
    assert not found[9].isfinite().any()
    plain = torch.ones(rows, dtype=torch.bool)
    plain[[3, 9]] = False
    assert found[plain].isfinite().all()
    torch.testing.assert_close(found[plain].double(), expected[plain], rtol=2 * ROUNDING[dtype], atol=1e-5)
