"""Inputs of the Gated DeltaNet operator on a GPU, the fused kernel's call, its errors, and what it must move.

Errors are against a float32 state for every beam, from the kernel's own 16-bit inputs: the nine geometries, ragged
widths, both transitions, both input types and outputs. Trees: uniform parents, sorted by parent where `ordered`.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.ops import gdn
from app.ops.gdn.launch import fused_replay
from app.ops.gdn.reference import delta_rule_step
from bench.gdn_accuracy import DECAYS, GEOMETRIES, Geometry

BAR = 5e-5
BANDWIDTH = 4.3e12
"""Bytes a second that this bench counts its floor with: an H200's measured copy."""


class Inputs(NamedTuple):
    """One batch: windows and gates of every call, ancestry [N, T - 1] of the last, S_ctx and how the kernel reads it,
    and slots. The records' keys are there before the calls: the convolution writes them into their place."""

    g: Geometry
    windows: list[Tensor]
    log_alpha: list[Tensor]
    beta: list[Tensor]
    s_ctx: Tensor
    packed: Tensor
    records: gdn.Records
    row_start: Tensor
    ancestry: list[Tensor]


def make_inputs(
    g: Geometry, widths: list[int], calls: int, *, seed: int, dtype: torch.dtype, decay: str = "init",
    ordered: bool = True, compact: bool = False,
) -> Inputs:  # fmt: skip
    """q, k, v ~ N(0, 1) behind the convolution; gates as `bench.gdn_accuracy` has them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    requests, rows = len(widths), sum(widths)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    rate = torch.empty(g.hv, device="cuda").uniform_(*DECAYS[decay], generator=generator)
    start = torch.tensor([0, *widths], device="cuda").cumsum(0)
    own = torch.tensor(widths, device="cuda")
    first, size = start[:-1].repeat_interleave(own), own.repeat_interleave(own)
    ancestry = [torch.empty(rows, 0, dtype=torch.int32, device="cuda")]
    for _ in range(1, calls):
        parent = first + (torch.rand(rows, generator=generator, device="cuda") * size).long()
        if ordered:
            parent = parent.sort().values
        if compact:
            parent = torch.arange(rows, device="cuda")
        ancestry.append(torch.cat([ancestry[-1][parent], parent.int().unsqueeze(1)], 1))
    softplus = torch.nn.functional.softplus
    windows = [normal(rows, 2 * g.hk * g.k + g.hv * g.v).to(dtype) for _ in range(calls)]
    s_ctx = normal(requests, g.hv, g.k, g.v) * g.k**-0.5 * 0.5
    return Inputs(
        g,
        windows,
        [-rate * softplus(normal(rows, g.hv) + 1) for _ in range(calls)],
        [torch.sigmoid(normal(rows, g.hv)) for _ in range(calls)],
        s_ctx,
        gdn.pack(s_ctx, dtype),
        gdn.Records(
            torch.zeros(calls, rows, g.hv, device="cuda"),
            torch.zeros(calls, rows, g.hv, g.v, dtype=torch.float16, device="cuda"),
            torch.stack([x[:, g.hk * g.k : 2 * g.hk * g.k] for x in windows]).view(calls, rows, g.hk, g.k),
            torch.zeros(calls, rows, g.hk, device="cuda"),
        ),
        start.int(),
        ancestry,
    )


def call(x: Inputs, t: int, dtype: torch.dtype, *, compact: bool = False, portable: bool = False) -> Tensor:
    """Call t of the kernel."""
    return fused_replay(
        x.windows[t], x.log_alpha[t], x.beta[t], x.packed, x.records, key_heads=x.g.hk, row_start=x.row_start,
        ancestry=x.ancestry[t], compact=compact, key=x.records.k[t].flatten(1), into=t, dtype=dtype, portable=portable,
        early=True,
    )  # fmt: skip


def heads(x: Inputs, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's inputs of call t as the definition takes them: unit q, k and v."""
    g, n = x.g, len(x.windows[t])
    q, k, v = torch.split(x.windows[t], [g.hk * g.k, g.hk * g.k, g.hv * g.v], 1)
    return gdn.unit_queries(q.view(n, g.hk, g.k)), gdn.unit_keys(k.view(n, g.hk, g.k)), v.view(n, g.hv, g.v)


def check(
    g: Geometry, widths: list[int], calls: int, out: torch.dtype, *, portable: bool = False, **how: Any
) -> dict[str, Any]:
    """The largest error of all outputs against a state for every beam; of 16-bit outputs, what is above half an ulp."""
    compact = bool(how.get("compact"))
    x = make_inputs(g, widths, calls, **how)
    own = torch.tensor(widths, device="cuda")
    state, worst, largest = x.s_ctx.repeat_interleave(own, 0), 0.0, 0.0
    for t in range(calls):
        if t:
            state = state[x.ancestry[t][:, -1].long()]
        o = call(x, t, out, compact=compact, portable=portable)
        exact, state = delta_rule_step(state, *heads(x, t), x.log_alpha[t].exp(), x.beta[t])
        error = (o.float() - exact).abs()
        if out != torch.float32:
            half = torch.finfo(out).eps / 2 * torch.exp2(exact.abs().clamp(min=1e-30).log2().floor())
            error = (error - half).clamp(min=0)
        worst, largest = max(worst, float(error.max())), max(largest, float(exact.abs().max()))
    return {"error": worst, "largest": largest}


def check_all() -> list[dict[str, Any]]:
    """The table of errors; every line is printed as it is known."""
    table = []
    ragged = [128, 1, 37, 8]
    plans: list[tuple[Geometry, dict[str, Any]]] = [
        (g, {"dtype": torch.bfloat16, "out": torch.float32, "decay": decay}) for g, decay in product(GEOMETRIES, DECAYS)
    ]
    plans += [(GEOMETRIES[n], {"dtype": torch.float16, "out": torch.float16, "decay": "slow"}) for n in (0, 1, 7)]
    plans += [(GEOMETRIES[n], {"dtype": torch.bfloat16, "out": torch.bfloat16, "decay": "slow"}) for n in (0, 8)]
    plans += [(GEOMETRIES[n], {"dtype": torch.bfloat16, "out": torch.float32, "compact": True}) for n in (0, 7)]
    plans += [(GEOMETRIES[0], {"dtype": torch.bfloat16, "out": torch.float32, "ordered": False})]
    plans += [(GEOMETRIES[n], {"dtype": torch.bfloat16, "out": torch.float32, "portable": True}) for n in (0, 1, 7)]
    for g, how in plans:
        found = check(g, ragged, 6, seed=1, **how)
        name = " ".join(f"{key}={str(value).removeprefix('torch.')}" for key, value in how.items())
        table.append({**g._asdict(), "how": name, **found})
        print(f"{tuple(g)} {name}: {found['error']:.2e} of {found['largest']:.2f}", flush=True)
    return table


def floor(g: Geometry, rows: int, requests: int, calls: int) -> float:
    """Milliseconds at `BANDWIDTH` of what T calls must move: inputs, outputs and what they write of their records (not
    the keys, which are inputs in their place) once, each ancestor once."""
    row = 2 * (2 * g.hk * g.k + 2 * g.hv * g.v) + 8 * g.hv
    keys, rest = 2 * g.hk * g.k, 2 * g.hv * g.v + 4 * (g.hv + g.hk)
    total = calls * (rows * (row + rest) + 4 * requests * g.hv * g.k * g.v)
    return 1e3 * (total + calls * (calls - 1) / 2 * rows * (keys + rest)) / BANDWIDTH
