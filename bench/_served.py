"""Widebeam as a contestant: its runtime in this process, and its server as a process of its own over loopback."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from app.api import wire
from app.cli.compose import Overrides, clock, compose
from app.core import HistoryIds, Outcome, Request
from app.runtime.runtime import Runtime
from bench._peers import Found

START_TIMEOUT_S = 120.0
HEAD = b"POST /v1/recommend HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class InProcess:
    """A root's runtime behind its front door, without HTTP: admission, batcher, engine thread, outcome."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runtime: Runtime) -> None:
        self._loop, self._runtime = loop, runtime

    def ask(self, requests: Sequence[Request]) -> list[Outcome]:
        """Admit all at once, so that they form one batch, and wait for every answer."""

        async def run() -> list[Outcome]:
            tickets = [self._runtime.admit(request) for request in requests]
            return [await ticket.outcome() for ticket in tickets]

        return self._loop.run_until_complete(run())


@contextmanager
def in_process(root: Path) -> Iterator[InProcess]:
    """The runtime of a root, as `widebeam recommend` composes it."""
    with ExitStack() as stack:
        log = stack.enter_context(Path(os.devnull).open("wb"))
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        service = compose(root, Overrides(), log)

        async def start() -> Runtime:
            runtime = service.build()
            await runtime.start(service.load)
            return runtime

        runtime = loop.run_until_complete(start())
        stack.callback(runtime.close)
        if runtime.reasons():
            raise RuntimeError(f"{root}: {'; '.join(runtime.reasons())}")
        yield InProcess(loop, runtime)


def request(history: Sequence[str], k: int, policy: str | None) -> Request:
    """A request as the wire makes it."""
    return Request("bench", HistoryIds(tuple(history)), k=k, policy=policy, received=clock())


def body(history: Sequence[str], k: int, policy: str | None) -> bytes:
    """The same request as a JSON body."""
    asked = {"request_id": "bench", "context": {"history": list(history)}, "k": k}
    return json.dumps(asked if policy is None else asked | {"policy": policy}).encode()


def found(outcomes: Sequence[Outcome]) -> Found:
    """Answers in the form of the peers."""
    return [[(item.sid, item.score) for item in outcome.items] for outcome in outcomes]


class Client:
    """Blocking keep-alive connections to one server: as little client as there can be."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._decoder = msgspec.json.Decoder(wire.Answer)
        self._sockets: list[socket.socket] = []

    def open(self, connections: int) -> None:
        """Fresh connections in place of all others: a server closes those that nobody uses."""
        self.close()
        self._sockets = [socket.create_connection(("127.0.0.1", self._port)) for _ in range(connections)]
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Send each body on a connection of its own, all at once, and read every answer."""
        for connection, data in zip(self._sockets, bodies, strict=False):
            connection.sendall(HEAD % len(data) + data)
        return [_answer(connection) for connection in self._sockets[: len(bodies)]]

    def decode(self, answer: bytes) -> wire.Answer:
        """An answer's body as the wire types have it."""
        return self._decoder.decode(answer)

    def close(self) -> None:
        """Close every connection."""
        for connection in self._sockets:
            connection.close()


def _answer(connection: socket.socket) -> bytes:
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        data += _more(connection)
    head, rest = data[:end].lower(), data[end + 4 :]
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise RuntimeError(f"the server answered {data[:300]!r}")
    length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
    parts, size = [rest], len(rest)
    while size < length:
        parts.append(_more(connection))
        size += len(parts[-1])
    return b"".join(parts)


def _more(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 18)
    if not data:
        raise RuntimeError("the server closed a connection")
    return data


def answers(replies: Sequence[wire.Answer]) -> Found:
    """REST answers in the form of the peers."""
    return [[(tuple(item.sid), item.score) for item in reply.items] for reply in replies]


@contextmanager
def server(root: Path, log: Path) -> Iterator[int]:
    """`widebeam serve` as a process, with this process' environment; yields the port once it is ready."""
    command = [sys.executable, "-m", "app", "serve", "--root", str(root), "--port", "0", "--admin-port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=Path(__file__).parent.parent)
    try:
        yield _wait_until_ready(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline, port = time.monotonic() + START_TIMEOUT_S, 0
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {log.read_text()[-2000:]}")
        for line in [] if port else log.read_text().splitlines():
            if '"listening"' in line:
                port = int(json.loads(line)["public"].rsplit(":", 1)[1])
        if port and _ready(port):
            return port
        time.sleep(0.05)
    raise RuntimeError(f"not ready after {START_TIMEOUT_S:.0f} s: {log.read_text()[-2000:]}")


def _ready(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /readyz HTTP/1.1\r\nhost: b\r\nconnection: close\r\n\r\n")
        return b" 200 " in connection.recv(4096).split(b"\r\n", 1)[0]


def copy_root(source: Path, target: Path) -> Path:
    """A deployment root without the state that a server keeps in it."""
    target.mkdir(parents=True)
    for name in ("weights", "vocab", "policies"):
        shutil.copytree(source / name, target / name)
    shutil.copy(source / "deployment.toml", target)
    return target
