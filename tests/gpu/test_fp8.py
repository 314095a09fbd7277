"""Precision fp8 on an H200: the kernel bit by bit, the product, and whole answers against the emulation on a CPU."""

from __future__ import annotations

import pytest
import torch

from app.engine.fp8 import install
from app.engine.moe import Mixture, Routing
from app.ops import fp8
from app.ops.fp8 import reference
from app.ops.gated import gated
from tests.gpu.alike import POLICIES, USERS, K, root_of
from tests.served.process import serving

DEVICE = torch.device("cuda", 0)
APART, SHARED = 0.5, 0.7
"""How far apart scores of one item may be, in nats, and which share of a list must be the same."""


@pytest.mark.parametrize("shape", [(1, 8), (7, 16), (33, 192), (300, 896), (1024, 2816), (5, 8192)])
@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e4])
def test_rows_are_quantised_bit_by_bit_as_they_are_defined(shape, spread):
    made = torch.Generator().manual_seed(shape[1])
    x = (torch.randn(shape, generator=made) * spread).bfloat16()
    x[-1] = 0
    q, scale = reference.quantise_rows(x)
    on_gpu = fp8.quantise_rows(x.to(DEVICE))
    assert torch.equal(on_gpu[0].cpu().view(torch.uint8) & 0x7F, q.view(torch.uint8) & 0x7F)
    assert torch.equal(on_gpu[0].cpu().float(), q.float())
    assert torch.equal(on_gpu[1].cpu(), scale)


def test_rows_that_lie_apart_and_bad_numbers_are_quantised_as_defined():
    x = torch.randn(9, 64).bfloat16()
    apart = torch.zeros(9, 80, dtype=torch.bfloat16, device=DEVICE)
    apart[:, 8:72] = x.to(DEVICE)
    assert torch.equal(fp8.quantise_rows(apart[:, 8:72])[0].cpu().float(), reference.quantise_rows(x)[0].float())
    x[2, 5], x[4, 6] = float("nan"), float("inf")
    weight, scale = fp8.quantise_rows(torch.randn(32, 64, device=DEVICE))
    out = fp8.linear(x.to(DEVICE), weight, scale)
    assert torch.isfinite(out).all(1).tolist() == [row not in {2, 4} for row in range(9)]


@pytest.mark.parametrize("shape", [(1, 8), (33, 192), (300, 896), (257, 3584), (3, 1408), (2, 32768)])
def test_a_gate_in_8_bits_is_the_gate_quantised_bit_by_bit(shape):
    both = 4 * torch.randn(shape[0], 2 * shape[1], device=DEVICE).bfloat16()
    both[-1] = 0
    expected = fp8.quantise_rows(gated(*both.chunk(2, 1)))
    found = fp8.quantise_gated(*both.chunk(2, 1))
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("shape", [(1, 8), (33, 192), (300, 896), (257, 3584), (3, 1408)])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_a_norm_in_8_bits_is_the_norm_quantised_up_to_a_neighbour(shape, spread):
    x, weight = (torch.randn(shape, device=DEVICE) * spread).bfloat16(), torch.rand(shape[1], device=DEVICE).bfloat16()
    exact = torch.nn.functional.rms_norm(x.double(), shape[1:], weight.double(), 1e-6)
    found = fp8.quantise_normed(x, weight, 1e-6)
    apart = (found.q.double() * found.scale.double().unsqueeze(1) - exact).abs()
    # half a step of 8 bits and of bfloat16, and half the smallest step of the row
    assert bool((apart <= (2.0**-4 + 2.0**-8) * exact.abs() + 2.0**-10 * found.scale.double().unsqueeze(1)).all())


@pytest.mark.parametrize("shape", [(1, 8), (300, 896), (257, 3584)])
def test_a_sum_and_its_norm_in_8_bits_are_those_in_two_steps_bit_by_bit(shape):
    x, added = (torch.randn(shape, device=DEVICE).bfloat16() for _ in range(2))
    weight, total = torch.rand(shape[1], device=DEVICE).bfloat16(), x + added
    expected = fp8.quantise_normed(total, weight, 1e-6)
    found = fp8.quantise_normed(x, weight, 1e-6, added)
    assert torch.equal(x, total)
    assert torch.equal(found.q.view(torch.uint8), expected.q.view(torch.uint8))
    assert torch.equal(found.scale, expected.scale)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(1, 16, 16), (17, 192, 192), (512, 896, 3584), (4096, 3584, 896)])
