"""The processes of `bench cutover`: the server, whose log says what happened when, and the clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CLONE = Path(__file__).parent.parent
Row = dict[str, Any]
START_S = 600.0
STOP_S = 10.0
"""Seconds that a server gets to end by itself: what was measured is not written before it has."""
PATIENCE_S = 35.0
"""Seconds that clients wait for what is out: longer than any request may take."""
WRITE_S = 30.0
"""Seconds that they get to write it down."""
FEWEST, STEP = 4.0, 4.0
"""Requests a second that the search for saturation begins with, and what each rate is multiplied by."""
GOES_ALONG = 0.85
"""Share of the requests asked for that are answered in time while a server keeps up."""
BEYOND = 1.3
"""How far above what it has answered so far the last rate is."""
REFUSED = frozenset({"artifact_rejected", "deployment_rejected", "not_ready"})
"""Events of a server that never does what it was asked for."""
REQUEST = b'"level":"info","event":"request"'
"""In a line of the log about a request that went well."""
LINES = 40
"""Bad lines of the log that are kept."""


class Trouble(Exception):
    """Something went wrong that a part does not go on from; what it has is kept."""


class Server:
    """A server process and what its log has said, with the times at which it said so."""

    def __init__(self, root: Path, mode: str) -> None:
        """Returns once it serves. Raises Trouble."""
        command = [sys.executable, "-m", "app", "serve", "--root", str(root), "--port", "0", "--admin-port", "0"]
        if mode == "naive":
            command = [sys.executable, "-m", "bench._cutover_naive", str(root)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=CLONE)
        self.lines: list[tuple[float, Row]] = []
        self._said = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            _, where = self.wait("listening", START_S)
            self.url = where["public"]
            _, self.serving = self.wait("snapshot_active", START_S)
        except BaseException:
            self.stop()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if REQUEST in line:  # hundreds a second, of no use here; who reads slowly holds the server up
                continue
            try:
                found = json.loads(line)
            except ValueError:
                found = {"event": "text", "text": line.decode(errors="replace").rstrip()}
            with self._said:
                self.lines.append((time.monotonic(), found))
                self._said.notify_all()
        self.process.wait()
        with self._said:
            self._said.notify_all()

    def wait(self, event: str, seconds: float, **facts: str) -> tuple[float, Row]:
        """The first line of an event with these facts. Raises Trouble where none comes, or a version is refused."""
        end, seen = time.monotonic() + seconds, 0
        with self._said:
            while True:
                for at, line in self.lines[seen:]:
                    if line.get("event") == event and all(line.get(k) == v for k, v in facts.items()):
                        return at, line
                    if line.get("event") in REFUSED:
                        raise Trouble(f"refused: {line}")
                seen = len(self.lines)
                left = end - time.monotonic()
                if self.process.poll() is not None or left <= 0:
                    why = f"in {seconds:.0f} s" if left <= 0 else f"before the server ended ({self.process.poll()})"
                    raise Trouble(f"no `{event}` {facts} {why}: {[line for _, line in self.lines[-5:]]}")
                self._said.wait(left)

    def of(self, event: str) -> list[tuple[float, Row]]:
        """Every line of an event so far."""
        with self._said:
            return [one for one in self.lines if one[1].get("event") == event]

    def bad(self) -> list[Row]:
        """Errors and warnings, and what is no line of a log: a traceback, most of the time."""
        with self._said:
            found = [one for _, one in self.lines if one.get("level") in {"error", "warning", None}]
        return found[:LINES]

    def stop(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def serving(root: Path, mode: str) -> Iterator[Server]:
    """A server, ended at the end."""
    server = Server(root, mode)
    try:
        yield server
    finally:
        server.stop()


class Clients:
    """Client processes that share a rate."""

    def __init__(self, url: str, work: Path, count: int, rate: float, seed: int, seconds: float | None = None) -> None:
        self._outs = [work / f"client{n}.json" for n in range(count)]
        more = [] if seconds is None else ["--seconds", str(seconds)]
        for out in self._outs:
            out.unlink(missing_ok=True)
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "bench._cutover_client", url, "--bodies", str(work / "bodies.jsonl"), "--rate",
                 str(rate / count), "--seed", str(seed * 100 + n), "--out", str(out), *more],
                stdin=subprocess.PIPE, cwd=CLONE, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for n, out in enumerate(self._outs)
        ]  # fmt: skip

    def collect(self, patience: float = PATIENCE_S) -> tuple[list[Row], list[str]]:
        """End the load: what was written down, and what went wrong with clients. What is not answered after `patience`
        seconds was sent and has no answer."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # of one that has ended by itself
                process.stdin.write(str(patience).encode())
                process.stdin.close()
        found, wrong, end = [], [], time.monotonic() + patience + WRITE_S
        for process, out in zip(self._processes, self._outs, strict=True):
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
            if out.exists():
                found.append(json.loads(out.read_text()))
            else:
                wrong.append(f"{out.stem} has ended with {process.poll()} and written nothing")
        return found, wrong


def saturation(url: str, work: Path, count: int, seconds: float) -> float:
    """Answers a second that the same clients get when they ask for a little more than there is.

    Every rate is asked for `seconds`, and the next one when all of it is answered: nothing is left in a queue.
    """
    rate, last = FEWEST * count, False
    while True:
        found, wrong = Clients(url, work, count, rate, seed=1, seconds=seconds).collect()
        if wrong:
            raise Trouble("; ".join(wrong))
        achieved = answers_a_second(found, seconds)
        print(f"offered {rate:.0f}/s: {achieved:.1f}/s answered", file=sys.stderr)
        if last:
            return achieved
        last = achieved < GOES_ALONG * rate
        rate = BEYOND * achieved if last else STEP * rate


def answers_a_second(found: list[Row], seconds: float) -> float:
    """Of all clients, from the first request until the last answer, or for as long as they asked."""
    columns = [one["columns"] for one in found if one["columns"]]
    if not columns:
        return 0.0
    first = min(min(one["intended"]) for one in columns)
    last = max(t + ms / 1e3 for one in columns for t, ms in zip(one["intended"], one["latency_ms"], strict=True))
    return sum(one["answered"] for one in found) / max(seconds, last - first)
