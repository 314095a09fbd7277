"""Which kernels a GPU runs, when, and of which kind, as torch's profiler sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

KINDS = {
    "copies": ("memcpy", "memset"),
    "attention": ("flash", "fmha", "slots_", "walk_", "compact_", "context"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "splitk", "gated_product"),
    "norms and gates": ("norm", "gated", "quantise"),
    "selection": ("scan", "tail", "search", "children", "child", "narrow", "collect", "mark"),
}
"""By words of their names; everything else is "rest"."""


class Event(NamedTuple):
    """A kernel or a copy: microseconds at which it begins, and that it takes; its name in small letters."""

    begin: float
    micros: float
    name: str


def kind_of(name: str) -> str:
    """A key of KINDS, or "rest"."""
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "rest")


def events(run: Callable[[], object], times: int) -> list[Event]:
    """What the device does while something runs so many times, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    return sorted(
        Event(one.time_range.start, one.time_range.end - one.time_range.start, one.name.lower())
        for one in profile.events() or ()
        if one.device_type.name == "CUDA"
    )


def host_events(run: Callable[[], object], times: int) -> list[Event]:
    """What a CPU does meanwhile: torch's operators without those inside of them. An operator inside of an attention has
    that one's name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(times):
            run()
    found = profile.events() or ()
    return sorted(Event(one.time_range.start, one.self_cpu_time_total, _host_name(one)) for one in found)


def _host_name(event: Any) -> str:
    above = event
    while above is not None and "attention" not in above.name:
        above = above.cpu_parent
    return str((above or event).name).lower()


def profiled(run: Callable[[], object], batches: int = 3) -> dict[str, Any]:
    """Milliseconds a batch of the device's kernels, by kind and by name."""
    found = events(run, batches)
    kinds: dict[str, float] = dict.fromkeys([*KINDS, "rest"], 0.0)
    names: dict[str, float] = {}
    for _, micros, name in found:
        kinds[kind_of(name)] += micros / 1e3 / batches
        names[name[:80]] = names.get(name[:80], 0.0) + micros / 1e3 / batches
    longest = dict(sorted(names.items(), key=lambda one: -one[1])[:24])
    return {"kinds_ms": kinds, "busy_ms": sum(kinds.values()), "longest_ms": longest, "kernels": len(found) // batches}
