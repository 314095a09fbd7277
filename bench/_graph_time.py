"""How long work takes on a GPU when nobody waits for the host: replays of a CUDA graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

WARM_S = 0.03
"""Seconds of replays that nobody times: right after large allocations an H200 is up to a tenth slower for 10 ms."""
LEAST = 6
"""Calls of a graph at least, so that the 5 us between two graphs are spread."""


def graph_time(calls: list[Callable[[], Any]], repeats: int = 9, least: int = 1) -> float:
    """Milliseconds of one call, the median over replays of one graph of all of them, one for each input set, in turn
    until there are `least`. An untimed replay goes before each timed one, so that the device is at work when the clock
    starts and the host is not in the figure."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    calls = calls * max(1, -(-least // len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    began = time.monotonic()
    while time.monotonic() - began < WARM_S:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times)
