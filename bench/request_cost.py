"""What a request costs each thread of a server, in microseconds of processor time: no GPU needed.

    python -m bench.request_cost [--requests 3000] [--connections 64] [--items 100000] [--k 50] [--profile FILE]
                                 [--front-ends 0 1 2] [--rounds 3] [--alone 500]

A server in this process over a root with a tiny model and a catalogue of `items`; a client process in a closed loop
asks with histories of 511 items, then with one request at a time, whose median latency is told. The event loop, the
engine thread and the finishing thread share one interpreter, so what the loop costs for each request is time that the
other two may have to wait for. With front ends, HTTP is in processes of its own, which are one row together. Rounds of
all numbers of front ends take turns; the cheapest round of each thread counts, and the quickest median. Processor time,
not the clock's: other processes do not count. `--profile` writes cProfile's data of the loop's thread (which costs
about as much again).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from app.api.server import Addresses
from app.cli import serve
from app.cli.compose import Overrides, Service, compose
from app.cli.load import Target
from app.cli.loop import run
from bench._demo import ClosedLoop
from bench._report import table
from bench._served import _ready
from bench._synthetic import Shape
from bench.rest import bodies, with_front_ends, write_root

SHAPE = Shape(codes=64, steps=3, width=64, context=512, d=32, layers=1, heads=2, ffn=64, items=100_000)
BATCH = 32
WARM, START_TIMEOUT_S = 200, 600.0
LOOP, OTHERS, FRONT_ENDS, LATENCY = "MainThread", "others", "front ends", "median latency, one at a time"


@dataclass(frozen=True)
class Effort:
    """requests: how many are measured · connections: of the closed loop · k: items an answer · alone: requests one at a
    time, for their latency; 0 = none"""

    requests: int = 3000
    connections: int = 64
    k: int = 50
    alone: int = 0


def measure(root: Path, shape: Shape, effort: Effort, profile: Path | None = None) -> dict[str, float]:
    """Microseconds a request, by thread. The log goes to a file, as a server's would."""
    torch.set_num_threads(1)
    with tempfile.TemporaryFile("wb", buffering=0) as log:
        service = compose(root, Overrides(), log)
        return run(_measure(service, root, shape, effort, profile))


async def _measure(
    service: Service, root: Path, shape: Shape, effort: Effort, profile: Path | None
) -> dict[str, float]:
    listening: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    server = asyncio.create_task(serve.run(service, root, listening.set_result, stop))
    try:
        url = (await listening).public
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await asyncio.to_thread(_ready, int(url.rsplit(":", 1)[1])):  # noqa: ASYNC110  as a client sees it
                await asyncio.sleep(0.1)
        await _asked(url, shape, Effort(WARM, effort.connections, effort.k))
        profiler = cProfile.Profile(time.thread_time)
        with profiler if profile else nullcontext():
            before = spent()
            served, _ = await _asked(url, shape, effort)
            after = spent()
        if profile:
            profiler.dump_stats(profile)
        cost = {name: 1e6 * (seconds - before.get(name, 0.0)) / served for name, seconds in after.items()}
        if effort.alone:
            _, median_s = await _asked(url, shape, Effort(effort.alone, 1, effort.k))
            cost[LATENCY] = 1e6 * median_s
        return cost
    finally:
        stop.set()
        await server


def spent() -> dict[str, float]:
    """Processor seconds of this process by thread; those that Python does not know together."""
    found = {one.name: time.clock_gettime(time.pthread_getcpuclockid(one.ident)) for one in threading.enumerate()
             if one.ident is not None and (one.name == LOOP or one.name.startswith("widebeam-"))}  # fmt: skip
    children = sum(map(_child_seconds, front_ends()))
    found |= {OTHERS: time.process_time() - sum(found.values())}
    return found | {FRONT_ENDS: children} if children else found


def front_ends() -> list[int]:
    """The processes that speak HTTP for this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            ours = int(_fields(process)[1]) == os.getpid()
            if ours and b"app.cli.front_end" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def _fields(process: Path) -> list[str]:
    """Of its stat, from the state on."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _child_seconds(process: int) -> float:
    """Processor seconds of a process."""
    fields = _fields(Path(f"/proc/{process}"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _asked(url: str, shape: Shape, effort: Effort) -> tuple[int, float]:
    """Let a client process ask: how many answers it had, and their median latency in seconds."""
    command = [sys.executable, "-m", "bench.request_cost", "--client", url, "--items", str(shape.items)]
    command += ["--context", str(shape.context), "--requests", str(effort.requests), "--k", str(effort.k)]
    process = await asyncio.create_subprocess_exec(
        *command, "--connections", str(effort.connections), stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent
    )
    out, _ = await process.communicate()
    told = json.loads(out)
    return int(told["answered"]), float(told["median_s"])


async def _client(url: str, asked: list[bytes], effort: Effort) -> list[float]:
    load = ClosedLoop(Target.parse(url), asked, timeout_s=60.0, connections=effort.connections)
    await load.until(0.0, effort.requests)
    while load.outstanding > 0:  # noqa: ASYNC110  sockets answer, no event of ours
        await asyncio.sleep(0.01)
    load.close()
    if load.errors:
        raise RuntimeError(f"the server failed: {dict(load.errors)}")
    return load.latencies


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--connections", type=int, default=2 * BATCH)
    parser.add_argument("--items", type=int, default=SHAPE.items)
    parser.add_argument("--context", type=int, default=SHAPE.context)
    parser.add_argument("--k", type=int, default=50)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--front-ends", nargs="+", type=int, default=[0])
    parser.add_argument("--alone", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    effort, shape = Effort(args.requests, args.connections, args.k, args.alone), SHAPE._replace(
        items=args.items, context=args.context
    )  # fmt: skip
    if args.client:
        asked = bodies(shape, shape.items // 2, effort.k)
        latencies = run(_client(args.client, asked, effort))
        print(json.dumps({"answered": len(latencies), "median_s": statistics.median(latencies)}))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = write_root(Path(folder) / "root", shape, BATCH, "float32")
        found: dict[int, list[dict[str, float]]] = {number: [] for number in args.front_ends}
        for _ in range(args.rounds):
            for number, costs in found.items():
                costs.append(measure(with_front_ends(root, number), shape, effort, args.profile))
    names = sorted({name for costs in found.values() for cost in costs for name in cost})
    rows = [[name, *(_least(costs, name) for costs in found.values())] for name in names]
    print(f"{effort.requests} requests, {effort.connections} connections, histories of {shape.context - 1} items, "
          f"k = {effort.k}, {len(os.sched_getaffinity(0))} cores\n")  # fmt: skip
    print(table(["microseconds a request", *(f"{number} front ends" for number in found)], rows))


def _least(costs: list[dict[str, float]], name: str) -> str:
    found = [cost[name] for cost in costs if name in cost]
    return f"{min(found):.0f}" if found else "-"


if __name__ == "__main__":
    main()
