"""Whole batches on a GPU, from contexts to encoded answers: throughput, tail, model FLOP utilisation, where time goes.

    python -m bench.e2e [--mode step homogeneous general eager] [--precision bfloat16 fp8] [--batch 1 2 4 8 16 32]
                        [--shape 0.2b | 4b-moe] [--seconds 30] [--k 50] [--out bench/results/e2e.json]

Synthetic weights in the shape of OneRec-V2's 0.2B row, or of its 4B row with experts (53, of which a row goes to 3, and
one for all; 0.5B of the parameters compute a row), random contexts of 512 positions, 4 steps of 8192 codes, 512 beams,
a random catalogue of a million items that masks every step. Full batches back to back through the server's own engine
thread, which launches a batch while the one before it is computed: context stage, uploads, decode, selection, item
look-up; answers are encoded on the event loop, as in the server. Admission and sockets are not in it.

step         step plans as CUDA graphs, our kernels: what is served
homogeneous  RecoGEM's one plan for all steps, as graphs: batch x width rows from the first step on, prefixes of 4
             positions of which the later ones are masked; our kernels
general      the same one plan by torch's attention and topk
eager        the operators of `step`, launched one by one

Each mode, precision and batch size can be run alone; results are merged into the file. The time of a batch goes from
the end of the one before it, or where there is none from its being handed in, to its encoded answers; QPS and MFU are
over their mean. `latency` goes from its being handed in, behind the batch that is computed then. MFU counts model FLOP
only (`_synthetic` says which); fp8's, too, over the ceiling of 16 bit.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from app.core import Ranked
from app.engine.captures import Taken
from app.runtime.job import Batch, Job, Served
from app.runtime.metrics import Metrics
from app.runtime.snapshot import Snapshot
from app.runtime.steps import StepLoop, cuda_graphs
from app.runtime.thread import EngineThread
from bench._e2e_report import ORDER, merged, replaced, shown
from bench._kernels import profiled
from bench._modes import MODES, OnePlan
from bench._report import commit, save
from bench._synthetic import FORMULA, SHAPES, Shape, jobs_of, snapshot_of

CEILINGS = {"measured": 768e12, "datasheet": 989e12}
"""bf16 FLOP/s of an H200: a product of 8192^3, and the vendor's figure."""
POLICY = "widebeam: 1\nsteps:\n  all:\n    mask: trie\n    normalize: step\n"
SETS = 4
LEAST = 12
"""Batches of a run, however short."""
Row = dict[str, Any]


def encode(snapshot: Snapshot, served: Sequence[Served]) -> int:
    """Answers as bytes; how many."""
    total = 0
    for end in served:
        assert isinstance(end.result, Ranked), end.result
        ids, sids, scores = snapshot.vocab.ids(end.result.items), end.result.sids.tolist(), end.result.scores.tolist()
        items = [{"id": one, "score": score, "sid": sid} for one, score, sid in zip(ids, scores, sids, strict=True)]
        total += len(msgspec.json.encode({"request_id": end.job.request.request_id, "items": items}))
    return total


class Spent(NamedTuple):
    """Seconds, a number for each batch after the first ones. batch: from the end of the one before it · latency: from
    its being handed in."""

    batch: list[float]
    latency: list[float]


def back_to_back(steps: StepLoop, snapshot: Snapshot, sets: Sequence[tuple[Job, ...]], seconds: float) -> Spent:
    """Full batches through an engine thread, as many of them in flight as it takes."""
    thread = EngineThread(steps)
    try:
        return asyncio.run(_back_to_back(thread, snapshot, sets, seconds))
    finally:
        thread.close()


async def _back_to_back(
    thread: EngineThread, snapshot: Snapshot, sets: Sequence[tuple[Job, ...]], seconds: float
) -> Spent:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    handed, ends, latency = deque[float](), list[float](), list[float]()
    began, count = time.perf_counter(), 0

    def hand_in() -> None:
        nonlocal count
        handed.append(time.perf_counter())
        thread.run(Batch(sets[count % len(sets)]), loop, done)
        count += 1

    def done(_: Batch, served: Sequence[Served]) -> None:
        if time.perf_counter() - began < seconds or len(ends) < LEAST:
            hand_in()  # the engine first, the answers after it
        encode(snapshot, served)
        ends.append(time.perf_counter())
        latency.append(ends[-1] - handed.popleft())
        if not handed:
            over.set()

    for _ in range(2 if thread.ahead(Batch(sets[0])) else 1):
        hand_in()
    await over.wait()
    return Spent([after - before for before, after in pairwise(ends)][1:], latency[2:])


class Prepared(NamedTuple):
    """A mode's step loop, what its graphs cost, and its figures."""

    loop: StepLoop
    taken: Taken
    metrics: Metrics


def prepared(mode: str, snapshot: Snapshot, batch: int) -> Prepared:
    """A step loop of one mode: of one plan for `batch`, otherwise ready for every batch size."""
    metrics = Metrics()
    if mode in MODES:
        plan = OnePlan(mode, snapshot, batch, metrics)
        return Prepared(plan, Taken(len(plan.graphs)), metrics)
    loop = StepLoop(time.monotonic, metrics, recorder=cuda_graphs if mode == "step" else lambda _: None)
    return Prepared(loop, loop.prepare(snapshot), metrics)


class Measured(NamedTuple):
    """A run, whose `phases` are empty yet, and what finds them: once a profiler has run, every launch of the process
    costs more."""

    run: Row
    phases: Callable[[], Row]


