"""The processes that speak HTTP for a server whose own process serves the model alone (`server.front_ends`)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from starlette.types import ASGIApp

from app.api import in_memory
from app.api.health import Readiness
from app.config import Deployment
from app.runtime.front import Front
from app.runtime.logs import Log
from app.runtime.messages import End, Hello, Leaving
from app.runtime.metrics import Metrics
from app.runtime.port import Port

Start = Callable[[int, int], subprocess.Popen[bytes]]
"""Starts a front end that inherits two descriptors: of the listening socket, and of its end of the socket to here."""

WAITS_S: Final = (0.0, 0.0, 0.1, 0.5, 2.0, 5.0)
"""Before a front end is started again, by how often it has ended too early; the last one for ever."""
START_S: Final = 120.0
"""For a front end to take connections, on the slowest machine."""
STEADY_S: Final = 10.0
"""A front end that lives as long has not ended too early."""
GRACE_S: Final = 2.0
"""Beyond its timeout, for a front end that is to end."""


class FrontEnds:
    """Starts front ends on one listening socket, starts again what ends, and ends them (as `Listener` does).

    All accept from the socket's one backlog, so while one is started again, connections wait for the others, or for it.
    """

    def __init__(
        self,
        app: ASGIApp,
        front: Front,
        deployment: Deployment,
        metrics: Metrics,
        log: Log,
        readiness: Readiness,
        listener: socket.socket,
        start: Start,
    ) -> None:
        """app: the public application, for all but recommendations"""
        self._front, self._deployment, self._metrics, self._log = front, deployment, metrics, log
        self._readiness, self._listener, self._start = readiness, listener, start
        self._fetch = partial(in_memory.fetch, app)
        self._ports: dict[int, Port] = {}
        self._ending = asyncio.Event()
        self.task: asyncio.Future[list[None]] | None = None

    async def start(self) -> None:
        """Start them; return when each takes connections, or has failed to for the first time."""
        tried = [asyncio.Event() for _ in range(self._deployment.server.front_ends)]
        self.task = asyncio.gather(*(self._keep(number, one) for number, one in enumerate(tried)))
        waiting = asyncio.gather(*(one.wait() for one in tried))
        await asyncio.wait((waiting, self.task), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    def leave(self) -> None:
        """From now on every answer ends its connection."""
        for port in self._ports.values():
            port.send(Leaving())

    async def end(self, timeout_s: float = 0.0) -> None:
        """Stop accepting, give running requests `timeout_s`, then cut them."""
        if self.task is None:
            return
        self._ending.set()
        self._listener.close()
        for port in self._ports.values():
            port.send(End(timeout_s))
        _, late = await asyncio.wait((self.task,), timeout=timeout_s + GRACE_S)
        if late:
            for port in self._ports.values():
                port.abort()
            await asyncio.wait((self.task,))

    async def _keep(self, number: int, tried: asyncio.Event) -> None:
        """One front end, started again whenever it ends."""
        fails = 0
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                await self._live(number, tried)
            except OSError as error:
                self._log.error("front_end_failed", front_end=number, reason=str(error))
            except Exception as error:  # noqa: BLE001  a bug of ours: the next one may live, and the others do
                self._log.error("front_end_failed", front_end=number, reason=str(error), exc_info=error)
            tried.set()
            fails = 0 if time.monotonic() - began >= STEADY_S else fails + 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAITS_S[min(fails, len(WAITS_S) - 1)]):
                    await self._ending.wait()

    async def _live(self, number: int, tried: asyncio.Event) -> None:
        """One life of a front end. Raises OSError where it cannot be started, or does not come to accept."""
        began = time.monotonic()
        process, ours = await self._begin()
        port: Port | None = None
        try:
            port = self._ports[number] = await self._connect(ours)
            await asyncio.wait((port.accepting, port.gone), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if port.accepting.done():
                seconds = round(time.monotonic() - began, 3)
                self._log.info("front_end_up", front_end=number, pid=process.pid, seconds=seconds)
                tried.set()
            elif not port.gone.done():
                raise TimeoutError(f"it takes no connections after {START_S:g} s")
            cancelled = await port.gone
        finally:
            self._ports.pop(number, None)
            if port is None:
                ours.close()
            else:
                port.abort()
            process.kill()  # without its socket it ends of itself, but for one that is stopped
            status = await asyncio.to_thread(process.wait)
        if not self._ending.is_set():
            self._metrics.front_ends_lost_total.inc()
            self._log.warning("front_end_gone", front_end=number, pid=process.pid, status=status, cancelled=cancelled)

    async def _connect(self, ours: socket.socket) -> Port:
        """Our end of a front end's socket, told what happened while it was started."""
        hello = Hello(self._deployment, self._readiness.leaving)
        made = partial(Port, self._front, self._metrics, self._log, self._fetch, hello)
        _, port = await asyncio.get_running_loop().create_unix_connection(made, sock=ours)
        if self._readiness.leaving and not hello.leaving:
            port.send(Leaving())
        if self._ending.is_set():
            port.send(End(0.0))
        return port

    async def _begin(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """A new process, and our end of the socket to it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs, self._listener.dup() as listener:  # ours may be closed meanwhile
                # in a thread, since it takes milliseconds, and its child inherits what signals the thread lets in
                return await asyncio.to_thread(self._start, listener.fileno(), theirs.fileno()), ours
        except BaseException:
            ours.close()
            raise
