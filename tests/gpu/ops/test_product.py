"""Products by cuBLASLt's algorithms on a GPU: all that its heuristics name against float64, and what was chosen."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import RMSNorm

from app.engine.fp8 import Quantised, QuantisedRows, normed_after, product_into
from app.ops import fp8
from app.ops.product import Scales, choose, operators, product, product_onto, reference, scaled
from app.ops.product.choice import WORKSPACES
from app.ops.product.lt import Failed, Product, Shape, version
from app.ops.product.lt import product as described
from app.ops.product.table import LEAST, Chosen, Key, Table

DEVICE = torch.device("cuda", 0)
EIGHT = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, EIGHT)
SIZES = ((896, 896), (896, 3584), (2688, 896))
ROWS = (1, 33, 1023, 1024, 5000, 16384)


class Operands:
    """x [n, k], a matrix [m, k], and an out [n, m] whose rows lie apart, with numbers around them that must stay."""

    def __init__(self, n, m, k, dtype):
        made = torch.Generator(DEVICE).manual_seed(n + k)
        self.weight, self.scales = torch.randn(m, k, device=DEVICE, generator=made) * k**-0.5, None
        self.x = torch.randn(n, k, device=DEVICE, generator=made)
        out = torch.bfloat16 if dtype == EIGHT else dtype
        if dtype == EIGHT:
            (self.x, own), (self.weight, scale) = (fp8.quantise_rows(one.bfloat16()) for one in (self.x, self.weight))
            self.scales = Scales(own, scale)
        else:
            self.x, self.weight = self.x.to(dtype), self.weight.to(dtype)
        self.whole = torch.randn(n + 2, m + 64, device=DEVICE, generator=made).to(out)
        self.begin = self.whole.clone()
        self.out = self.whole[1:-1, 32:-32]
        wide_x, wide_weight = self.x.double(), self.weight.double()
        if self.scales is not None:
            wide_x, wide_weight = (
                a * s.double().unsqueeze(1) for a, s in zip((wide_x, wide_weight), self.scales, strict=True)
            )
        self.exact = wide_x @ wide_weight.t()

    @property
    def places(self):
        return self.x.data_ptr(), self.weight.data_ptr(), self.out.data_ptr()

    def shape(self, dtype):
        (n, k), m = self.x.shape, self.weight.shape[0]
        return Shape(0, dtype, n, m, k, k, k, self.out.stride(0))

    def check(self, onto, by_torch=False):
        """The sum is exact up to the rounding of out and of its parts, in 8 bits of the tensor cores' sums too; nothing
        else changed.
        by_torch: it may sum parts of it in 16 bits."""
        torch.cuda.synchronize()
        exact = self.exact + self.begin[1:-1, 32:-32].double() if onto else self.exact
        step, loose = (2.0**-11 if self.out.dtype == torch.float16 else 2.0**-8), 2.0**-13
        if self.scales is not None:  # tensor cores keep 14 bits of an unfinished sum, to which they add 32 products
            step, loose = 2.0**-7, 2.0**-9 + 2.0**-12 * self.x.shape[1] / 32
        if by_torch:
            step, loose = 4 * step, loose + 2.0**-6
        apart = (self.out.double() - exact).abs()
        size = exact.abs() + (self.exact.abs() if onto else 0)  # a product is rounded, and then the sum
        assert bool((apart <= step * size + loose).all()), float((apart - step * size).max())
        self.out.copy_(self.begin[1:-1, 32:-32])
        assert torch.equal(self.whole, self.begin)


def named(m, k, dtype, n=16384):
    made = described(Shape(0, dtype, n, m, k, k, k, m))
    return tuple(dict.fromkeys(one for most in WORKSPACES for one in made.algorithms(most)))


@pytest.fixture
def table(monkeypatch):
    """A process that has chosen nothing, and how often it launches."""
    made, launch = Table(), Product.launch
    made.launched = 0

    def counted(*args, **how):
        made.launched += 1
        return launch(*args, **how)

    monkeypatch.setattr(operators, "TABLE", made)
    monkeypatch.setattr(Product, "launch", counted)
    return made


def test_there_is_a_library():
    assert version() >= 120000


@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_algorithm_gives_the_product_by_any_rows_that_it_takes(dtype, size, onto):
    m, k = size
    algorithms = named(m, k, dtype)
    assert algorithms
    for n in ROWS:
        given = Operands(n, m, k, dtype)
        made = described(given.shape(dtype))
        taken = 0
        for one in algorithms:
            if made.launched(one, *given.places, onto=onto, scales=_places(given.scales)):
                given.check(onto)
                taken += 1
        assert taken or n < LEAST, f"none of {len(algorithms)} serves {n} rows"


def _places(scales):
    return None if scales is None else tuple(one.data_ptr() for one in scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_chosen_multiplies_from_its_rows_on_and_torch_below_them(table, dtype):
    m, k = 896, 896
    for onto in (False, True):
        table.put(Key(0, dtype, m, k, onto), Chosen(named(m, k, dtype)[-1], 2048))
    for n, chosen in ((LEAST, 0), (2047, 0), (2048, 1), (5000, 1)):
        for onto in (False, True):
            given, before = Operands(n, m, k, dtype), table.launched
            if dtype == EIGHT:
                found = scaled(given.x, given.weight, given.scales, given.out, onto=onto)
                assert (found is None) == (not chosen)
                if found is None:
                    continue
            elif onto:
                product_onto(given.out, given.x, given.weight)
            else:
                product_into(given.out, given.x, given.weight)
            assert table.launched == before + chosen
            given.check(onto, by_torch=not chosen)
    if dtype != EIGHT:
        given = Operands(4096, m, k, dtype)
        given.out.copy_(product(given.x, given.weight))
        given.check(onto=False)


def test_operands_that_an_algorithm_does_not_take_are_torchs(table):
    given = Operands(2048, 896, 896, torch.bfloat16)
    table.put(Key(0, torch.bfloat16, 896, 896, onto=False), Chosen(named(896, 896, torch.bfloat16)[0]))
    apart = torch.zeros(2048, 900, dtype=torch.bfloat16, device=DEVICE)  # rows on 8 bytes
    apart[:, 2:898] = given.x
    product_into(given.out, apart[:, 2:898], given.weight)
    given.check(onto=False, by_torch=True)
    assert table.launched == 0


@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, EIGHT])
def test_a_captured_product_reads_what_is_there_when_it_is_replayed(dtype, onto):
    given, other = (Operands(n, 896, 3584, dtype) for n in (5000, 5000))
    other.x.copy_(other.x.flip(0))
    if dtype == EIGHT:
        other.scales.x.copy_(other.scales.x.flip(0))
    other.exact = other.exact.flip(0)
    made = described(given.shape(dtype))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for one in named(896, 3584, dtype)[:6]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            made.launch(one, *given.places, onto=False, scales=_places(given.scales))
            torch.cuda.synchronize()
            given.out.copy_(given.begin[1:-1, 32:-32])
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(2):
                made.launch(one, *given.places, onto=onto, scales=_places(given.scales))
            graph.capture_end()
            for operands in (other, given):
                kept = given.x.clone(), None if given.scales is None else given.scales.x.clone()
                given.x.copy_(operands.x)
                if dtype == EIGHT:
                    given.scales.x.copy_(operands.scales.x)
                begin = given.begin[1:-1, 32:-32].double()
                graph.replay()
                torch.cuda.synchronize()
                exact = 2 * operands.exact + begin if onto else operands.exact
                apart = (given.out.double() - exact).abs()
                size = 2 * operands.exact.abs() + begin.abs()
                assert bool((apart <= 2.0**-6 * size + 2.0**-5).all()), float(apart.max())
                given.out.copy_(given.begin[1:-1, 32:-32])
                assert torch.equal(given.whole, given.begin)
                given.x.copy_(kept[0])
                if dtype == EIGHT:
                    given.scales.x.copy_(kept[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, EIGHT])
def test_two_threads_on_two_streams_share_a_product_and_nothing_else(dtype):
    both = [Operands(4096, 896, 896, dtype) for _ in range(2)]
    if dtype == EIGHT:  # the same rows by other scales
        both[1].scales = Scales(both[1].scales.x * 3, both[1].scales.weight * 2)
        both[1].exact = both[1].exact * 6
    else:
        both[1].x.mul_(2)
        both[1].exact = both[1].exact * 2
    made, wrong = described(both[0].shape(dtype)), []
    algorithms = named(896, 896, dtype)[:4]
    torch.cuda.synchronize()

    def work(given):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(60):
                    places = _places(given.scales)
                    made.launch(algorithms[turn % len(algorithms)], *given.places, onto=False, scales=places)
                    torch.cuda.current_stream().synchronize()
                    apart = (given.out.double() - given.exact).abs()
                    if not bool((apart <= 2.0**-6 * given.exact.abs() + 2.0**-4).all()):
                        wrong.append((turn, float(apart.max())))
                torch.cuda.current_stream().synchronize()
        except Failed as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(one,)) for one in both]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


def test_a_choice_is_measured_once_and_then_multiplies(table):
    given = Operands(16384, 896, 896, torch.bfloat16)
    eight = Operands(16384, 896, 896, EIGHT)

    def run():
        product(given.x, given.weight)
        product_onto(given.out, given.x, given.weight)
        scaled(eight.x, eight.weight, eight.scales, eight.out, onto=True)

    found = choose([run], table)
    torch.cuda.synchronize()
    assert [(one.key.dtype, one.key.onto, one.at) for one in found] == [
        (torch.bfloat16, False, 16384), (torch.bfloat16, True, 16384), (EIGHT, True, 16384)
    ]  # fmt: skip
    assert all(0 < one.now <= one.before for one in found)
    assert found[2].chosen.algorithm is not None, "8 bits gain a pass over the memory"
    assert choose([run], table) == ()
    before, chosen = table.launched, sum(one.chosen.algorithm is not None for one in found)
    run()
    assert table.launched == before + chosen
    given.out.copy_(given.begin[1:-1, 32:-32])
    product_onto(given.out, given.x, given.weight)
    given.check(onto=True)
    eight.out.copy_(eight.begin[1:-1, 32:-32])
    before = table.launched
    assert scaled(eight.x, eight.weight, eight.scales, eight.out, onto=True) is eight.out
    assert table.launched == before + 1
    eight.check(onto=True)


def test_a_norm_behind_a_sum_in_8_bits_is_the_same_by_one_product(table):
    given, norm = (
        Operands(4096, 896, 896, EIGHT),
        RMSNorm(896, 1e-6, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False),
    )
    weight = Quantised(given.weight, given.scales.weight)
    rows = QuantisedRows(fp8.EightBits(given.x, given.scales.x))
    x = given.out.clone()
    expected = normed_after(x, rows, weight, norm, weight)
    table.put(Key(0, EIGHT, 896, 896, onto=True), Chosen(named(896, 896, EIGHT)[0]))
    found = normed_after(given.out, rows, weight, norm, weight)
    assert table.launched == 1
    torch.testing.assert_close(given.out, x, rtol=2.0**-6, atol=2.0**-6)  # torch rounds the product before the sum
    wide = [one.rows.q.double() * one.rows.scale.double().unsqueeze(1) for one in (found, expected)]
    assert float((wide[0] - wide[1]).norm() / wide[1].norm()) < 0.05
    given.check(onto=True)


@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ways_of_torch_give_the_product_too(dtype, onto):
    given = Operands(1030, 896, 896, dtype)
    reference.multiply(given.out, given.x, given.weight, given.scales, onto=onto)
    given.check(onto, by_torch=True)
