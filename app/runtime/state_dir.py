"""The server's own files: small, written whole or not at all, and never trusted when they are read."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from app.config import read_small
from app.policies.last_good import Kept, decode, encode

TEMPORARY: Final = ".tmp-"
MAX_FILE: Final = 4 << 20
LAST_GOOD: Final = "last_good"
POLICIES: Final = "policies"
MAX_POLICIES: Final = 50
"""Policies that are kept by id, those in force not counted."""
PIN: Final = "pin.json"
KILLED: Final = "killed.json"
KILL_LIST: Final = "kill_list.json"


def write(path: Path, data: bytes) -> None:
    """Replace a file by a rename, so that no reader and no crash sees half of it. Raises OSError.

    Until then the bytes are in a file of this process's own, which it holds a lock on: see `clean`.
    """
    with _written(path.parent, data) as name:
        os.replace(name, path)  # noqa: PTH105  a name from mkstemp


def create(path: Path, data: bytes) -> None:
    """Make a file that is not there yet, whole; where another process was faster, its file stays. Raises OSError."""
    with _written(path.parent, data) as name:
        _name_once(name, path)


@contextmanager
def _written(folder: Path, data: bytes) -> Iterator[str]:
    """The name of a file with these bytes, on the disk and locked. It goes by the end, if it is still there."""
    folder.mkdir(parents=True, exist_ok=True)
    stream, name = _temporary(folder)
    try:
        with stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
            yield name
    finally:
        with suppress(OSError):
            os.unlink(name)  # noqa: PTH108


def _name_once(name: str, path: Path) -> None:
    """Give a file its name where nobody has it. Without hard links (some network disks) two may both think so."""
    try:
        os.link(name, path)
    except FileExistsError:
        return
    except OSError:
        if not path.exists():
            os.replace(name, path)  # noqa: PTH105


def _temporary(folder: Path) -> tuple[BinaryIO, str]:
    """A locked file in a folder, and its name."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=TEMPORARY, dir=folder)
        stream = os.fdopen(descriptor, "wb")
        with suppress(OSError):  # a file system without locks: nobody takes the file away there, see `clean`
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return stream, name
        stream.close()  # somebody cleaned up in the very moment between


@contextmanager
def alone(folder: Path, patience_s: float = 1.0) -> Iterator[None]:
    """Read and write in this folder while no other server on this root does. Where that cannot be had (no locks,
    another one that hangs), go on: what is decided must not wait for it."""
    end = time.monotonic() + patience_s
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:
                break
            else:
                break
        yield
    finally:
        os.close(descriptor)


def clean(folder: Path) -> None:
    """Take away what a process that was killed in the middle of a write has left. What another process is writing is
    locked, and stays."""
    for path in folder.rglob(f"{TEMPORARY}*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def read(path: Path, folder: Path | None = None) -> bytes | None:
    """A small file, or None where it is not there, too large or cannot be read. folder: which links may not lead out
    of; without it that of the file."""
    try:
        data = read_small(path, MAX_FILE + 1, folder or path.parent)
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
        data = read(path, state)
        kept = decode(data) if data is not None else None
        if kept is not None and _file(kept.name) == path.name:
            found[kept.name] = kept
    return found


def save_policies(state: Path, live: Mapping[str, Kept]) -> None:
    """Keep the texts of policies by their ids, so that an id in a log can be looked up. live: those in force; of the
    others the newest stay. Raises OSError."""
    folder = state / POLICIES
    for policy_id, one in live.items():
        path = folder / f"{policy_id}.json"
        if not path.is_file():
            write(path, encode(one))
    others: dict[Path, float] = {}
    for path in folder.glob("*.json"):
        if path.stem not in live:
            with suppress(FileNotFoundError):  # another server on this root does the same
                others[path] = path.stat().st_mtime
    for path in sorted(others, key=lambda one: others[one], reverse=True)[MAX_POLICIES:]:
        path.unlink(missing_ok=True)


def load_policy(state: Path, policy_id: str) -> Kept | None:
    """The texts of a policy that served under an id (12 hex digits); None where they are not kept."""
    data = read(state / POLICIES / f"{policy_id}.json", state)
    return None if data is None else decode(data)


def _file(name: str) -> str:
    return name.replace("/", ".") + ".json"
