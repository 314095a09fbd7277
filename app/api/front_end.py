"""A front end: HTTP in a process of its own, for an engine in another one that has started it (`front_ends`)."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import BinaryIO, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import app as apps
from app.api import in_memory
from app.api.health import Readiness
from app.api.listener import LAG_PERIOD_S, Listener, watch_lag
from app.api.middleware import Edge
from app.api.recommend import PATH
from app.api.remote import Remote
from app.errors import Draining, Refused
from app.runtime.logs import make_log, route_stdlib

GONE_S: Final = 1.0
"""For the last answers, where the engine has gone: nothing can come any more, and its successor wants the port."""


async def run(
    listener: socket.socket,
    engine: socket.socket,
    stream: BinaryIO,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Serve until the engine says to end, or has gone.

    listener: the public socket, bound and listening · engine: an end of a pair of UNIX sockets · stream: for the log

    Raises what keeps it from accepting: its process ends then, and the engine's starts another.
    """
    engine.setblocking(False)
    _, remote = await asyncio.get_running_loop().create_unix_connection(lambda: Remote(clock), sock=engine)
    await asyncio.wait((remote.hello,))
    if remote.hello.cancelled():
        return
    hello = remote.hello.result()
    deployment = hello.deployment
    log = make_log(stream, deployment.log.level)
    route_stdlib(log)
    readiness = Readiness(remote)
    remote.leave = readiness.leave
    if hello.leaving:
        readiness.leave()
    hot = apps.recommendations(remote, deployment, remote.counts, log, readiness, clock)

    def refusal(error: Refused) -> ASGIApp:
        return Edge(partial(_refuse, error), readiness, log, clock)

    http = Listener(Routes(remote, hot, refusal), deployment.server, listener)
    accepts = await http.start()
    gc.collect()
    gc.freeze()  # what is there now stays
    watching = [asyncio.create_task(one) for one in (watch_lag(remote.counts), _tell(remote))]
    try:
        if not accepts.done():
            remote.say_accepting()
        await asyncio.wait((remote.end, accepts), return_when=asyncio.FIRST_COMPLETED)
        if accepts.done():
            accepts.result()
            return
        end = remote.end.result()
        leaving = asyncio.create_task(http.end(GONE_S if end is None else end.timeout_s))
        await asyncio.wait((leaving, remote.gone), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((leaving,), timeout=2 * GONE_S)  # whatever was said of time: nobody answers any more
    finally:
        for task in watching:
            task.cancel()
        remote.tell()
        remote.close()


class Routes:
    """The recommendations are served here; what else there is, the engine's process answers."""

    def __init__(self, remote: Remote, recommendations: ASGIApp, refusal: Callable[[Refused], ASGIApp]) -> None:
        """refusal: answers for an engine that does not"""
        self._remote, self._recommendations, self._refusal = remote, recommendations, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["path"] == PATH and scope["method"] == "POST":

            async def read() -> Message:
                await self._remote.room()
                return await receive()

            await self._recommendations(scope, read, send)
            return
        try:
            found = await self._remote.fetch(scope)
        except Refused as error:
            await self._refusal(error)(scope, receive, send)
        except asyncio.CancelledError:  # the grace period ended; this task has nothing else to do
            stopped = Draining("the server stopped before the answer was ready")
            await self._refusal(stopped)(scope, receive, send)
        else:
            await in_memory.respond(found, send)


async def _refuse(error: Refused, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001  as ASGI has it
    raise error


async def _tell(remote: Remote) -> None:
    """Say what was counted, for ever."""
    while True:
        await asyncio.sleep(LAG_PERIOD_S)
        remote.tell()
