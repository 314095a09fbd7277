"""How long work takes on a GPU when nobody waits for the host: replays of a CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def graph_time(calls: list[Callable[[], Any]], repeats: int = 9) -> float:
    """Milliseconds of one call: all of them, one for each input set, in one graph. A replay that nobody times goes
    first, so that the device is at work when the clock starts and the host is not in the figure."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times[2:])
