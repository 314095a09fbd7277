"""Widebeam, transformers' `generate` and a fair own loop with the same weights on this CPU; the demo under load.

    python -m bench.cpu [--out DIR] [--seconds S] [--only search|demo] [--toy]

Writes DIR/cpu.json and DIR/cpu.md (default: bench/results). See bench/README.md for what is compared and how.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import _demo, _report, _served
from bench._peers import Catalogue, Found, Generate, Repeated, Tail, Tree
from bench._setting import (
    TOY,
    Setting,
    make_catalogue,
    make_histories,
    make_model,
    make_prompts,
    policy_name,
    write_root,
)

CLONE = Path(__file__).parent.parent
THREADS = 2
PROCESS = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "OMP_NUM_THREADS": str(THREADS),
    "MKL_NUM_THREADS": str(THREADS),
}
"""What every contestant runs under, the server included: page faults of large temporaries cost more than arithmetic."""

CELLS = ((1, 50), (8, 50), (1, 256), (8, 256))
EPS = 1e-4
ROUNDS, LEAST = 40, 5
OFTEN = 3
"""The quick contestants run so many times a round, `generate` once."""

Row = dict[str, object]


@dataclass(frozen=True)
class Contestant:
    """prepare(B, W) gives what is timed, and how its result reads as items."""

    name: str
    prepare: Callable[[int, int], tuple[Callable[[], object], Callable[[object], Found]]]
    often: bool = True


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    _own_settings()
    torch.set_num_threads(THREADS)
    result: Row = {"settings": _report.settings(PROCESS, THREADS)}
    with tempfile.TemporaryDirectory(prefix="widebeam-bench-") as work:
        if options.only != "demo":
            setting, cells = (TOY, ((1, 4), (2, 8))) if options.toy else (Setting(), CELLS)
            result["search"] = search(setting, cells, options.seconds, Path(work) / "search")
        if options.only != "search":
            effort = _demo.Effort(0.5, 0.5, 5, (2,)) if options.toy else _demo.Effort()
            users = _demo.histories_of(CLONE / "examples" / "movielens" / "users.json")
            (Path(work) / "demo").mkdir()
            result["demo"] = _demo.measure(CLONE, users, Path(work) / "demo", effort)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "cpu.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    text = _report.markdown(result)
    (options.out / "cpu.md").write_text(text, "utf-8")
    print(text)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where cpu.json and .md go")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each (batch, W)")
    parser.add_argument("--only", choices=("search", "demo"), help="one half only")
    parser.add_argument(
        "--toy", action="store_true", help="a tiny model, seconds in all: whether it runs, not how fast"
    )
    return parser.parse_args(arguments)


def _own_settings() -> None:
    """Start again under PROCESS: the allocator and OpenMP read their settings when a process starts."""
    if any(os.environ.get(name) != value for name, value in PROCESS.items()):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **PROCESS})


# ---- the same search by everybody ----------------------------------------------------------------------------------


def search(setting: Setting, cells: Sequence[tuple[int, int]], seconds: float, work: Path) -> Row:
    """Every cell: all contestants once for their items, then in turn until the time is over."""
    model, sids = make_model(setting), make_catalogue(setting)
    batch, widths = max(b for b, _ in cells), sorted({w for _, w in cells})
    histories = make_histories(setting, batch)
    prompts = make_prompts(setting, sids, histories)
    root = write_root(work, setting, model, sids, widths, batch)
    rows: list[Row] = []
    with ExitStack() as stack:
        runtime = stack.enter_context(_served.in_process(root))
        port = stack.enter_context(_served.server(root, work / "server.log"))
        client = _served.Client(port, batch)
        stack.callback(client.close)
        items = [[f"i{n}" for n in history] for history in histories]
        catalogue = Catalogue(sids, setting.sizes, setting.token_base)
        everybody = [
            _peer(Generate(model, catalogue), prompts, often=False),
            *(_peer(kind(model, catalogue), prompts) for kind in (Repeated, Tail, Tree)),
            Contestant("Widebeam, in process", lambda b, w: _in_process(runtime, items[:b], w)),
            Contestant("Widebeam, REST", lambda b, w: _rest(client, items[:b], w)),
        ]
        for b, w in cells:
            print(f"batch {b}, W {w}", file=sys.stderr, flush=True)
            rows.append(_cell(everybody, b, w, seconds))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"setting": setting.__dict__ | {"parameters": parameters, "prompt_tokens": setting.prompt}, "cells": rows}


def _peer(peer: Generate | Repeated | Tail | Tree, prompts: torch.Tensor, *, often: bool = True) -> Contestant:
    return Contestant(peer.name, lambda b, w: (lambda: peer.search(prompts[:b], w), lambda result: result), often)


def _in_process(runtime: _served.InProcess, histories: list[list[str]], width: int):
    policy = policy_name(width)
    return lambda: runtime.ask([_served.request(one, width, policy) for one in histories]), _served.found


def _rest(client: _served.Client, histories: list[list[str]], width: int):
    bodies = [_served.body(one, width, policy_name(width)) for one in histories]
    return lambda: client.ask(bodies), lambda replies: _served.answers([client.decode(reply) for reply in replies])


def _cell(everybody: Sequence[Contestant], batch: int, width: int, seconds: float) -> Row:
    ready = [(one, *one.prepare(batch, width)) for one in everybody]
    results = {one.name: read(run()) for one, run, read in ready}  # warms up, too
    swaps = {name: compare(results[everybody[0].name], found, name) for name, found in results.items()}
    times: dict[str, list[float]] = {one.name: [] for one in everybody}
    began = time.perf_counter()
    for turn in range(ROUNDS):
        if turn >= LEAST and time.perf_counter() - began > seconds:
            break
        for inner in range(OFTEN):
            for one, run, _ in ready:
                if one.often or inner == 0:
                    start = time.perf_counter()
                    run()
                    times[one.name].append(1e3 * (time.perf_counter() - start))
    return {
        "batch": batch, "width": width, "items": sum(map(len, results[everybody[0].name])),
        "near_ties_swapped": swaps,
        "runs": {name: len(values) for name, values in times.items()},
        "median_ms": {name: round(statistics.median(values), 3) for name, values in times.items()},
        "min_ms": {name: round(min(values), 3) for name, values in times.items()},
    }  # fmt: skip


def compare(expected: Found, found: Found, name: str) -> int:
    """How many places differ; all of them must be near-ties: equal scores place by place, and whoever is missing from
    the other list lies at the cut. Raises RuntimeError otherwise."""
    swapped = 0
    for one, other in zip(expected, found, strict=True):
        if len(one) != len(other):
            raise RuntimeError(f"{name}: {len(other)} items instead of {len(one)}")
        far = [at for at, (a, b) in enumerate(zip(one, other, strict=True)) if abs(a[1] - b[1]) > EPS]
        if far:
            raise RuntimeError(f"{name}: place {far[0]} has {other[far[0]]} instead of {one[far[0]]}")
        scores, cut = dict(one), one[-1][1] + EPS
        wrong = [(sid, score) for sid, score in other if abs(scores.get(sid, min(score, cut)) - score) > EPS]
        if wrong or len(dict(other)) != len(other):
            raise RuntimeError(f"{name}: {wrong or 'an item twice'}")
        swapped += sum(a[0] != b[0] for a, b in zip(one, other, strict=True))
    return swapped


if __name__ == "__main__":
    sys.exit(main())
