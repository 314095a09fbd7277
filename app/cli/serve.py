"""`widebeam serve`: a deployment root over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import typer

from app.api import server
from app.cli import front_end, loop
from app.cli.compose import Device, Overrides, Service, compose
from app.runtime.logs import route_stdlib

SWITCH_S: Final = 0.00005
"""Seconds after which a thread that runs Python lets another one that waits run. The launches of a batch give the
interpreter away some hundred times, and whoever takes it (the event loop with its requests, a load) keeps it for a
turn: on two cores, 300 launches beside two threads of pure Python take 370 ms at half a millisecond, 45 at this, .7
alone, and those threads lose a fifth of their speed (`python -m bench.turns`). At Python's own 5 ms they take 8 s."""


def serve(
    root: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Deployment root")],
    host: Annotated[str | None, typer.Option(help="Instead of deployment.toml's")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0 = any free port")] = None,
    admin_port: Annotated[int | None, typer.Option(min=0, max=65535, help="0 = any free port")] = None,
    device: Annotated[Device | None, typer.Option(help="Instead of deployment.toml's")] = None,
    front_ends: Annotated[
        int | None, typer.Option(min=0, max=64, help="Processes that speak HTTP for this one")
    ] = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Bad artifacts do not end the server: it stays alive, not ready, and says why.

    A root that is not there is a wrong command line: exit 2, at once.
    """
    use_short_turns()
    service = compose(root, Overrides(host, port, admin_port, device, front_ends), sys.stdout.buffer, tolerant=True)
    route_stdlib(service.log)  # uvicorn's and asyncio's own warnings, as lines of the same log
    loop.run(run(service, root))


def _file(stream: BinaryIO) -> BinaryIO | None:
    """A stream that another process can write to, too; None for one in memory."""
    try:
        stream.fileno()
    except OSError:
        return None
    return stream


def use_short_turns() -> None:
    """Set this process' `SWITCH_S`."""
    sys.setswitchinterval(SWITCH_S)


async def run(
    service: Service,
    root: Path,
    on_ready: Callable[[server.Addresses], None] = lambda _: None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve a composed service: listen at once, load beside it, become ready when that is done, follow the root."""
    runtime = service.build()
    live = service.live(runtime)
    following = asyncio.create_task(live.run(service.load))
    try:
        await server.serve(
            runtime,
            service.deployment,
            service.metrics,
            service.log,
            root=root,
            on_ready=on_ready,
            stop=stop,
            control=live,
            start=partial(front_end.start, log=_file(service.stream)),
        )
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        live.close()
        runtime.close()
