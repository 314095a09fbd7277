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

from app.core import Outcome
from bench import _demo, _report, _served
from bench._peers import NAMES, Found, Peers, peers
from bench._setting import TOY, Setting, make_catalogue, make_histories, parameters, policy_name, write_root

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
PAUSE_S = 0.03
"""Before each run: OpenMP's threads of the process before it spin for milliseconds on, on the next one's cores."""

Row = dict[str, object]


@dataclass(frozen=True)
class Contestant:
    """find(B, W) gives its items; time(B, W) runs the same once more and gives milliseconds."""

    name: str
    find: Callable[[int, int], Found]
    time: Callable[[int, int], float]
    often: bool = True


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    _own_settings()
    result: Row = {}
    settings = _report.settings(PROCESS, THREADS)
    with tempfile.TemporaryDirectory(prefix="widebeam-bench-") as work:
        if options.only != "demo":
            setting, cells = (TOY, ((1, 4), (2, 8))) if options.toy else (Setting(), CELLS)
            result["search"] = {"settings": settings, **search(setting, cells, options.seconds, Path(work) / "search")}
        if options.only != "search":
            effort = _demo.Effort(0.5, 0.5, 3, 1, (2,)) if options.toy else _demo.Effort()
            users = _demo.histories_of(CLONE / "examples" / "movielens" / "users.json")
            (Path(work) / "demo").mkdir()
            result["demo"] = {"settings": settings, **_demo.measure(CLONE, users, Path(work) / "demo", effort)}
    options.out.mkdir(parents=True, exist_ok=True)
    if options.only is not None and (options.out / "cpu.json").exists():  # the other half stays, with its own settings
        result = json.loads((options.out / "cpu.json").read_text("utf-8")) | result
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
    sids, batch, widths = make_catalogue(setting), max(b for b, _ in cells), sorted({w for _, w in cells})
    items = [[f"i{n}" for n in history] for history in make_histories(setting, batch)]
    work.mkdir()
    rows: list[Row] = []
    with ExitStack() as stack:
        others = stack.enter_context(peers(setting, batch, THREADS, work / "exported"))
        root = write_root(work / "root", setting, work / "exported", sids, widths, batch, THREADS)
        runtime = stack.enter_context(_served.in_process(root))
        client = _served.Client(stack.enter_context(_served.server(root, work / "server.log")))
        stack.callback(client.close)
        everybody = [*(_peer(others, name) for name in NAMES), _in_process(runtime, items), _rest(client, items)]
        for b, w in cells:
            print(f"batch {b}, W {w}", file=sys.stderr, flush=True)
            rows.append(_cell(everybody, b, w, seconds))
    known = {"parameters": parameters(setting), "prompt_tokens": setting.prompt}
    return {"setting": setting.__dict__ | known, "cells": rows}


def _peer(others: Peers, name: str) -> Contestant:
    return Contestant(
        name,
        lambda b, w: others.search(name, b, w),
        lambda b, w: others.milliseconds(name, b, w),
        often=name != "generate",
    )


def _in_process(runtime: _served.InProcess, items: list[list[str]]) -> Contestant:
    def ask(b: int, w: int) -> list[Outcome]:
        return runtime.ask([_served.request(history, w, policy_name(w)) for history in items[:b]])

    return Contestant("Widebeam, in process", lambda b, w: _served.found(ask(b, w)), timed(ask))


def _rest(client: _served.Client, items: list[list[str]]) -> Contestant:
    def ask(b: int, w: int) -> list[bytes]:
        return client.ask([_served.body(history, w, policy_name(w)) for history in items[:b]])

    def find(b: int, w: int) -> Found:
        client.open(b)
        return _served.answers([client.decode(reply) for reply in ask(b, w)])

    return Contestant("Widebeam, REST", find, timed(ask))


def timed(ask: Callable[[int, int], object]) -> Callable[[int, int], float]:
    """ask's milliseconds."""

    def run(batch: int, width: int) -> float:
        start = time.perf_counter()
        ask(batch, width)
        return 1e3 * (time.perf_counter() - start)

    return run


def _cell(everybody: Sequence[Contestant], batch: int, width: int, seconds: float) -> Row:
    results = {one.name: one.find(batch, width) for one in everybody}  # warms up, too
    expected = results[everybody[0].name]
    swaps = {name: compare(expected, found, name) for name, found in results.items()}
    times: dict[str, list[float]] = {one.name: [] for one in everybody}
    began = time.perf_counter()
    for turn in range(ROUNDS):
        if turn >= LEAST and time.perf_counter() - began > seconds:
            break
        for inner in range(OFTEN):
            for one in everybody:
                if one.often or inner == 0:
                    time.sleep(PAUSE_S)
                    times[one.name].append(one.time(batch, width))
    return {
        "batch": batch, "width": width, "items": sum(map(len, expected)), "near_ties_swapped": swaps,
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