def measure(mode: str, of: Prepared, batch: int, shape: Shape, snapshot: Snapshot, seconds: float, k: int) -> Measured:
    """One mode and batch size; k items an answer."""
    loop, taken, metrics = of
    sets = [jobs_of(snapshot, batch, seed, k) for seed in range(SETS)]
    for jobs in sets:
        loop.serve(Batch(jobs))
    alike = _alike(loop, plain(), sets[0])
    before = _steps(metrics)
    gc.collect()
    gc.freeze()  # as a server does once it has loaded
    spent = back_to_back(loop, snapshot, sets, seconds)
    steps = {label: 1e3 * (total - before[label][0]) / (count - before[label][1])
             for label, (total, count) in _steps(metrics).items()}  # fmt: skip
    mean, flop = statistics.mean(spent.batch), shape.decode_flop(batch) + shape.context_flop(batch)
    decode_s = sum(ms for label, ms in steps.items() if label != "context") / 1e3 or math.nan
    run = {
        "mode": mode, "precision": snapshot.contract.precision, "batch": batch, "k": k,
        "seconds": sum(spent.batch), "batches": len(spent.batch), "mean_ms": 1e3 * mean,
        "median_ms": 1e3 * statistics.median(spent.batch), "p99_ms": _p99(spent.batch), "qps": batch / mean,
        "latency_ms": {"mean": 1e3 * statistics.mean(spent.latency), "p99": _p99(spent.latency)},
        "mfu": {name: flop / mean / most for name, most in CEILINGS.items()},
        "mfu_decode": {name: shape.decode_flop(batch) / decode_s / most for name, most in CEILINGS.items()},
        "steps_ms": steps, "phases": {}, "flop": flop, "alike": alike,
        "graphs": {name: value for name, value in taken._asdict().items() if name != "choices"},
        "products": [one.document() for one in taken.choices],
        "eager_steps": metrics.registry.get_sample_value("widebeam_engine_eager_steps_total"),
    }  # fmt: skip
    return Measured(run, lambda: profiled(lambda: loop.serve(Batch(sets[0]))))


def _p99(seconds: Sequence[float]) -> float:
    """In milliseconds."""
    return 1e3 * sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))]


def plain() -> StepLoop:
    """The step loop without graphs."""
    return StepLoop(time.monotonic, Metrics(), recorder=lambda _: None)


def _alike(loop: StepLoop, other: StepLoop, jobs: tuple[Job, ...]) -> float:
    """Which share of the items of two loops' answers is the same."""
    found = [{id(end.job): end.result for end in one.serve(Batch(jobs))} for one in (loop, other)]
    shared = total = 0
    for job in jobs:
        mine, theirs = (one[id(job)] for one in found)
        assert isinstance(mine, Ranked) and isinstance(theirs, Ranked), (mine, theirs)
        shared += len(set(mine.items.tolist()) & set(theirs.items.tolist()))
        total += len(theirs.items)
    return shared / max(1, total)


def _steps(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """Sum and count of `widebeam_step_seconds` by label."""
    found: dict[str, list[float]] = {}
    for family in metrics.registry.collect():
        if family.name == "widebeam_step_seconds":
            for sample in family.samples:
                if sample.name.endswith(("_sum", "_count")):
                    place = 0 if sample.name.endswith("_sum") else 1
                    found.setdefault(sample.labels["step"], [0.0, 0.0])[place] = sample.value
    return {label: (one[0], one[1]) for label, one in found.items()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.2b", help="a file of results is of one")
    parser.add_argument("--mode", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--precision", nargs="+", choices=["bfloat16", "float16", "fp8"], default=["bfloat16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--seconds", type=float, default=30.0, help="of a mode, precision and batch size")
    parser.add_argument("--k", type=int, default=50, help="items of an answer")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, made = torch.device("cuda", torch.cuda.current_device()), list[Measured]()
    for precision in args.precision:
        snapshot = snapshot_of(SHAPES[args.shape], max(args.batch), device, POLICY, precision)
        for mode in args.mode:
            for one in measured(mode, snapshot, SHAPES[args.shape], args.batch, args.seconds, args.k):
                made.append(one)
                print(json.dumps(one.run), flush=True)
                if args.out:
                    write(args.out, args.shape, [one.run], _parameters(snapshot))
    for one in made:
        one.run["phases"] = one.phases()
        if args.out:
            write(args.out, args.shape, [one.run], _parameters(snapshot))


def measured(
    mode: str, snapshot: Snapshot, shape: Shape, batches: Sequence[int], seconds: float, k: int
) -> Iterator[Measured]:
    """A mode's runs, the largest batch first."""
    of = None
    for batch in sorted(batches, reverse=True):
        if of is None or mode in MODES:
            of = prepared(mode, snapshot, batch)
        yield measure(mode, of, batch, shape, snapshot, seconds, k)


def _parameters(snapshot: Snapshot) -> int:
    tensors = snapshot.engine.slot.tensors if snapshot.engine.slot else {}
    return sum(memory.numel() for name, memory in tensors.items() if not name.endswith(".scale"))


def write(out: Path, shape: str, runs: Sequence[Row], parameters: int) -> None:
    """The file, its tables and its plot, with what other runs of the shape have put there."""
    before = json.loads(out.read_text("utf-8")) if out.exists() else {}
    if before.get("shape", "0.2b") != shape:
        before = {}
    known = before.get("runs", [])
    together = merged(known, [{**one, "commit": commit()} for one in runs])
    document = {
        "shape": shape,
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(), "commit": commit(), "parameters": parameters, "formula": FORMULA,
        "runs": together, "replaced": replaced([*before.get("replaced", []), *known], together),
    }  # fmt: skip
    save(out, document, shown(document, out.stem))


if __name__ == "__main__":
    main()
