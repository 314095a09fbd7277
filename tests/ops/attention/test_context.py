"""The launch of the context kernel: what it takes, and what it is given. What it computes is tested on a GPU."""

from __future__ import annotations

import pytest
import torch

from app.ops import cuda
from app.ops.attention import context


def operands(*, n=37, h=8, hkv=2, d=64, requests=3, positions=70, dtype=torch.bfloat16):
    """q, k, v; q is a view of one product, as a model makes it."""
    q = torch.zeros(n, h + 2 * hkv, d, dtype=dtype)[:, :h]
    return q, *(torch.zeros(requests, positions, hkv, d, dtype=dtype) for _ in range(2))


@pytest.fixture
def gpu(monkeypatch):
    """An H200 that is not there; what is launched on it."""
    launched = []

    class Kernel:
        def launch(self, blocks, threads, *arguments):
            launched.append((blocks, threads, arguments))

    monkeypatch.setattr(cuda, "unfit", lambda _: None)
    monkeypatch.setattr(cuda, "architecture", lambda _: "sm_90")
    monkeypatch.setattr(cuda, "load", lambda *_, **__: Kernel())
    context._kernel.cache_clear()
    yield launched
    context._kernel.cache_clear()


def test_a_block_takes_128_queries_of_a_key_head(gpu):
    q, k, v = operands()
    length, start = torch.tensor([70, 3, 0]), torch.tensor([0, 33, 33, 37])
    for widest in (33, 32, 512, 1):
        context.attend(q, k, v, length, start, widest=widest, scale=0.1)
    assert [(blocks, threads) for blocks, threads, _ in gpu] == [(12, 256), (6, 256), (96, 256), (6, 256)]
    head = context.SOURCE.read_text().partition(" context(\n")[2].partition(") {")[0]
    assert {len(arguments) for *_, arguments in gpu} == {head.count(",") + 1}


def test_without_rows_or_requests_nothing_is_launched(gpu):
    q, k, v = operands(n=0, requests=0)
    out, lse = context.attend(q, k, v, torch.zeros(0), torch.zeros(1), widest=4, scale=0.1)
    assert (out.shape, lse.shape, gpu) == ((0, 8, 64), (0, 8), [])


def test_lse_is_stored_head_by_head(gpu):
    q, k, v = operands()
    out, lse = context.attend(q, k, v, torch.ones(3), torch.arange(4), widest=1, scale=0.1)
    assert out.is_contiguous()
    assert (lse.shape, lse.stride()) == ((37, 8), (1, 37))


def cases():
    """Operands that the kernel does not take, the scale, and what it says of them."""
    q, k, v = operands()
    yield operands(dtype=torch.float32), 1.0, "float32"
    yield (q, k.half(), v), 1.0, "k: torch.float16"
    yield operands(d=128, positions=255), 1.0, "255 positions; positive ones, with head dim 128"
    yield operands(d=96), 1.0, "head dim 96; 64 and 128"
    yield (q, k, torch.zeros(3, 70, 2, 128, dtype=k.dtype)), 1.0, "v: 128"
    yield (q, k, v), 0.0, "scale: 0.0"
    yield (q.transpose(0, 1).contiguous().transpose(0, 1), k, v), 1.0, "heads must lie together"
    yield (q, torch.zeros(3, 70, 2 * 64 + 4, dtype=k.dtype)[:, :, :128].view(3, 70, 2, 64), v), 1.0, "on 16 bytes"


@pytest.mark.parametrize(("given", "scale", "reason"), list(cases()))
def test_what_does_not_fit_is_said(gpu, given, scale, reason):
    assert reason in (context.unfit(*given, scale) or "")


def test_rows_of_a_product_fit_and_other_gpus_do_not(gpu, monkeypatch):
    assert context.unfit(*operands(), 0.1) is None
    assert context.unfit(*operands(d=128, positions=256), 0.1) is None
    monkeypatch.setattr(cuda, "architecture", lambda _: "sm_100")
    assert "sm_100" in (context.unfit(*operands(), 0.1) or "")
    monkeypatch.setattr(cuda, "unfit", lambda _: "CuPy is not installed")
    assert context.unfit(*operands(), 0.1) == "CuPy is not installed"
