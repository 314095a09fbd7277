"""What a request costs each thread of a server, in microseconds of processor time: no GPU needed.

    python -m bench.request_cost [--requests 3000] [--connections 64] [--items 100000] [--k 50] [--profile FILE]

A server in this process over a root with a tiny model and a catalogue of `items`; a client process in a closed loop
asks with histories of 511 items. The event loop, the engine thread and the finishing thread share one interpreter, so
what the loop costs for each request is time that the other two may have to wait for. Processor time, not the clock's:
other processes do not count. `--profile` writes cProfile's data of the loop's thread (which costs about as much again).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
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
from bench.rest import bodies, write_root

SHAPE = Shape(codes=64, steps=3, width=64, context=512, d=32, layers=1, heads=2, ffn=64, items=100_000)
BATCH = 32
WARM, START_TIMEOUT_S = 200, 60.0
LOOP, OTHERS = "MainThread", "others"


@dataclass(frozen=True)
class Effort:
    """requests: how many are measured · connections: of the closed loop · k: items an answer."""

    requests: int = 3000
    connections: int = 64
    k: int = 50


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
            served = await _asked(url, shape, effort)
            after = spent()
        if profile:
            profiler.dump_stats(profile)
        return {name: 1e6 * (seconds - before.get(name, 0.0)) / served for name, seconds in after.items()}
    finally:
        stop.set()
        await server


def spent() -> dict[str, float]:
    """Processor seconds of this process by thread; those that Python does not know together."""
    found = {one.name: time.clock_gettime(time.pthread_getcpuclockid(one.ident)) for one in threading.enumerate()
             if one.ident is not None and (one.name == LOOP or one.name.startswith("widebeam-"))}  # fmt: skip
    return found | {OTHERS: time.process_time() - sum(found.values())}


async def _asked(url: str, shape: Shape, effort: Effort) -> int:
    """Let a client process ask; how many answers it had."""
    command = [sys.executable, "-m", "bench.request_cost", "--client", url, "--items", str(shape.items)]
    command += ["--context", str(shape.context), "--requests", str(effort.requests), "--k", str(effort.k)]
    process = await asyncio.create_subprocess_exec(
        *command, "--connections", str(effort.connections), stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent
    )
    out, _ = await process.communicate()
    return int(json.loads(out)["answered"])


async def _client(url: str, asked: list[bytes], effort: Effort) -> int:
    load = ClosedLoop(Target.parse(url), asked, timeout_s=60.0, connections=effort.connections)
    await load.until(0.0, effort.requests)
    while load.outstanding > 0:  # noqa: ASYNC110  sockets answer, no event of ours
        await asyncio.sleep(0.01)
    load.close()
    if load.errors:
        raise RuntimeError(f"the server failed: {dict(load.errors)}")
    return len(load.latencies)


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--connections", type=int, default=2 * BATCH)
    parser.add_argument("--items", type=int, default=SHAPE.items)
    parser.add_argument("--context", type=int, default=SHAPE.context)
    parser.add_argument("--k", type=int, default=50)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    effort, shape = Effort(args.requests, args.connections, args.k), SHAPE._replace(
        items=args.items, context=args.context
    )  # fmt: skip
    if args.client:
        asked = bodies(shape, shape.items // 2, effort.k)
        print(json.dumps({"answered": run(_client(args.client, asked, effort))}))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = write_root(Path(folder) / "root", shape, BATCH, "float32")
        cost = measure(root, shape, effort, args.profile)
    rows = [[name, f"{microseconds:.0f}"] for name, microseconds in sorted(cost.items())]
    print(f"{effort.requests} requests, {effort.connections} connections, histories of {shape.context - 1} items, "
          f"k = {effort.k}, {len(os.sched_getaffinity(0))} cores\n")  # fmt: skip
    print(table(["thread", "microseconds a request"], rows))


if __name__ == "__main__":
    main()