def test_a_product_is_the_emulations_up_to_its_sums(sizes, bias):
    n, k, m = sizes
    made = torch.Generator().manual_seed(m)
    x, w = torch.randn(n, k, generator=made).bfloat16(), torch.randn(m, k, generator=made)
    b = torch.randn(m, generator=made).bfloat16() if bias else None
    weight, scale = reference.quantise_rows(w)
    expected = reference.linear(*reference.quantise_rows(x), weight, scale, b, torch.bfloat16).float()
    found = fp8.linear(x.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE), None if b is None else b.to(DEVICE))
    assert found.dtype == torch.bfloat16
    apart = (found.cpu().float() - expected).abs()
    # tensor cores keep 14 bits of an unfinished sum, to which they add 32 products at a time
    bound = 2.0**-7 * expected.abs() + 2.0**-9 + 2.0**-12 * k**0.5 * k / 32
    assert (apart <= bound).all(), (apart / bound).max()


@pytest.mark.parametrize("sizes", [(5, 53, 64, 96), (700, 8, 192, 128), (49152, 53, 1408, 2816)])
def test_rows_by_group_are_multiplied_as_matrix_by_matrix(sizes):
    n, groups, k, m = sizes
    owner = torch.randint(0, groups - 1, (n,), device=DEVICE).sort().values
    ends = owner.bincount(minlength=groups).cumsum(0).to(torch.int32)
    weight, scale = fp8.quantise_rows(torch.randn(groups * m, k, device=DEVICE))
    rows = fp8.EightBits(*fp8.quantise_rows(torch.randn(n, k, device=DEVICE).bfloat16()))
    found = fp8.grouped_linear(rows, weight.view(groups, m, k), scale.view(groups, m), ends)
    for group in range(0, groups, 7):
        mine = owner == group
        own = fp8.EightBits(rows.q[mine], rows.scale[mine])
        expected = fp8.linear(own, weight[group * m : group * m + m], scale[group * m : group * m + m])
        bound = 2.0**-7 * expected.float().abs() + 2.0**-9 + 2.0**-13 * k**0.5 * k / 32
        assert bool(((found[mine].float() - expected.float()).abs() <= bound).all())


@pytest.mark.parametrize("experts", [False, True])
def test_a_mixture_in_8_bits_is_captured_and_near_the_one_in_bfloat16(experts):
    part = Mixture(Routing(9, 3, 64, shared=64 if experts else 0), 128).to(DEVICE, torch.bfloat16)
    for parameter in part.parameters():
        parameter.requires_grad_(requires_grad=False).normal_().mul_(parameter.shape[-1] ** -0.5)
    x, zero = torch.randn(700, 128, device=DEVICE).bfloat16(), torch.zeros(700, 128, device=DEVICE).bfloat16()
    expected = part(x, zero.clone()).float()
    for name in part.projections():
        install(part, name, *fp8.quantise_rows(getattr(part, name)))
    part(x, zero.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = part(x, zero.clone())
    graph.replay()
    torch.cuda.synchronize()
    assert (found.float() - expected).norm() < 0.1 * expected.norm()


def test_a_product_is_captured_into_a_cuda_graph():
    x = torch.randn(64, 192, device=DEVICE).bfloat16()
    weight, scale = fp8.quantise_rows(torch.randn(384, 192, device=DEVICE))
    expected = fp8.linear(x, weight, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fp8.linear(x, weight, scale)
    x.copy_(x.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected.flip(0))


def answers(root, device):
    found = {}
    with serving(root, "--device", device) as server:
        server.until(lambda: server.client.get("/readyz").status_code == 200, "ready", 240)
        for user in USERS:
            for policy in POLICIES:
                found[user["id"], policy] = server.items(*user["history"], k=K, policy=policy)
        status = server.status()
    return found, status


def test_answers_in_fp8_from_a_gpu_are_those_of_the_emulation(tmp_path):
    expected, _ = answers(root_of(tmp_path / "cpu", "fp8"), "cpu")
    found, status = answers(root_of(tmp_path / "gpu", "fp8"), "cuda")
    assert status["kernels"] == "cuda"
    for asked, answer in expected.items():
        here, there = dict(answer), dict(found[asked])
        both = here.keys() & there.keys()
        assert len(found[asked]) == len(answer)
        assert len(both) >= SHARED * len(here) - 1, (asked, len(both))
        assert max(abs(here[item] - there[item]) for item in both) < APART, asked
