"""The same T decode calls of a Gated DeltaNet layer in three ways, each with its own upkeep of the beams' state.

* onela      our kernel: S_ctx once per request, records in slots, ancestors through an index; nothing moves
* full       flash-linear-attention's `fused_recurrent_gated_delta_rule`, one token a call over N = R x W states, and an
             index_select of all states between calls, since beams are re-ordered, duplicated and dropped
* replayssm  a state a beam that is read only, and rings of records that are re-ordered (`_gdn_replayssm`)

The peers get q, k, v as contiguous tensors and their first states as copies of S_ctx before the clock starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bench._gdn_kernel import Inputs, call
from bench.gdn_accuracy import Geometry

BUSY_S = 0.01
Mark = Callable[[int], None]
Run = Callable[[Mark], list[Tensor]]
"""All calls, and `mark(t)` behind each; the outputs."""


def unmarked(t: int) -> None:
    """For runs that nobody times."""


class Heads(NamedTuple):
    """One call's q, k [N, HK, K] and v [N, HV, V] as the layer has them behind the convolution, contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor


def raw_heads(x: Inputs, t: int) -> Heads:
    """Call t."""
    g, n = x.g, len(x.windows[t])
    q, k, v = torch.split(x.windows[t], [g.hk * g.k, g.hk * g.k, g.hv * g.v], 1)
    return Heads(*(part.reshape(n, -1, width).contiguous() for part, width in ((q, g.k), (k, g.k), (v, g.v))))


def onela(x: Inputs, calls: int) -> Run:
    """Our kernel."""

    def run(mark: Mark) -> list[Tensor]:
        found = []
        for t in range(calls):
            found.append(call(x, t, x.windows[t].dtype))
            mark(t)
        return found

    return run


def own_states(x: Inputs) -> Tensor:
    """S_ctx for every beam: [N, HV, K, V]."""
    widths = x.row_start.long().diff()
    return x.s_ctx.repeat_interleave(widths, 0)


def full(x: Inputs, calls: int) -> Run:
    """A state for every beam, by fla."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule  # noqa: PLC0415  a peer: only here

    heads, parents = [raw_heads(x, t) for t in range(calls)], [a[:, -1].long() for a in x.ancestry[1:]]
    first = own_states(x)

    def run(mark: Mark) -> list[Tensor]:
        state, found = first, []
        for t, (q, k, v) in enumerate(heads):
            if t:
                state = state.index_select(0, parents[t - 1])
            o, state = fused_recurrent_gated_delta_rule(
                q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), g=x.log_alpha[t].unsqueeze(1),
                beta=x.beta[t].unsqueeze(1), scale=x.g.k**-0.5, initial_state=state, output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            found.append(o.squeeze(1))
            mark(t)
        return found

    return run


def replayssm(x: Inputs, calls: int) -> Run:
    """A state for every beam that is only read, and rings that move."""
    from bench._gdn_replayssm import Ring, replay_ssm  # noqa: PLC0415  needs Triton

    heads, parents = [raw_heads(x, t) for t in range(calls)], [a[:, -1].long() for a in x.ancestry[1:]]
    state = own_states(x)
    shapes = ((x.records.alpha, torch.float32), (x.records.delta, torch.float16), (x.records.k, torch.float16))
    rings = [Ring(*(torch.zeros_like(slots, dtype=dtype) for slots, dtype in shapes)) for _ in range(2)]

    def run(mark: Mark) -> list[Tensor]:
        found = []
        for t in range(calls):
            ring, before = rings[t % 2], rings[1 - t % 2]
            if t:
                for new, old in zip(ring, before, strict=True):
                    torch.index_select(old[:t], 1, parents[t - 1], out=new[:t])
            found.append(replay_ssm(heads[t], x.log_alpha[t], x.beta[t], state, ring, t))
            mark(t)
        return found

    return run


def staged_times(run: Run, calls: int, rounds: int) -> list[float]:
    """Milliseconds from the start to the end of call t, t = 0..calls-1, inside one captured graph: the median of
    `rounds` replays, by events that the graph records. The kernels must have run before."""
    events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(calls + 1)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        events[0].record()
        kept = run(lambda t: events[t + 1].record())
    times = []
    for _ in range(rounds + 1):
        graph.replay()
        torch.cuda.synchronize()
        times.append([events[0].elapsed_time(event) for event in events[1:]])
    del kept
    graph.reset()
    return torch.tensor(times[1:]).median(0).values.tolist()


def graph_time(runs: list[Run], rounds: int) -> float:
    """Milliseconds of one run, captured: all of `runs`, which are over different inputs, in one graph, divided by their
    number; the median of `rounds` replays, one behind the other, on a GPU that has been busy for 10 ms."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run(unmarked)
    begun = time.monotonic()
    while time.monotonic() - begun < BUSY_S:
        graph.replay()
        torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 2)]
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) / len(runs) for a, b in pairwise(events)][1:]
    graph.reset()
    return float(torch.tensor(times).median())


class Bytes(NamedTuple):
    """Of T calls, counted: state that persists, state written by the calls, state moved between calls (read and
    written), everything that must go through memory, and operations."""

    state: int
    written: int
    moved: int
    traffic: int
    flops: int


def counted(path: str, g: Geometry, requests: int, rows: int, calls: int) -> Bytes:
    """What a path stores, writes and moves; every operand once, nothing saved by a cache.

    A record is what the paper counts, 16-bit delta and k and float32 alpha; ours has the float32 length of k beside
    them. Its k is no traffic of its call's: the convolution has to put it somewhere, and puts it there."""
    record = 2 * (g.hk * g.k + g.hv * g.v) + 4 * g.hv
    own, by_call = record + 4 * g.hk, record + 4 * g.hk - 2 * g.hk * g.k
    row = 2 * (2 * g.hk * g.k + 2 * g.hv * g.v) + 8 * g.hv
    context, every = 4 * requests * g.hv * g.k * g.v, 4 * rows * g.hv * g.k * g.v
    past, inputs = calls * (calls - 1) // 2, calls * rows * row
    replayed = rows * (4 * g.hk * g.k + 4 * g.hv * g.v)
    small = calls * rows * g.hv * 8 * g.v + past * replayed
    project = 4 * calls * rows * g.hv * g.k * g.v
    if path == "onela":
        traffic = inputs + calls * (context + rows * by_call) + past * rows * own
        return Bytes(context + calls * rows * own, calls * rows * own, 0, traffic, project + small)
    if path == "replayssm":
        moved = 2 * past * rows * record
        traffic = inputs + calls * (every + rows * record) + past * rows * record + moved
        return Bytes(every + 2 * calls * rows * record, calls * rows * record, moved, traffic, project + small)
    moved = 2 * (calls - 1) * every
    return Bytes(every, calls * every, moved, inputs + 2 * calls * every + moved, 7 * calls * rows * g.hv * g.k * g.v)


PATHS: dict[str, Callable[[Inputs, int], Run]] = {"onela": onela, "full": full, "replayssm": replayssm}
