"""Two listeners on one event loop, under our own signals.

The order of leaving is what balancers need: readiness drops first while everything is still answered, then the
listeners close, then what runs finishes, then the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from app.api import app as apps
from app.api.admin import Tokens
from app.api.front_ends import FrontEnds, Start
from app.api.health import Readiness
from app.api.listener import BACKLOG, Listener, watch_lag
from app.config import Deployment, Server
from app.errors import BadDeployment, WidebeamError
from app.runtime.control import Control
from app.runtime.front import Front
from app.runtime.logs import Log
from app.runtime.metrics import Metrics

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class CannotListen(WidebeamError):
    """An address cannot be bound."""

    code = "cannot_listen"


class Addresses(NamedTuple):
    """Where the server listens, as `http://host:port` with the ports that were really taken."""

    public: str
    admin: str


async def serve(
    front: Front,
    deployment: Deployment,
    metrics: Metrics,
    log: Log,
    *,
    root: Path = Path(),
    on_ready: Callable[[Addresses], None] = lambda _: None,
    stop: asyncio.Event | None = None,
    control: Control | None = None,
    start: Start | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. Meant for uvloop's event loop.

    root      the deployment root; a relative `server.admin_tokens` lies under it
    on_ready  called once both listeners accept connections (the runtime may still be loading: that is readiness)
    control   what the admin application steers; None = it only reads the status
    start     starts a process for `server.front_ends`; None where there are none
    stop      given: setting it does what SIGTERM does, and no signal handler is touched (for callers with their own)

    Raises BadDeployment for `admin_auth = "none"` off loopback, CannotListen for an address that is taken or wrong.
    A second signal ends the process at once.
    """
    server = deployment.server
    readiness = Readiness(front)
    tokens = _tokens(server, root, log)
    with contextlib.ExitStack() as stack:
        ports = {"port": server.port, "admin_port": server.admin_port}
        sockets = [stack.enter_context(_listen(server.host, port, key)) for key, port in ports.items()]
        addresses = Addresses(*(_url(server.host, listener) for listener in sockets))
        public_app = apps.public(front, deployment, metrics, log, readiness, control=control)
        public: Listener | FrontEnds = Listener(public_app, server, sockets[0])
        if server.front_ends > 0:
            assert start is not None, "who asks for front ends says how they start"
            public = FrontEnds(public_app, front, deployment, metrics, log, readiness, sockets[0], start)
        admin_app = apps.admin(front, deployment, metrics, log, readiness, tokens, control=control)
        admin = Listener(admin_app, server, sockets[1])
        if stop is None:
            stop = stack.enter_context(_stop_on_signals(log))
        lag = asyncio.create_task(watch_lag(metrics))
        try:
            await _until_stopped(public, admin, stop, lambda: _announce(addresses, log, on_ready))
            await _leave(front, readiness, public, server, log)
        finally:
            lag.cancel()
            await public.end()
            await admin.end()
    log.info("stopped")


async def _until_stopped(
    public: Listener | FrontEnds, admin: Listener, stop: asyncio.Event, announce: Callable[[], None]
) -> None:
    """Start both; return when `stop` is set or a listener dies of itself (then raise what killed it)."""
    await admin.start()
    waiting, starting = asyncio.create_task(stop.wait()), asyncio.create_task(public.start())
    try:
        await asyncio.wait((waiting, starting), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():  # front ends take their time to start
            return
        starting.result()
        tasks = [listener.task for listener in (admin, public) if listener.task is not None]
        announce()
        await asyncio.wait((waiting, *tasks), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        starting.cancel()
    for task in tasks:
        if task.done():
            task.result()


async def _leave(front: Front, readiness: Readiness, public: Listener | FrontEnds, server: Server, log: Log) -> None:
    """Readiness, delay, listeners, rest: the order of leaving."""
    readiness.leave()
    public.leave()
    log.info("draining", delay_s=server.drain_delay_s, timeout_s=server.drain_timeout_s)
    await asyncio.sleep(server.drain_delay_s)
    front.begin_drain()
    await public.end(server.drain_timeout_s)
    if not await front.drained(server.drain_timeout_s):
        log.warning("drain_timeout", timeout_s=server.drain_timeout_s)


def _announce(addresses: Addresses, log: Log, on_ready: Callable[[Addresses], None]) -> None:
    log.info("listening", public=addresses.public, admin=addresses.admin)
    on_ready(addresses)


def _tokens(server: Server, root: Path, log: Log) -> Tokens | None:
    if server.admin_auth == "token":
        return Tokens(None if server.admin_tokens is None else root / server.admin_tokens, log, root)
    if not is_loopback(server.host):
        raise BadDeployment(
            f'`admin_auth = "none"` is allowed on loopback only, and host is {server.host!r}', file="deployment.toml"
        )
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host` (a name other than `localhost` is not trusted)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int, key: str) -> socket.socket:
    """key: what `[server]` calls the port"""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # two sockets may share a port until one of them listens
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        message = f"cannot listen on {host}:{port}: {error.strerror or error}"
        if error.errno in {errno.EADDRINUSE, errno.EACCES}:
            flag = key.replace("_", "-")
            message += f"; choose another {key} with --{flag} or under [server] (0 = any free one, which the log names)"
        raise CannotListen(message) from error
    return listener


def _url(host: str, listener: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _stop_on_signals(log: Log) -> Iterator[asyncio.Event]:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def received(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        log.info("signal", signal=signal.Signals(number).name)
        stop.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, received, number)
    try:
        yield stop
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
