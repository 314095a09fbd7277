"""The engine of `bench.rest` without a front end: a process of its own that admits and answers, and speaks no HTTP.

    python -m bench._rest_alone ROOT --batch 32 --seconds 4 --k 50

As many requests are under way as `bench.rest` has connections in its closed loop; one line of JSON says how many were
answered in a second and how long the context and each step took, in milliseconds. Then requests come a few a second,
as they do there: how long each took from its admission to its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from app.cli.compose import Overrides, Service, compose
from app.cli.load import arrivals
from app.cli.loop import run
from app.cli.serve import use_short_turns
from app.runtime.runtime import Runtime
from bench._served import request
from bench.rest import FEW, WARM_S, bodies_ids, few_seconds, parse_metrics, percentiles, steps_ms


async def alone(service: Service, histories: list[list[str]], batch: int, seconds: float, k: int) -> dict[str, Any]:
    """Serve in a closed loop, then a few; what was measured."""
    runtime = service.build()
    try:
        await runtime.start(service.load)
        if runtime.reasons():
            raise RuntimeError("; ".join(runtime.reasons()))
        answered, stop = [0], asyncio.Event()
        asking = [asyncio.create_task(_ask(runtime, histories, n, k, answered, stop)) for n in range(3 * batch)]
        await asyncio.sleep(WARM_S)
        before, count, began = parse_metrics(service.metrics.render()), answered[0], time.monotonic()
        await asyncio.sleep(seconds)
        after, took = parse_metrics(service.metrics.render()), time.monotonic() - began
        found = {"per_s": (answered[0] - count) / took, "steps_ms": steps_ms(before, after)}
        stop.set()
        await asyncio.gather(*asking)
        return found | {"few_ms": percentiles(await few(runtime, histories, k, few_seconds(seconds)))}
    finally:
        runtime.close()


async def few(runtime: Runtime, histories: list[list[str]], k: int, seconds: float) -> list[float]:
    """Seconds of each of so many requests a second as `bench.rest` has in its row of that name."""
    took: list[float] = []

    async def one(history: list[str]) -> None:
        began = time.monotonic()
        await runtime.admit(request(history, k, None)).outcome()
        took.append(time.monotonic() - began)

    start = time.monotonic()
    async with asyncio.TaskGroup() as asked:
        for number, at in enumerate(arrivals(FEW, seconds, 1)):
            await asyncio.sleep(start + at - time.monotonic())
            asked.create_task(one(histories[number % len(histories)]))
    return took


async def _ask(
    runtime: Runtime, histories: list[list[str]], first: int, k: int, answered: list[int], stop: asyncio.Event
) -> None:
    at = first
    while not stop.is_set():
        await runtime.admit(request(histories[at % len(histories)], k, None)).outcome()
        answered[0] += 1
        at += 7


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--items", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--k", type=int, required=True)
    args = parser.parse_args()
    use_short_turns()
    histories = bodies_ids(args.context, args.items)
    with Path(os.devnull).open("wb") as log:
        service = compose(args.root, Overrides(), log)
        print(json.dumps(run(alone(service, histories, args.batch, args.seconds, args.k))))


if __name__ == "__main__":
    main()
