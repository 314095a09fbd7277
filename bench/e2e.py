"""Whole batches on a GPU, from contexts to encoded answers: throughput, tail, model FLOP utilisation, where time goes.

    python -m bench.e2e [--mode step homogeneous general eager] [--batch 1 2 4 8 16 32] [--seconds 30] [--k 50]
                        [--out bench/results/e2e.json]

Synthetic weights in OneRec-V2's 0.2B shape, random contexts of 512 positions, 4 steps of 8192 codes, 512 beams, a
random catalogue of a million items that masks every step. Full batches back to back through the server's own step loop:
context stage, uploads, decode, selection, item look-up; answers are encoded by another thread, as in the server.
Admission and sockets are not in it.

step         step plans as CUDA graphs, our kernels: what is served
homogeneous  RecoGEM's one plan for all steps, as graphs: batch x width rows from the first step on, prefixes of 4
             positions of which the later ones are masked; our kernels
general      the same one plan by torch's attention and topk
eager        the operators of `step`, launched one by one

Each mode and batch size can be run alone; results are merged into the file. MFU counts model FLOP only (`_synthetic`
says which), over the time of a batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from app.core import Ranked
from app.engine.graphs import Taken
from app.runtime.job import Batch, Job, Served
from app.runtime.metrics import Metrics
from app.runtime.snapshot import Snapshot
from app.runtime.steps import StepLoop, cuda_graphs
from bench._modes import MODES, OnePlan
from bench._report import commit
from bench._synthetic import FORMULA, Shape, jobs_of, snapshot_of

CEILINGS = {"measured": 768e12, "datasheet": 989e12}
"""bf16 FLOP/s of an H200: a product of 8192^3, and the vendor's figure."""
POLICY = "widebeam: 1\nsteps:\n  all:\n    mask: trie\n    normalize: step\n"
ORDER = ("step", "homogeneous", "general", "eager")
SETS = 4
KINDS = {
    "copies": ("memcpy", "memset"),
    "attention": ("flash", "fmha", "slots_", "walk_", "compact_"),
    "selection": ("scan", "tail", "search", "children", "child", "narrow", "collect", "mark"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "splitk"),
}
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


def back_to_back(
    loop: Serves, snapshot: Snapshot, sets: Sequence[tuple[Job, ...]], seconds: float
) -> tuple[list[float], float]:
    """Seconds from the start of each batch to its answers, batch after batch; and seconds of a batch in all, the wait
    for a thread that encodes more slowly with them."""
    taken: list[float] = []
    with ThreadPoolExecutor(1) as encoder:
        last: Future[int] | None = None
        began = time.perf_counter()
        while time.perf_counter() - began < seconds or len(taken) < 8:
            start = time.perf_counter()
            served = loop.serve(Batch(sets[len(taken) % len(sets)]))
            taken.append(time.perf_counter() - start)
            if last is not None:
                last.result()  # no queue of answers builds up
            last = encoder.submit(encode, snapshot, served)
        return taken, (time.perf_counter() - began) / len(taken)


def profiled(run: Callable[[], object], batches: int = 3) -> Row:
    """Milliseconds a batch of the device's kernels, by kind and by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(batches):
            run()
        torch.cuda.synchronize()
    found = sorted(
        (one.time_range.start, one.time_range.end - one.time_range.start, one.name.lower())
        for one in profile.events() or ()
        if one.device_type == torch.autograd.DeviceType.CUDA
    )
    kinds: dict[str, float] = dict.fromkeys([*KINDS, "rest"], 0.0)
    names: dict[str, float] = {}
    for _, micros, name in found:
        kinds[_kind(name)] += micros / 1e3 / batches
        names[name[:80]] = names.get(name[:80], 0.0) + micros / 1e3 / batches
    longest = dict(sorted(names.items(), key=lambda one: -one[1])[:24])
    return {"kinds_ms": kinds, "busy_ms": sum(kinds.values()), "longest_ms": longest, "kernels": len(found) // batches}


def _kind(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "rest")


class Serves(Protocol):
    """A step loop."""

    def serve(self, batch: Batch) -> list[Served]:
        """Answer a batch."""


class Prepared(NamedTuple):
    """A mode's step loop, what its graphs cost, and its figures."""

    loop: Serves
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


