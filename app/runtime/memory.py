"""Whether a version fits beside what is loaded, known before more of it than its headers is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from app.config import Deployment
from app.core import Contract
from app.engine.families.base import ModelFiles
from app.engine.fp8 import carrier
from app.engine.registry import family
from app.engine.safetensors import read_header
from app.engine.tokens import read_json
from app.engine.weights import layout, read_entries, resolve_precision
from app.errors import Rejected
from app.ops.fp8 import FP8
from app.runtime.workspace import arena_bytes
from app.vocab.aggregates import sizes
from app.vocab.artifact import FILE
from app.vocab.vocab import Vocab

EXHAUSTED: Final = (MemoryError, torch.OutOfMemoryError)
"""What is raised where memory ran out all the same."""
SPARE: Final = 64 << 20
"""Bytes that stay free."""
_PER_NODE: Final = 12
"""Of the trie on the host: first child, code and parent of a node."""
_PER_ITEM: Final = 20
"""Hash, place by hash, edge of hashes, leaf, and the leaf's first item."""
_TRIE: Final = 8
"""Of a node on the device: first child and code."""
_SORTING: Final = 24
"""Of an item while SIDs and hashes are sorted."""
_JOINING: Final = 16
"""Of an item and of a node while columns are joined: a float64 and a count."""


def needed(directory: Path, deployment: Deployment, device: torch.device) -> int:
    """Bytes of a version's parameters in the engine's dtype; it is read in pieces, which count as spare.

    Raises Rejected where the headers cannot be read.
    """
    wanted, entries = resolve_precision(deployment.precision, device), read_entries(directory)
    if wanted != FP8:
        return wanted.itemsize * sum(math.prod(entry.shape) for entry in entries.values())
    config = read_json(directory / "config.json")  # the family says which parameters are in 8 bits
    if not isinstance(config, dict):
        raise Rejected("bad_json", "is no JSON object", location="config.json")
    files = ModelFiles(config, directory, {name: entry.shape for name, entry in entries.items()})
    kind, sid, limits = family(deployment.family), deployment.sid, deployment.limits
    return layout(kind.build(files, sid, limits, carrier(wanted)), wanted, device).size


def catalogue_needed(items: int, nodes: int, file: int, deployment: Deployment) -> tuple[int, int]:
    """Bytes of a catalogue with its declared columns: on the host while it is made, and on the engine's device.

    items, nodes: how many it has, nodes at most · file: bytes of its table, 0 where that is in memory
    """
    columns, copied = sizes(deployment, items, nodes)
    kept = file + (_PER_NODE * nodes + _PER_ITEM * items if file else 0) + columns
    beside = max(_SORTING * items if file else 0, _JOINING * (items + nodes) if columns else 0)
    return kept + beside, (_TRIE * nodes if file else 0) + copied


def free(device: torch.device) -> int | None:
    """Bytes that can still be taken on a device; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [value for value in (_machine(), _container()) if value is not None]
    return min(known, default=None)


def check_fits(directory: Path, deployment: Deployment, device: torch.device, reused: int = 0, beside: int = 0) -> None:
    """Raise Rejected("no_memory") where weights would not fit. reused: bytes of free slots, which they get first ·
    beside: bytes that a new slot is followed by, its captured steps."""
    _check(max(0, needed(directory, deployment, device) - reused) + beside, device)


def check_vocab_fits(directory: Path, deployment: Deployment, device: torch.device) -> None:
    """Raise Rejected("no_memory") where a catalogue and its declared columns would not fit, on the host or on the
    device; what else is wrong with its file is left to whoever reads it, if it may be read."""
    file = directory / FILE
    try:
        size = file.stat().st_size
    except OSError:
        return
    try:
        shape = read_header(file)["sid"].shape
    except (Rejected, KeyError):
        shape = ()
    items = shape[0] if shape else 0
    _check_catalogue(items, _most_nodes(items, deployment.sid.sizes), size, deployment, device)


def check_columns_fit(vocab: Vocab, deployment: Deployment, device: torch.device) -> None:
    """The same for the declared columns of a catalogue in memory."""
    _check_catalogue(len(vocab), vocab.trie.nodes, 0, deployment, device)


def check_state_fits(
    contract: Contract, device: torch.device, *, requests: int = 1, pads: int = 0, rows: int = 1, firsts: int = 0
) -> None:
    """The same for the state memory of a contract, its parts as often as they are there: see `arena_bytes`."""
    parts = {"requests": requests, "pads": pads, "rows": rows, "firsts": firsts}
    _check(arena_bytes(contract.states, contract.limits, len(contract.sizes), **parts), device)


def _check_catalogue(items: int, nodes: int, file: int, deployment: Deployment, device: torch.device) -> None:
    host, copied = catalogue_needed(items, nodes, file, deployment)
    _check(host, torch.device("cpu"))
    if device.type != "cpu":
        _check(copied, device)


def _check(want: int, device: torch.device) -> None:
    have = free(device)
    if have is not None and want and want + SPARE > have:
        message = f"{want >> 20} MiB are needed beside what is loaded, {have >> 20} MiB are free"
        raise Rejected("no_memory", message)


def _most_nodes(items: int, codes: Sequence[int]) -> int:
    """As many as a trie of so many items can have."""
    widest = [math.prod(codes[:depth]) for depth in range(len(codes) + 1)]
    return sum(min(items, width) for width in widest)


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
