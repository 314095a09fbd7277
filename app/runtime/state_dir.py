"""The server's own files: small, written whole or not at all, and never trusted when they are read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from app.policies.last_good import Kept, decode, encode

MAX_FILE: Final = 4 << 20
LAST_GOOD: Final = "last_good"
PIN: Final = "pin.json"
KILLED: Final = "killed.json"


def write(path: Path, data: bytes) -> None:
    """Replace a file by a rename, so that no reader and no crash sees half of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)  # noqa: PTH105  a name from mkstemp
    except BaseException:
        os.unlink(name)  # noqa: PTH108
        raise


def read(path: Path) -> bytes | None:
    """A small file, or None where it is not there, too large or cannot be read."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE + 1)
    except OSError:
        return None
    return data if len(data) <= MAX_FILE else None


def save_last_good(state: Path, kept: Mapping[str, Kept], known: Mapping[str, Kept]) -> None:
    """Write what differs from `known`, and take away what is no longer kept. Raises OSError."""
    folder = state / LAST_GOOD
    for name, one in kept.items():
        if known.get(name) != one:
            write(folder / _file(name), encode(one))
    for name in known.keys() - kept.keys():
        (folder / _file(name)).unlink(missing_ok=True)


def load_last_good(state: Path) -> dict[str, Kept]:
    """Every last good text by name; damaged files count as none."""
    found: dict[str, Kept] = {}
    for path in sorted((state / LAST_GOOD).glob("*.json")):
        data = read(path)
        kept = decode(data) if data is not None else None
        if kept is not None and _file(kept.name) == path.name:
            found[kept.name] = kept
    return found


def _file(name: str) -> str:
    return name.replace("/", ".") + ".json"