def measure(mode: str, of: Prepared, batch: int, shape: Shape, snapshot: Snapshot, seconds: float, k: int) -> Row:
    """One mode and batch size; k items an answer."""
    loop, taken, metrics = of
    sets = [jobs_of(snapshot, batch, seed, k) for seed in range(SETS)]
    for jobs in sets:
        loop.serve(Batch(jobs))
    alike = _alike(loop, plain(), sets[0])
    phases = profiled(lambda: loop.serve(Batch(sets[0])))
    before = _steps(metrics)
    gc.collect()
    gc.freeze()  # as a server does once it has loaded
    spent, whole = back_to_back(loop, snapshot, sets, seconds)
    steps = {label: 1e3 * (total - before[label][0]) / (count - before[label][1])
             for label, (total, count) in _steps(metrics).items()}  # fmt: skip
    median, flop = statistics.median(spent), shape.decode_flop(batch) + shape.context_flop(batch)
    mean = statistics.mean(spent)
    decode_s = sum(ms for label, ms in steps.items() if label != "context") / 1e3 or math.nan
    return {
        "mode": mode, "batch": batch, "k": k, "batches": len(spent), "mean_ms": 1e3 * mean, "median_ms": 1e3 * median,
        "p99_ms": 1e3 * sorted(spent)[min(len(spent) - 1, int(0.99 * len(spent)))], "qps": batch / whole,
        "mfu": {name: flop / mean / most for name, most in CEILINGS.items()},
        "mfu_decode": {name: shape.decode_flop(batch) / decode_s / most for name, most in CEILINGS.items()},
        "steps_ms": steps, "phases": phases, "graphs": taken._asdict(), "flop": flop, "alike": alike,
        "eager_steps": metrics.registry.get_sample_value("widebeam_engine_eager_steps_total"),
    }  # fmt: skip


def plain() -> StepLoop:
    """The step loop without graphs."""
    return StepLoop(time.monotonic, Metrics(), recorder=lambda _: None)


def _alike(loop: Serves, other: Serves, jobs: tuple[Job, ...]) -> float:
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


def markdown(document: Row) -> str:
    """The tables of a result."""
    lines = [
        "# Whole batches on a GPU", "",
        f"{document['device']}, torch {document['torch']}, CUDA {document['cuda']}, commit {document['commit']}; "
        f"{document['parameters'] / 1e6:.0f} M parameters, bf16. [README](../README.md) says of what.", "",
        f"Model FLOP: {FORMULA}. MFU over 768 TFLOP/s (989 in brackets).", "",
        "| mode | batch | mean ms | p99 ms | QPS | MFU | MFU of the decode steps | GPU busy ms | graphs |",
        "| --- " + "| ---: " * 8 + "|",
    ]  # fmt: skip
    rows = document["runs"]
    for one in rows:
        mfu, decode = ("{measured:.1%} ({datasheet:.1%})".format(**one[name]) for name in ("mfu", "mfu_decode"))
        decode = decode if one["steps_ms"] else "-"
        lines.append(
            f"| {one['mode']} | {one['batch']} | {one['mean_ms']:.2f} | {one['p99_ms']:.2f} | {one['qps']:.0f} | {mfu} "
            f"| {decode} | {one['phases']['busy_ms']:.2f} | {one['graphs']['graphs'] or '-'} |"
        )
    labels = sorted({label for one in rows for label in one["steps_ms"]}, key=lambda x: (x != "context", x))
    kinds = list(rows[0]["phases"]["kinds_ms"])
    head = " | ".join([*(f"step {x}" if x != "context" else x for x in labels), *kinds])
    lines += [
        "", "## Where the time goes", "",
        "Milliseconds a batch: between the marks of the step loop, and of kernels by kind (torch.profiler).", "",
        f"| mode | batch | {head} |", "| --- " + "| ---: " * (1 + len(labels) + len(kinds)) + "|",
    ]  # fmt: skip
    for one in rows:
        cells = [one["steps_ms"].get(x) for x in labels] + [one["phases"]["kinds_ms"][x] for x in kinds]
        shown = " | ".join("-" if x is None else f"{x:.3f}" for x in cells)
        lines.append(f"| {one['mode']} | {one['batch']} | {shown} |")
    return "\n".join(lines) + "\n"


def merged(known: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Runs by mode and batch, the newer ones."""
    by_key = {(one["mode"], one["batch"]): one for one in (*known, *new)}
    return [by_key[key] for key in sorted(by_key, key=lambda key: (ORDER.index(key[0]), key[1]))]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--k", type=int, default=50, help="items of an answer")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape, device = Shape(), torch.device("cuda", torch.cuda.current_device())
    runs: list[Row] = []
    snapshot = snapshot_of(shape, max(args.batch), device, POLICY)
    parameters = sum(memory.numel() for memory in snapshot.engine.slot.tensors.values()) if snapshot.engine.slot else 0
    for mode in args.mode:
        of = None
        for batch in sorted(args.batch, reverse=True):
            if of is None or mode in MODES:
                of = None  # a plan's memory goes before the next one takes its own
                of = prepared(mode, snapshot, batch)
            runs.append(measure(mode, of, batch, shape, snapshot, args.seconds, args.k))
            print(json.dumps(runs[-1]), flush=True)
            if args.out:
                write(args.out, runs, parameters)


def write(out: Path, runs: Sequence[Row], parameters: int) -> None:
    """The file and its table, with what other runs have put there."""
    known = json.loads(out.read_text("utf-8"))["runs"] if out.exists() else []
    document = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(), "commit": commit(), "parameters": parameters, "formula": FORMULA,
        "runs": merged(known, runs),
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    out.with_suffix(".md").write_text(markdown(document), "utf-8")


if __name__ == "__main__":
    main()
