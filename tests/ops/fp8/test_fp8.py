"""8-bit products against their definition in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from app.ops import fp8
from app.ops.fp8 import FP8
from app.ops.gated import gated

STEPS = 2.0**-4
"""Half of the step between neighbours of the format, as a share of a number: three bits of mantissa."""


def table():
    """Every finite number of the format."""
    return np.unique(torch.arange(256, dtype=torch.uint8).view(FP8).float().nan_to_num(0).numpy())


@given(
    arrays.arrays(
        np.float32, arrays.array_shapes(min_dims=2, max_dims=2, max_side=40),
        elements=st.floats(-(2.0**99), 2.0**99, width=32),
    )
)  # fmt: skip
def test_every_element_becomes_a_nearest_number_of_the_format(values):
    q, scale = fp8.quantise_rows(torch.from_numpy(values))
    exact = values.astype(np.float64) / np.maximum(scale.numpy().astype(np.float64)[:, None], 1e-300)
    found, numbers = q.float().numpy().astype(np.float64), table().astype(np.float64)
    nearest = np.abs(exact[..., None] - numbers).min(-1)
    assert (np.abs(exact - found) <= nearest * (1 + 1e-5) + 1e-4).all()
    assert np.isin(found, numbers).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_of_a_row_is_448_and_rows_do_not_touch_each_other(dtype):
    x = torch.tensor([[1.0, -2.0, 0.5, 0.0], [1000.0, 3.0, -1.0, 0.25], [0.0] * 4], dtype=dtype)
    q, scale = fp8.quantise_rows(x)
    assert q.float()[0].tolist() == [224, -448, 112, 0]
    assert q.float()[2].tolist() == [0] * 4
    assert scale[0].item() == pytest.approx(2 / 448)
    for row in range(3):
        alone = fp8.quantise_rows(x[row : row + 1])
        assert torch.equal(alone[0].view(torch.uint8), q[row : row + 1].view(torch.uint8))
        assert torch.equal(alone[1], scale[row : row + 1])


def test_nan_and_infinity_are_not_hidden():
    for bad in (float("nan"), float("inf")):
        x = torch.ones(1, 16)
        x[0, 3] = bad
        weight, scale = fp8.quantise_rows(torch.ones(16, 16))
        assert not torch.isfinite(fp8.linear(x, weight, scale)).any()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_product_is_that_of_the_rounded_operands(seed, bias):
    made = torch.Generator().manual_seed(seed)
    x, w = torch.randn(7, 48, generator=made).bfloat16(), torch.randn(32, 48, generator=made)
    b = torch.randn(32, generator=made).bfloat16() if bias else None
    weight, scale = fp8.quantise_rows(w)
    q, own = fp8.quantise_rows(x)
    exact = (q.double() * own.double()[:, None]) @ (weight.double() * scale.double()[:, None]).t()
    exact = exact if b is None else exact + b.double()
    found = fp8.linear(x, weight, scale, b)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-4).all()
    plain = x.double() @ w.double().t() + (0 if b is None else b.double())
    size = (x.double().abs() @ w.double().abs().t()).clamp_min(1)
    assert ((found.double() - plain).abs() <= 2.5 * STEPS * size).all()


def test_no_rows_give_no_rows():
    weight, scale = fp8.quantise_rows(torch.randn(32, 16))
    assert fp8.linear(torch.empty(0, 16), weight, scale).shape == (0, 32)


def test_a_gate_and_a_norm_in_8_bits_are_those_quantised():
    made = torch.Generator().manual_seed(1)
    both, weight = torch.randn(5, 48, generator=made).bfloat16(), torch.rand(24, generator=made).bfloat16()
    kept = both.clone()
    gate, up = both.chunk(2, 1)
    for found, rows in (
        (fp8.quantise_gated(gate, up), gated(gate, up)),
        (
            fp8.quantise_normed(gate.clone(), weight, 1e-6, up),
            torch.nn.functional.rms_norm(gate + up, (24,), weight, 1e-6),
        ),
        (fp8.quantise_normed(gate, weight, 1e-6), torch.nn.functional.rms_norm(gate, (24,), weight, 1e-6)),
    ):
        data, scale = fp8.quantise_rows(rows)
        assert torch.equal(found.q.view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(found.scale, scale)
    assert torch.equal(both, kept)


def test_rows_by_group_are_each_multiplied_by_the_matrix_of_their_group():
    made = torch.Generator().manual_seed(1)
    weight, scale = fp8.quantise_rows(torch.randn(4 * 32, 48, generator=made))
    rows = fp8.EightBits(*fp8.quantise_rows(torch.randn(9, 48, generator=made).bfloat16()))
    ends = torch.tensor([2, 2, 8, 9], dtype=torch.int32)
    found = fp8.grouped_linear(rows, weight.view(4, 32, 48), scale.view(4, 32), ends)
    assert found.dtype == torch.bfloat16
    for row, group in enumerate([0, 0, 2, 2, 2, 2, 2, 2, 3]):
        own = fp8.EightBits(rows.q[row : row + 1], rows.scale[row : row + 1])
        matrix = slice(32 * group, 32 * group + 32)
        expected = fp8.linear(own, weight[matrix], scale[matrix])
        torch.testing.assert_close(found[row : row + 1], expected, rtol=2**-7, atol=1e-4)


def test_rows_that_are_in_8_bits_already_give_the_same_product():
    made = torch.Generator().manual_seed(1)
    x = torch.randn(5, 48, generator=made).bfloat16()
    weight = fp8.quantise_rows(torch.randn(32, 48, generator=made))
    assert torch.equal(fp8.linear(fp8.EightBits(*fp8.quantise_rows(x)), *weight), fp8.linear(x, *weight))
