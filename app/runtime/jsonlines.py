"""JSON lines in rotated files, written by a thread of their own.

The event loop and the engine thread only ever hand over a line's making: encoding, the disk and its faults are the
writer's. The queue is bounded; a full queue or a bad disk loses lines, counts them, and never makes a request wait.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from app.runtime.logs import Log

QUEUE: Final = 8192
MAX_BYTES: Final = 64 * 2**20
MAX_TOTAL: Final = 16 * MAX_BYTES

Make = Callable[[], object]
"""What a line says, made on the writer's thread."""


class Rotated:
    """One kind of lines: files `directory/<moment>-<process>.jsonl`, a new one when one is full. One thread only.

    A file belongs to one process, so servers that share a directory do not write into each other's lines.
    max_bytes: size of a file · max_total: what all files of the directory may take; the oldest go
    """

    def __init__(self, directory: Path, *, max_bytes: int = MAX_BYTES, max_total: int = MAX_TOTAL) -> None:
        self.directory, self._max, self._max_total = directory, max_bytes, max_total
        self._file: FileIO | None = None
        self._size = 0

    def write(self, line: bytes) -> None:
        """Append a line, whole or not at all. Raises OSError; the next call starts afresh."""
        if self._file is not None and self._size + len(line) > self._max:
            self.close()
        if self._file is None:
            self._file, self._size = self._open(), 0
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        """Close; a file without a line goes."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            if self._size == 0:
                Path(str(self._file.name)).unlink(missing_ok=True)
            self._file = None

    def _open(self) -> FileIO:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._make_room()
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        return FileIO(self.directory / f"{stamp}-{os.getpid()}.jsonl", "ab")

    def _make_room(self) -> None:
        sizes: dict[Path, int] = {}
        for file in sorted(self.directory.glob("*.jsonl")):
            with contextlib.suppress(FileNotFoundError):  # another server on this root makes room, too
                sizes[file] = file.stat().st_size
        left = sum(sizes.values()) + self._max
        for file, size in sizes.items():
            if left <= self._max_total:
                return
            file.unlink(missing_ok=True)
            left -= size


class Writer:
    """The thread. `put` may be called from any thread; `lost` is called for each line that is not written."""

    def __init__(self, log: Log, lost: Callable[[str], None], *, limit: int = QUEUE) -> None:
        self._log, self._lost = log, lost
        self._queue: queue.Queue[tuple[str, Rotated, Make] | None] = queue.Queue(limit)
        self._files: set[Rotated] = set()
        self._thread: threading.Thread | None = None
        self._failing = False
        self._encode = msgspec.json.Encoder().encode

    def put(self, kind: str, file: Rotated, make: Make) -> bool:
        """Queue a line; False where it was lost. kind: the label that it is counted under."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="widebeam-records", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((kind, file, make))
        except queue.Full:
            self._lost(kind)
            return False
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, for at most `timeout_s`, and end the thread."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        self._thread = None

    def _run(self) -> None:
        while True:
            one = self._queue.get()
            if one is None:
                break
            kind, file, make = one
            self._files.add(file)
            self._guarded(kind, file, make)
        for file in self._files:
            file.close()

    def _guarded(self, kind: str, file: Rotated, make: Make) -> None:
        try:
            file.write(self._encode(make()) + b"\n")
        except Exception as error:  # noqa: BLE001  a line that cannot be written must not end the writer
            file.close()
            self._lost(kind)
            if not self._failing:
                self._log.error("records_unwritable", kind=kind, directory=str(file.directory), exc_info=error)
            self._failing = True
        else:
            self._failing = False
