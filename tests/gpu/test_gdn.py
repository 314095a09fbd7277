"""The fused replay kernel on a GPU: exact against a state for every beam, capturable, and what a model serves with."""

import pytest
import torch

from app.config import Limits
from app.ops import gdn
from app.ops.gdn import around
from app.ops.gdn.projection import shared_projection
from bench._gdn_kernel import call, check, make_inputs
from bench._gdn_paths import PATHS, unmarked
from bench.gdn_accuracy import BAR, GEOMETRIES
from tests.engine import hybrid, tiny
from tests.engine.families.test_qwen import random_paths

BIG = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
PROMPTS = [(3, 4, 5, 6, 7), (9,), tuple(range(3, 23)), (9, 8)]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: "x".join(map(str, g)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_within_the_bar_of_a_state_for_every_beam(geometry, dtype):
    for out, portable in ((torch.float32, False), (torch.float32, True), (dtype, False)):
        found = check(geometry, [65, 1, 37, 8], 6, out, seed=2, dtype=dtype, ordered=False, portable=portable)
        assert found["error"] < BAR
        assert found["largest"] > 0.02


def test_both_transitions_and_empty_requests():
    for compact in (False, True):
        found = check(GEOMETRIES[1], [40, 0, 9, 0], 4, torch.float32, seed=3, dtype=torch.bfloat16, compact=compact)
        assert found["error"] < BAR


def test_what_tombstones_hold_stays_with_them():
    x = make_inputs(GEOMETRIES[0], [13, 20], 3, seed=4, dtype=torch.bfloat16)
    for t in range(2):
        call(x, t, torch.float32)
    clean = call(x, 2, torch.float32)
    dead = torch.tensor([3, 12, 13, 32], device="cuda")
    live = torch.tensor([n for n in range(33) if n not in dead.tolist()], device="cuda")
    x.windows[2][dead] = torch.nan
    x.ancestry[2][dead] = torch.tensor([2**30, -5], dtype=torch.int32, device="cuda")
    assert torch.equal(call(x, 2, torch.float32)[live], clean[live])


@pytest.mark.parametrize("geometry", [GEOMETRIES[1], GEOMETRIES[7]])
def test_keys_come_from_the_window_or_lie_in_their_record(geometry):
    x, other = (make_inputs(geometry, [13, 40], 3, seed=7, dtype=torch.bfloat16) for _ in range(2))
    other.records.k.fill_(torch.nan)
    for t in range(3):
        in_place = call(x, t, torch.float32)
        from_window = gdn.fused_replay(
            other.windows[t], other.log_alpha[t], other.beta[t], other.packed, other.records, key_heads=geometry.hk,
            row_start=other.row_start, ancestry=other.ancestry[t], into=t,
        )  # fmt: skip
        assert torch.equal(in_place, from_window)
    for name, one, two in zip(gdn.Records._fields, x.records, other.records, strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("geometry", [GEOMETRIES[0], GEOMETRIES[7]])
def test_a_delta_beyond_float16_is_held_at_its_largest_and_nan_stays(geometry):
    x = make_inputs(geometry, [20], 1, seed=8, dtype=torch.bfloat16)
    x.windows[0][3, -geometry.v :] = 1e38
    x.windows[0][4, -geometry.v :] = -1e38
    x.windows[0][5, -1] = torch.nan
    call(x, 0, torch.float32)
    delta = x.records.delta[0, :, -1]
    assert (delta[3] == 65504).all()
    assert (delta[4] == -65504).all()
    assert delta[5].isnan().tolist() == [False] * (geometry.v - 1) + [True]
    assert delta[[0, 1, 2, *range(6, 20)]].isfinite().all()


def test_a_launch_is_captured_into_a_graph():
    x = make_inputs(GEOMETRIES[0], [33, 64], 2, seed=5, dtype=torch.bfloat16)
    expected = [call(x, t, torch.float32) for t in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call(x, t, torch.float32) for t in range(2)]
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_torchs_projection_is_captured_and_follows_the_rows_of_the_batch():
    generator = torch.Generator("cuda").manual_seed(9)
    x = torch.randn(300, 2, 2, 24, generator=generator, device="cuda")
    s_ctx = torch.randn(5, 6, 24, 20, generator=generator, device="cuda")
    start = torch.zeros(6, dtype=torch.int32, device="cuda")
    shared_projection(x, s_ctx, start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = shared_projection(x, s_ctx, start)
    for widths in ([60] * 5, [300, 0, 0, 0, 0], [0, 1, 64, 65, 129], [0, 0, 0, 0, 7]):
        start[1:] = torch.tensor(widths).cumsum(0).cuda()
        graph.replay()
        exact = shared_projection(x.cpu(), s_ctx.cpu(), start.cpu())
        torch.testing.assert_close(found.cpu()[: sum(widths)], exact[: sum(widths)], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # of what the peers import
@pytest.mark.parametrize(("path", "needs"), [("full", "fla"), ("replayssm", "triton")])
def test_what_the_bench_compares_with_computes_the_same(path, needs):
    pytest.importorskip(needs)
    x = make_inputs(GEOMETRIES[1], [16, 5], 4, seed=6, dtype=torch.bfloat16)
    with torch.no_grad():
        ours, theirs = (PATHS[name](x, 4)(unmarked) for name in ("onela", path))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.float() - b.float()).abs().max() < 2 * torch.finfo(torch.bfloat16).eps * a.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_convolution_kernel_is_torchs_operators(size, dtype):
    generator = torch.Generator("cuda").manual_seed(size)
    rows, d, requests, steps = 37, 264, 3, 6

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    product = normal(rows, d + 24)
    x, weight, tail, slots = product[:, :d], normal(d, size), normal(requests, size - 1, d), normal(steps, rows + 5, d)
    request = torch.arange(rows, device="cuda").mul(requests).div(rows, rounding_mode="floor").int()
    for columns in range(1, steps):
        tree = torch.randint(0, rows, (rows, columns), generator=generator, device="cuda", dtype=torch.int32)
        tree[5], tree[6] = 2**30, -7  # tombstones
        for compact in (False, True):
            how = {"first": 1, "compact": compact}
            assert around.convolution_fits(x, weight, tail, slots)
            fused = gdn.window_convolution(x, weight, tail, slots, request=request, ancestry=tree, **how)
            host = (y.cpu().float() for y in (x, weight, tail, slots))
            exact = gdn.window_convolution(*host, request=request.cpu(), ancestry=tree.cpu(), **how)
            assert_an_ulp(fused, exact)
            key = normal(rows, 40)
            rest = gdn.window_convolution(x, weight, tail, slots, request=request, ancestry=tree, key=key, **how)
            assert torch.equal(key, fused[:, 40:80])
            assert torch.equal(rest[:, :40], fused[:, :40])
            assert torch.equal(rest[:, 80:], fused[:, 80:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_of_gates_and_norm_are_torchs_operators(dtype):
    generator = torch.Generator("cuda").manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    ba, a_log, dt_bias = 9 * normal(33, 8), normal(4), normal(4)
    assert around.fits(ba.contiguous(), a_log, dt_bias)
    for fused, exact in zip(
        gdn.decay_and_beta(ba, a_log, dt_bias), gdn.decay_and_beta(ba.cpu(), a_log.cpu(), dt_bias.cpu()), strict=True
    ):
        torch.testing.assert_close(fused.cpu(), exact, rtol=2e-6, atol=1e-7)
    for width in (4, 128, 260):
        o, weight = normal(21, 4, width).float(), normal(width)
        z = normal(21, 8 + 4 * width)[:, 8:].view(21, 4, width)
        assert around.norm_fits(o, z, weight)
        exact = gdn.gated_norm(o.cpu(), z.cpu().float(), weight.cpu().float(), 1e-6)
        assert_an_ulp(gdn.gated_norm(o, z, weight, 1e-6), exact)


def assert_an_ulp(found, exact):
    """16-bit rounding of what float32 arithmetic gives, up to its own last digits."""
    error = (found.cpu().float() - exact).abs()
    assert (error <= torch.finfo(found.dtype).eps * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_model_with_the_kernel_answers_as_with_torchs_operators(precision, tmp_path, monkeypatch):
    hybrid.write(tmp_path, **BIG)
    limits = Limits(widths=(64,) * 3, rows=256, batch=4, context=24)
    engine = hybrid.engine(tmp_path, limits=limits, precision=precision, device=torch.device("cuda"))
    contexts = tiny.contexts
    monkeypatch.setattr(
        tiny, "contexts", lambda *x: {k: type(v)(*(y.cuda() for y in v)) for k, v in contexts(*x).items()}
    )
    rows = tiny.rows
    monkeypatch.setattr(tiny, "rows", lambda *x, **how: on_gpu(rows(*x, **how)))
    launches = []
    right = gdn.fused_replay
    monkeypatch.setattr(gdn, "fused_replay", lambda *x, **how: launches.append(1) or right(*x, **how))
    fused = outputs(engine, limits)
    assert len(launches) == 4, "two layers, two steps"
    monkeypatch.setattr(gdn, "unfit", lambda *x, **how: "not today")
    plain = outputs(engine, limits)
    assert len(launches) == 4
    for a, b in zip(fused, plain, strict=True):
        error = (a - b).abs().max() / b.std()
        assert error < (0.3 if precision == "bfloat16" else 0.05)


def on_gpu(rows):
    moved = {name: getattr(rows, name).cuda() for name in ("codes", "request", "row_start", "ancestry")}
    return rows._replace(**moved)


def outputs(engine, limits):
    paths = random_paths(widths=[20, 1, 30, 13])
    arena = engine.new_arena(limits)
    first = engine.encode(tiny.contexts(engine, PROMPTS), arena).logits
    steps, widths = [], [len(p) for p in paths]
    codes = torch.cat([torch.from_numpy(p) for p in paths])
    for t in (2, 3):
        own = torch.arange(sum(widths)).unsqueeze(1).repeat(1, t - 1)
        steps.append(engine.step(t, tiny.rows(widths, codes[:, t - 2].tolist(), own), arena).logits)
    return [x.float() for x in (first, *steps)]
