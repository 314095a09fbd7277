"""Whether a weights version fits beside what is loaded, known before a byte of it is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import torch

from app.config import Deployment
from app.engine.weights import read_entries, resolve_precision
from app.errors import Rejected

SPARE: Final = 64 << 20
"""Bytes that stay free."""


def needed(directory: Path, deployment: Deployment, device: torch.device) -> int:
    """Bytes of a version's parameters in the engine's dtype; it is read in pieces, which count as spare.

    Raises Rejected where the headers cannot be read.
    """
    size = resolve_precision(deployment.precision, device).itemsize
    numbers = [math.prod(entry.shape) for entry in read_entries(directory).values()]
    return size * sum(numbers)


def free(device: torch.device) -> int | None:
    """Bytes that can still be taken on a device; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [value for value in (_machine(), _container()) if value is not None]
    return min(known, default=None)


def check_fits(directory: Path, deployment: Deployment, device: torch.device, reused: int = 0) -> None:
    """Raise Rejected("no_memory") where a version would not fit. reused: bytes of free slots, which it gets first."""
    want, have = max(0, needed(directory, deployment, device) - reused), free(device)
    if have is not None and want and want + SPARE > have:
        message = f"{want >> 20} MiB are needed beside what is loaded, {have >> 20} MiB are free"
        raise Rejected("no_memory", message)


def _machine() -> int | None:
    """MemAvailable of Linux."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _container() -> int | None:
    """What a cgroup (v2) leaves; the page cache that it counts can be taken back, and is."""
    group = Path("/sys/fs/cgroup")
    try:
        most = (group / "memory.max").read_text("ascii").strip()
        if most == "max":
            return None
        stat = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        return int(most) - int((group / "memory.current").read_text("ascii")) + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
