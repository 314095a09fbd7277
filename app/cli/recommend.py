"""`widebeam recommend`: the server's runtime over a file of requests, without a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from app.api import wire
from app.api.codec import JsonDecoder
from app.api.errors import outcome_of
from app.cli.compose import Device, Overrides, Service, clock, compose
from app.core import Level
from app.errors import ExplainBusy, NotReady, QueueFull, WidebeamError
from app.runtime.runtime import Runtime
from app.runtime.ticket import PendingTicket

Line = tuple[int, bytes]


def recommend(
    root: Annotated[Path, typer.Option(help="Deployment root")],
    requests: Annotated[
        Path, typer.Option("--in", exists=True, dir_okay=False, help="Request bodies, one JSON object a line")
    ],
    out: Annotated[
        Path, typer.Option(dir_okay=False, help="Answers, one JSON object a line, in the order of the requests")
    ],
    device: Annotated[Device | None, typer.Option(help="Instead of deployment.toml's")] = None,
    load: Annotated[
        Level, typer.Option(help="Load level of policies that have them; a file of requests is none")
    ] = "normal",
) -> None:
    """Answer a file of requests. A request that is refused gets its error as its line. Exit 1 if any was."""
    if not out.parent.is_dir():
        raise typer.BadParameter(f"dir '{out.parent}' does not exist", param_hint="--out")
    service = compose(root, Overrides(device=device), sys.stderr.buffer)
    failed = asyncio.run(_run(service, requests, out, load))
    if failed:
        raise typer.Exit(1)


async def _run(service: Service, requests: Path, out: Path, load: Level) -> int:
    runtime = service.build()
    await runtime.start(service.load)
    try:
        if runtime.reasons():
            raise NotReady("; ".join(runtime.reasons()))
        total = sum(1 for _ in _lines(requests))
        failed = 0
        with out.open("wb") as file, Progress(console=Console(stderr=True)) as progress:
            for_each = progress.add_task("requests", total=total)
            async for line, ok in answers(service, runtime, _lines(requests), load):
                file.write(line + b"\n")
                failed += not ok
                progress.advance(for_each)
        return failed
    finally:
        runtime.close()


def _lines(file: Path) -> Iterator[Line]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield number, line


async def answers(
    service: Service, runtime: Runtime, lines: Iterator[Line], load: Level = "normal"
) -> AsyncIterator[tuple[bytes, bool]]:
    """The answer to each line and whether it is one, in order. As many requests are in flight as two batches take; so
    the load level is given, and not that of a server with so many."""
    decoder, limits = JsonDecoder(wire.Body), service.deployment.limits
    flight: list[asyncio.Task[tuple[bytes, bool]]] = []
    for number, line in lines:
        flight.append(asyncio.create_task(_answer(service, runtime, decoder, number, line, load)))
        if len(flight) >= min(2 * limits.batch, limits.queue):
            yield await flight.pop(0)
    for task in flight:
        yield await task


async def _answer(
    service: Service, runtime: Runtime, decoder: JsonDecoder, number: int, line: bytes, load: Level
) -> tuple[bytes, bool]:
    try:
        body = decoder.decode(line)
        ticket = await _admit(service, runtime, body, number, load)
        return msgspec.json.encode(wire.to_answer(await ticket.outcome())), True
    except WidebeamError as error:
        document = wire.error_body(error.code, error.message, error.retryable, error.path)
        return msgspec.json.encode(
            {"line": number, "outcome": outcome_of(error), **msgspec.to_builtins(document)}
        ), False


async def _admit(service: Service, runtime: Runtime, body: wire.Body, number: int, load: Level) -> PendingTicket:
    while True:
        received = clock()
        budget = body.deadline_ms or None
        request = wire.to_request(
            body,
            request_id=body.request_id or f"line-{number}",
            received=received,
            deadline=None if budget is None else received + budget / 1e3,
            override=service.deployment.server.policy_override,
        )
        try:
            return runtime.admit(replace(request, load=load))
        except (QueueFull, ExplainBusy):  # a file waits for its turn: nobody else can
            await asyncio.sleep(0.001)
