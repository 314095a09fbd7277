"""Attention of all beams over the contexts of their requests: a part of `bench attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from app.ops import attention
from bench._graph_time import LEAST, graph_time

CONTEXTS = (
    (32, 512, 512, 16, 16, 64),
    (32, 512, 512, 16, 4, 64),
    (4, 512, 512, 16, 16, 64),
    (32, 512, 512, 14, 14, 64),
    (32, 512, 128, 16, 8, 128),
)
"""Requests, beams, context positions, query heads, key heads, head dim."""
PEERS = ("ragged_flash", "rectangle_flash", "rectangle_cudnn", "per_beam")


class Context(NamedTuple):
    """The beams of requests over their contexts, all alike: q [N, H, D], k and v [R, positions, Hkv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    length: Tensor
    start: Tensor

    @property
    def rectangle(self) -> tuple[Tensor, Tensor, Tensor]:
        """As torch's attention takes them."""
        q = self.q.unflatten(0, (len(self.length), -1)).transpose(1, 2)
        return q, self.k.transpose(1, 2), self.v.transpose(1, 2)


def context(requests: int, width: int, positions: int, heads: int, kv_heads: int, dim: int) -> Context:
    """Random operands, bfloat16."""
    q = torch.randn(requests * width, heads, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(requests, positions, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    length = torch.full((requests,), positions, dtype=torch.int32, device="cuda")
    return Context(q, k, v, length, torch.arange(0, len(q) + 1, width, dtype=torch.int32, device="cuda"))


def ragged_flash(x: Context, start: Tensor, place: Tensor, used: Tensor, widest: int) -> Tensor:
    """torch's flash attention: sequences of rows from `start`, each over `used` keys from `place`."""
    keys, values = x.k.flatten(0, 1), x.v.flatten(0, 1)
    out: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        x.q, keys, values, start, place, widest, x.k.shape[1], 0.0, False, False, scale=x.q.shape[2] ** -0.5,
        seqused_k=used,
    )[0]  # fmt: skip
    return out


def by_request(x: Context) -> Tensor:
    """The ragged batch by torch's flash attention, a sequence a request."""
    requests, positions = x.k.shape[:2]
    place = torch.arange(0, (requests + 1) * positions, positions, dtype=torch.int32, device="cuda")
    return ragged_flash(x, x.start, place, x.length, len(x.q) // requests)


def by_beam(x: Context) -> Tensor:
    """Every beam a sequence of its own over the context where it lies."""
    rows, (requests, positions) = len(x.q), x.k.shape[:2]
    place = torch.arange(requests, dtype=torch.int32, device="cuda").mul(positions).repeat_interleave(rows // requests)
    each = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    used = x.length.repeat_interleave(rows // requests, output_size=rows)
    return ragged_flash(x, each, torch.cat([place, place[-1:]]), used, 2)


def context_cell(requests: int, width: int, positions: int, heads: int, kv_heads: int, dim: int) -> dict[str, Any]:
    """Our operator over the ragged batch, torch's flash attention over it, torch's attention over a rectangle (all
    requests alike, no log-sum-exp), and the per-beam form."""
    scale, rows = dim**-0.5, requests * width
    sets = [context(requests, width, positions, heads, kv_heads, dim) for _ in range(3)]
    flop = 4 * rows * positions * heads * dim

    def ours(x: Context) -> Tensor:
        return attention.context_attention(x.q, x.k, x.v, x.length, x.start, widest=width, scale=scale)[0]

    def alike(backend: SDPBackend) -> float:
        with sdpa_kernel(backend):
            return graph_time([
                lambda x=x: torch.nn.functional.scaled_dot_product_attention(*x.rectangle, enable_gqa=heads != kv_heads)
                for x in sets
            ], least=LEAST)  # fmt: skip

    error = float((ours(sets[0]).float() - by_beam(sets[0]).float()).abs().max())
    taken = graph_time([lambda x=x: ours(x) for x in sets], least=LEAST)
    return {
        "R": requests, "W": width, "positions": positions, "H": heads, "Hkv": kv_heads, "D": dim, "apart": error,
        "ms": taken, "tflops": flop / taken / 1e9,
        "ragged_flash": graph_time([lambda x=x: by_request(x) for x in sets], least=LEAST),
        "rectangle_flash": alike(SDPBackend.FLASH_ATTENTION), "rectangle_cudnn": alike(SDPBackend.CUDNN_ATTENTION),
        "per_beam": graph_time([lambda: by_beam(sets[0])], 3),
    }  # fmt: skip


def context_table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of markdown."""
    columns = "ours | TFLOP/s | torch's flash | rectangle, flash | rectangle, cuDNN | a beam at a time"
    lines = ["## Contexts, bf16", "", f"| R x W | positions | H / Hkv | D | {columns} |", "| ---: " * 10 + "|"]
    for one in found:
        shape = f"{one['R']} x {one['W']} | {one['positions']} | {one['H']} / {one['Hkv']} | {one['D']}"
        times = " | ".join(f"{one[name]:.4g}" for name in PEERS)
        lines.append(f"| {shape} | {one['ms']:.4g} | {one['tflops']:.0f} | {times} |")
    return lines
