"""The demo root under load: requests a second at saturation, percentiles in an open loop, and what REST adds."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.cli.load import Load, Target, run_load
from app.cli.loop import run as run_loop
from bench._served import Client, body, copy_root, in_process, request, server

Row = dict[str, object]
LEAST = 8
"""Answers without which a figure would be none, however slow the machine."""
POLL_S = 0.001
PAUSE_S = 0.03
"""See `bench.cpu`: two processes take turns here, too."""


@dataclass(frozen=True)
class Effort:
    """How long the parts run."""

    closed_s: float = 12.0
    open_s: float = 30.0
    pairs: int = 300
    warm: int = 10
    connections: tuple[int, ...] = (16, 64)


def measure(root: Path, histories: Sequence[Sequence[str]], work: Path, effort: Effort) -> Row:
    """Everything about one root. histories: item ids of the users who ask, in turn."""
    copy = copy_root(root, work / "root")
    added = rest_adds(copy, histories[0], work, effort)
    bodies = [body(history, 10, None) for history in histories]
    with server(copy, work / "load.log") as port:
        target = Target.parse(f"http://127.0.0.1:{port}")
        closed = [_saturate(target, bodies, count, effort.closed_s) for count in effort.connections]
        most = max(row["per_s"] for row in closed)
        rate = 0.7 * most
        seconds = max(effort.open_s, LEAST / rate)
        opened = run_loop(
            run_load(
                target, bodies, url=f"http://127.0.0.1:{port}", rate=rate, seconds=seconds, seed=1,
                timeout_s=30.0, connections=256,
            )
        )  # fmt: skip
    return {
        "rest_adds": added,
        "closed_loop": closed,
        "saturation_per_s": round(most, 2),
        "open_loop": {
            "rate_per_s": round(rate, 2), "seconds": round(seconds, 1),
            "sent": opened.sent, "answered": opened.answered,
            "errors": opened.errors, "latency_ms": opened.latency_ms, "sent_late_ms": opened.late_ms,
        },
    }  # fmt: skip


def _saturate(target: Target, bodies: Sequence[bytes], connections: int, seconds: float) -> dict[str, float]:
    """A closed loop: so many clients, each asking again as soon as it has its answer."""

    async def run() -> dict[str, float]:
        load = ClosedLoop(target, bodies, timeout_s=60.0, connections=connections)
        warm = time.monotonic() + min(2.0, seconds / 4)
        await load.until(warm)
        before, start = len(load.latencies), time.monotonic()
        await load.until(start + seconds, before + LEAST)
        answered, took = len(load.latencies) - before, time.monotonic() - start
        latencies = sorted(load.latencies[before:])
        load.close()
        if load.errors:
            raise RuntimeError(f"closed loop: {dict(load.errors)}, {answered} answered")
        return {"connections": connections, "per_s": answered / took, "p50_ms": 1e3 * statistics.median(latencies)}

    return run_loop(run())


class ClosedLoop(Load):
    """The load generator with as many requests under way as it has connections."""

    async def until(self, end: float, answers: int = 0) -> None:
        """Keep every connection busy until `end` in `time.monotonic` seconds, and until so many answers have come."""
        while (now := time.monotonic()) < end or (len(self.latencies) < answers and not self.errors):
            while self.outstanding < self._most:
                self._fire(self._messages[self.sent % len(self._messages)], now)
                self.sent += 1
                self.outstanding += 1
            await asyncio.sleep(POLL_S)  # not 0: a client that spins takes a core from the server


def rest_adds(root: Path, history: Sequence[str], work: Path, effort: Effort) -> list[Row]:
    """One client, one request at a time: REST and the runtime in this process in turn, the same request.

    server_ms is what the server itself says from the request's last byte to its answer (`timings_ms.total`), so that
    `rest_ms - server_ms`, pair by pair, is what sockets, HTTP, JSON and the client cost; `difference_of_medians_ms`
    compares two processes.
    """
    rows = []
    with in_process(root) as runtime, server(root, work / "rest.log") as port:
        client = Client(port)
        client.open(1)
        for policy, k in ((None, 10), ("narrow", 10), (None, 100)):
            data = body(history, k, policy)
            rest, own, inside = [], [], []
            for turn in range(effort.warm + effort.pairs):
                time.sleep(PAUSE_S)
                start = time.perf_counter()
                (reply,) = client.ask([data])
                middle = time.perf_counter()
                time.sleep(PAUSE_S)
                between = time.perf_counter()
                runtime.ask([request(history, k, policy)])
                end = time.perf_counter()
                if turn >= effort.warm:
                    rest.append(1e3 * (middle - start))
                    own.append(1e3 * (end - between))
                    inside.append(client.decode(reply).timings_ms.total)
            around = [a - b for a, b in zip(rest, inside, strict=True)]
            rows.append(
                {
                    "policy": policy or "default", "k": k, "pairs": effort.pairs,
                    "rest_ms": round(statistics.median(rest), 3), "in_process_ms": round(statistics.median(own), 3),
                    "server_ms": round(statistics.median(inside), 3),
                    "around_the_runtime_ms": round(statistics.median(around), 3),
                    "difference_of_medians_ms": round(statistics.median(rest) - statistics.median(own), 3),
                }
            )  # fmt: skip
        client.close()
    return rows


def histories_of(file: Path) -> list[list[str]]:
    """The histories of examples/movielens/users.json."""
    return [user["history"] for user in json.loads(file.read_text("utf-8"))]
