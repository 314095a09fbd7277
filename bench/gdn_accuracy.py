"""Projection replay against a float32 state for every beam, over OneLA's 405 shapes (section 4.3).

    python -m bench.gdn_accuracy --out bench/results/gdn_accuracy.json            all of it
    python -m bench.gdn_accuracy --slice 3/9                                      the fourth ninth of it

Shapes: R 4, 8, 16 x W 128, 256, 512 x T 2..6 calls x the nine geometries below (the paper names only their ranges). A
run of six calls holds those of 2..5, so 81 runs cover 405 shapes. Inputs, as a model makes them: q, k of unit length
and q times 1 / sqrt(K); v ~ N(0, 1); beta = sigmoid(N(0, 1)); alpha = exp(-A softplus(a + 1)), a ~ N(0, 1), with A a
head uniform in 0.01..16 as the models are initialised ("init": most heads forget at once), or uniform in 0.001..0.05
("slow": everything is remembered, which is harder); S_ctx from a random prompt of 96 tokens; every row's parent is any
row of its request, so parents are re-ordered, duplicated and pruned.

The largest state of all beams would take 275 GB: it is kept for one request and a few heads at a time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from app.ops import gdn
from app.ops.gdn.reference import delta_rule_step
from bench._report import settings

BAR = 5e-5
CALLS, PROMPT = 6, 96
DECAYS = {"init": (0.01, 16.0), "slow": (0.001, 0.05)}
STATES = 1 << 28
"""Elements of a slice's states: 1 GiB."""


class Geometry(NamedTuple):
    """HK, HV, K, V."""

    hk: int
    hv: int
    k: int
    v: int


GEOMETRIES = (
    Geometry(16, 16, 128, 128),  # Qwen3.5-0.8B and 2B
    Geometry(16, 32, 128, 128),  # Qwen3.5-4B and 9B, Qwen3-Next
    Geometry(16, 48, 128, 128),  # Qwen3.5-27B
    Geometry(16, 64, 128, 128),
    Geometry(32, 32, 128, 128),
    Geometry(4, 4, 128, 128),
    Geometry(8, 8, 128, 256),
    Geometry(8, 16, 256, 256),
    Geometry(4, 4, 256, 512),
)


class Shape(NamedTuple):
    """One run of `CALLS` decode calls."""

    requests: int
    width: int
    geometry: Geometry


SHAPES = tuple(Shape(*one) for one in product((4, 8, 16), (128, 256, 512), GEOMETRIES))


class Tokens(NamedTuple):
    """What a Gated DeltaNet layer gives the rule: q, k [N, HK, K], v [N, HV, V], log alpha and beta [N, HV]."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_alpha: Tensor
    beta: Tensor


def make_tokens(count: int, g: Geometry, rate: Tensor, generator: torch.Generator) -> Tokens:
    """rate [HV]: the heads' A."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=generator.device)

    return Tokens(
        gdn.unit_queries(normal(count, g.hk, g.k)),
        gdn.unit_keys(normal(count, g.hk, g.k)),
        normal(count, g.hv, g.v),
        -rate * functional.softplus(normal(count, g.hv) + 1),
        torch.sigmoid(normal(count, g.hv)),
    )


class Error(NamedTuple):
    """Of the first T calls: the largest absolute error, and the largest |o|."""

    calls: int
    error: float
    largest: float


def errors(
    shape: Shape,
    seed: int,
    decay: str = "init",
    records: torch.dtype = torch.float32,
    device: str = "cpu",
    units: int = 0,
    calls: int = CALLS,
) -> list[Error]:
    """One run: the errors of its first 2..calls calls.

    records  what deltas are stored in; keys are kept as they come
    units    (request, key head) pairs that are compared, spread over all; 0 = all of them
    """
    g, rows = shape.geometry, shape.requests * shape.width
    generator = torch.Generator(device).manual_seed(seed)
    rate = torch.empty(g.hv, device=device).uniform_(*DECAYS[decay], generator=generator)
    prompt = make_tokens(shape.requests * PROMPT, g, rate, generator)
    start = torch.arange(shape.requests + 1, device=device)
    _, s_ctx = gdn.chunked_delta_rule(*prompt, gdn.plan_chunks(start * PROMPT))
    kept = gdn.Records(
        torch.empty(calls, rows, g.hv, device=device),
        torch.empty(calls, rows, g.hv, g.v, dtype=records, device=device),
        torch.empty(calls, rows, g.hk, g.k, device=device),
        torch.empty(calls, rows, g.hk, device=device),
    )
    unit = torch.ones(rows, g.hk, device=device)
    first = start[:-1].repeat_interleave(shape.width) * shape.width
    inputs, outputs, parents = [], [], []
    ancestry = torch.empty(rows, 0, dtype=torch.int64, device=device)
    for t in range(calls):
        x = make_tokens(rows, g, rate, generator)
        if t:
            parent = first + torch.randint(shape.width, (rows,), generator=generator, device=device)
            ancestry = torch.cat([ancestry[parent], parent.unsqueeze(1)], 1)
            parents.append(parent)
        alpha = x.log_alpha.exp()
        o, delta = gdn.replay(*x[:3], alpha, x.beta, s_ctx, kept, row_start=start * shape.width, ancestry=ancestry)
        kept.put(t, gdn.Record(alpha, delta, x.k, unit))
        inputs.append(x)
        outputs.append(o)
    worst = torch.zeros(calls, 2, device=device)
    for r, heads in _units(shape, units):
        worst = torch.maximum(worst, _compare(shape, r, heads, s_ctx, inputs, outputs, parents))
    running = worst.cummax(0).values.tolist()
    return [Error(t + 1, *running[t]) for t in range(1, calls)]


