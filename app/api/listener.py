"""One uvicorn server on a bound socket, and how late its event loop is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from app.api.protocol import protocol
from app.config import Server
from app.runtime.front import Counts

BACKLOG: Final = 2048
LAG_PERIOD_S: Final = 0.1


class Listener:
    """One uvicorn server on a bound socket: starts, stops accepting, ends. It never touches signals."""

    def __init__(self, app: ASGIApp, server: Server, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=protocol(server.read_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=server.keep_alive_s,  # type: ignore[arg-type]  # seconds; fractions work
        )
        self._server = _Uvicorn(config)
        self._socket = listener
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> asyncio.Task[None]:
        """Accept connections; the task ends when that does, early where it has failed."""
        self.task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        started = asyncio.create_task(self._server.accepting.wait())
        await asyncio.wait((self.task, started), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        return self.task

    def leave(self) -> None:
        """Nothing to do: the application asks the readiness itself."""

    async def end(self, timeout_s: float = 0.0) -> None:
        """Stop accepting, close idle connections, give running requests `timeout_s`, then cut them."""
        if self.task is None:
            return
        # read when it stops accepting; 0 means "for ever" to uvicorn's wait
        self._server.config.timeout_graceful_shutdown = max(timeout_s, 0.01)  # type: ignore[assignment]
        self._server.should_exit = True
        await asyncio.gather(self.task, return_exceptions=True)


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        self.accepting.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: `serve` owns them."""
        yield


async def watch_lag(counts: Counts) -> None:
    """Measure how late this loop wakes up, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        expected = loop.time() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        counts.lag(max(0.0, loop.time() - expected))
