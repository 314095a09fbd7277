"""What it costs that OpenMP's threads spin while they wait, or sleep, with free cores and with cores that others want.

    python -m bench.waits [--rounds 12] [--busy 0 2] [--realtime] [--out FILE]

Servers that differ in nothing but how their threads wait are asked in turn, round after round, by the same client,
alone and beside processes that do nothing but compute (`--busy`: how many). With `--realtime` servers and client come
before everything else on the machine where no such process runs: free cores on a busy machine (Linux, as root).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from bench import _report
from bench._served import Client, body, server
from bench._setting import Setting, make_catalogue, make_histories, make_model, policy_name, write_root

WAYS: dict[str, dict[str, str]] = {
    "as OpenMP does": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "one thread": {},
}
"""What a server has in its environment. "one thread" has `[server] threads = 1` instead."""
OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
STAND_IN = Setting(
    sizes=(16, 16, 16), items=300, history=3, layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64
)
"""As large as docs/own-model.md's stand-in."""
PAUSE_S = 0.03
"""Between two servers' turns: threads of the one before spin for milliseconds on."""
TURN_S = 5.0
"""A turn ends early then."""
BURN = "while True: pass"


class Load(NamedTuple):
    """So many requests at once, each of a width; `turn` of these one after the other before the next server's turn."""

    setting: str
    at_once: int
    width: int
    turn: int


SETTINGS = {"stand-in": STAND_IN, "bench.cpu": Setting()}
LOADS = (
    Load("stand-in", 1, 64, 20), Load("stand-in", 4, 64, 20), Load("bench.cpu", 1, 50, 8), Load("bench.cpu", 8, 50, 3),
    Load("bench.cpu", 1, 256, 4), Load("bench.cpu", 8, 256, 1),
)  # fmt: skip


class Asked:
    """A server, its client, and what was measured of it: milliseconds by busy processes and load."""

    def __init__(self, port: int) -> None:
        self.client = Client(port)
        self.times: dict[tuple[int, Load], list[float]] = {}

    def ask(self, bodies: Sequence[bytes]) -> float:
        """One round trip of all bodies at once, in milliseconds."""
        start = time.perf_counter()
        self.client.ask(bodies)
        return 1e3 * (time.perf_counter() - start)


@contextmanager
def first() -> Iterator[None]:
    """This process and those that it has started come before all others."""
    pids = [str(os.getpid()), *Path(f"/proc/self/task/{os.getpid()}/children").read_text("utf-8").split()]
    tasks = [int(task.name) for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    try:
        for task in tasks:
            os.sched_setscheduler(task, os.SCHED_RR, os.sched_param(1))
        yield
    finally:
        for task in tasks:
            with suppress(ProcessLookupError):
                os.sched_setscheduler(task, os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that want a core each."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def servers(stack: ExitStack, work: Path, name: str, setting: Setting, ways: Sequence[str]) -> dict[str, Asked]:
    """A server of each way over a root of its own."""
    exported = work / f"{name}-model"
    make_model(setting).save_pretrained(exported)
    widths = sorted({load.width for load in LOADS if load.setting == name})
    clean = {key: value for key, value in os.environ.items() if key not in OPENMP}
    found, exports = dict[str, Asked](), Path()
    for way in ways:
        root = work / f"{name}-{way}".replace(" ", "-")
        threads = 1 if way == "one thread" else 0
        write_root(root, setting, exported, make_catalogue(setting), widths, 8, threads)
        if found:
            shutil.copytree(exports, root / "contracts")  # one export for all
        with mock.patch.dict(os.environ, clean | WAYS[way], clear=True):
            port = stack.enter_context(server(root, work / f"{root.name}.log"))
        found[way], exports = Asked(port), root / "contracts"
        stack.callback(found[way].client.close)
    return found


def turns(asked: dict[str, Asked], load: Load, others: int, rounds: int) -> None:
    """Every server's turn, in an order of its own each round; the first request of each turn is not counted."""
    histories = make_histories(SETTINGS[load.setting], load.at_once)
    bodies = [body([f"i{n}" for n in items], min(50, load.width), policy_name(load.width)) for items in histories]
    order = list(asked)
    for _ in range(rounds):
        random.shuffle(order)
        for way in order:
            time.sleep(PAUSE_S)
            one = asked[way]
            one.client.open(load.at_once)
            one.ask(bodies)
            times, end = one.times.setdefault((others, load), []), time.monotonic() + TURN_S
            for _ in range(load.turn):
                times.append(one.ask(bodies))
                if time.monotonic() > end:
                    break


def table(asked: dict[str, Asked], others: int, load: Load) -> list[dict[str, Any]]:
    """Median, p99 and runs of each server, and its median against the first one's."""
    first = statistics.median(next(iter(asked.values())).times[others, load])
    rows = []
    for way, one in asked.items():
        times = sorted(one.times[others, load])
        median = statistics.median(times)
        rows.append(
            {
                "model": load.setting, "at_once": load.at_once, "width": load.width, "busy": others, "way": way,
                "runs": len(times), "median_ms": round(median, 2), "p99_ms": round(times[int(0.99 * len(times))], 2),
                "mean_ms": round(statistics.mean(times), 2), "ratio": round(median / first, 3),
            }
        )  # fmt: skip
    return rows


def measured(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model."""
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="widebeam-waits-") as work, ExitStack() as stack:
        asked = servers(stack, Path(work), name, SETTINGS[name], options.ways)
        for others in options.busy:
            with busy(others), first() if options.realtime and others == 0 else nullcontext():
                for load in LOADS:
                    if load.setting == name:
                        turns(asked, load, others, options.rounds)
                        rows += table(asked, others, load)
                        new = [list(map(str, row.values())) for row in rows[-len(asked) :]]
                        print(_report.table(list(rows[0]), new), flush=True)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--models", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--realtime", action="store_true", help="come before all other processes: as root")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args()
    result = {"command": " ".join(sys.orig_argv[1:]), "settings": _report.settings({}, 0)}
    result["rows"] = [row for name in options.models for row in measured(name, options)]
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