def _units(shape: Shape, units: int) -> Iterator[tuple[int, slice]]:
    """Requests and runs of key heads whose states fit `STATES`."""
    g = shape.geometry
    each = max(1, STATES // (shape.width * g.hv // g.hk * g.k * g.v)) if not units else 1
    every = [(r, slice(h, min(h + each, g.hk))) for r in range(shape.requests) for h in range(0, g.hk, each)]
    yield from every if not units else every[:: max(1, len(every) // units)][:units]


def _compare(
    shape: Shape,
    r: int,
    heads: slice,
    s_ctx: Tensor,
    inputs: list[Tokens],
    outputs: list[Tensor],
    parents: list[Tensor],
) -> Tensor:
    """[calls, 2] errors and sizes of one request's rows and some key heads: a state for every beam, moved with it."""
    own = slice(r * shape.width, (r + 1) * shape.width)
    group = shape.geometry.hv // shape.geometry.hk
    values = slice(heads.start * group, heads.stop * group)
    state = s_ctx[r : r + 1, values].expand(shape.width, -1, -1, -1)
    found = []
    for t, (x, o) in enumerate(zip(inputs, outputs, strict=True)):
        if t:
            state = state[parents[t - 1][own] - own.start]
        exact, state = delta_rule_step(
            state,
            x.q[own, heads],
            x.k[own, heads],
            x.v[own, values],
            x.log_alpha[own, values].exp(),
            x.beta[own, values],
        )
        found.append(torch.stack([(o[own, values] - exact).abs().max(), exact.abs().max()]))
    return torch.stack(found)


def main() -> None:
    """The sweep, a slice of it, or one device's share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", default="0/1", help="i/n: every n-th run, from the i-th")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--units", type=int, default=0, help="(request, key head) pairs a run; 0 = all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    part, parts = map(int, args.slice.split("/"))
    table: list[dict[str, Any]] = []
    worst: dict[str, float] = {}
    machine = settings({}, torch.get_num_threads())
    for number in range(part, len(SHAPES), parts):
        shape = SHAPES[number]
        for decay, records in product(DECAYS, (torch.float32, torch.float16)):
            found = errors(shape, args.seed + number, decay, records, args.device, args.units)
            kind = str(records).removeprefix("torch.")
            table.append({
                "R": shape.requests, "W": shape.width, **shape.geometry._asdict(), "decay": decay, "records": kind,
                "seed": args.seed + number, "errors": [one._asdict() for one in found],
            })  # fmt: skip
            worst[f"{decay} {kind}"] = max(worst.get(f"{decay} {kind}", 0.0), found[-1].error)
            name = f"R={shape.requests:<3} W={shape.width:<4} {tuple(shape.geometry)} {decay} {kind}"
            print(f"{name}: {found[-1].error:.2e} of {found[-1].largest:.2f}", flush=True)
        if args.out:  # after every run: a sweep that is stopped keeps what it found
            args.out.parent.mkdir(parents=True, exist_ok=True)
            about = {"machine": machine, "device": args.device, "units": args.units, "worst": worst}
            args.out.write_text(json.dumps({**about, "runs": table}))
    print(json.dumps({"runs": len(table), "worst": worst}))
    if max(error for name, error in worst.items() if name.endswith("float32")) > BAR:
        raise SystemExit(f"an error is above {BAR}")


if __name__ == "__main__":
    main()
