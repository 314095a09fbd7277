"""`widebeam serve` as a real process over a root on disk, for tests that ask it over real sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests import said

PATIENCE_S = 60.0
"""What ends a test that has failed: a machine may be slow."""


class Server:
    """A running server: `client` asks it, `lines` is its log so far (parsed), which lags behind what it answers."""

    def __init__(self, process: subprocess.Popen, root: Path) -> None:
        self.process, self.root = process, root
        self.lines: list[dict] = []
        self.listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        said.listen(f"server on {root.name}", self._text, lambda: process.poll() is None)
        assert self.listening.wait(2 * PATIENCE_S), f"no listener: {self.lines}"
        where = next((line for line in self.lines if line.get("event") == "listening"), None)
        assert where is not None, f"no listener: {self.lines}"
        self.public, self.admin = where["public"], where["admin"]
        self.client = httpx.Client(base_url=self.public, timeout=PATIENCE_S)

    def _text(self) -> str:
        return "\n".join(map(json.dumps, list(self.lines)))

    def _read(self) -> None:
        for raw in self.process.stdout:
            try:
                line = json.loads(raw)
            except ValueError:
                line = {"event": "raw", "text": raw.decode(errors="replace")}
            self.lines.append(line)
            if line.get("event") == "listening":
                self.listening.set()
        self.listening.set()

    def until(self, true, what: str, timeout: float = PATIENCE_S) -> None:
        """Poll until `true()`; fail with the log after `timeout`."""
        deadline = time.monotonic() + timeout
        while not true():
            assert self.process.poll() is None, f"the server ended: {self.lines[-5:]}"
            assert time.monotonic() < deadline, f"not {what} in time: {self.lines[-5:]}"
            time.sleep(0.02)

    def ready(self, timeout: float = 240) -> Server:
        """Waits for a contract's export and, on a GPU, for kernels: a busy machine needs minutes for them."""
        self.until(lambda: self.client.get("/readyz").status_code == 200, "ready", timeout)
        return self

    def ask(self, *history: str, k: int = 10, **fields) -> httpx.Response:
        return self.client.post("/v1/recommend", json={"context": {"history": list(history)}, "k": k, **fields})

    def items(self, *history: str, **fields) -> list[tuple[str, float]]:
        answer = self.ask(*history, **fields)
        assert answer.status_code == 200, answer.text
        return [(item["id"], item["score"]) for item in answer.json()["items"]]

    def status(self) -> dict:
        return httpx.get(f"{self.admin}/admin/v1/status", timeout=PATIENCE_S).json()

    def said(self, event: str) -> list[dict]:
        """The lines of an event, once there is one."""
        self.until(lambda: any(line.get("event") == event for line in list(self.lines)), f"{event} said")
        return [line for line in list(self.lines) if line.get("event") == event]

    def metric(self, name: str) -> float:
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
        return 0.0

    def stop(self, signum: int = signal.SIGTERM, timeout: float = PATIENCE_S) -> int:
        self.process.send_signal(signum)
        code = self.process.wait(timeout)
        self.ended()
        return code

    def ended(self) -> None:
        """The whole log is there. Whoever still holds the pipe, as a child of the server may, does not hold a test."""
        self._reader.join(PATIENCE_S)


@contextmanager
def serving(root: Path, *flags: str, group: bool = False) -> Iterator[Server]:
    """Start a server; end it (and fail if it left a traceback of its own in the log). group: in a process group of its
    own, of which it is the leader"""
    command = [sys.executable, "-m", "app", "serve", "--root", str(root), *flags]
    # the engine's threads, where a root has several, sleep while they wait for each other: others may want the cores
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONWARNINGS": "default"}
    group_of = 0 if group else None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, process_group=group_of
    ) as process:
        server = None
        try:
            server = Server(process, root)
            yield server
            server.client.close()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(2 * PATIENCE_S)
            if server is not None:
                server.ended()  # nobody reads a pipe that is closed
