"""`widebeam policy replay`: recorded requests under two policies on the same model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from app.cli.compose import Overrides, compose
from app.cli.loop import run
from app.cli.output import JsonFlag, print_json, print_table
from app.cli.policy_diff import Root
from app.errors import NotReady, counted
from app.runtime.recorded import read_records
from app.runtime.replay import Compared, Summary, replay, summary

SHOWN = 20


def replay_command(
    log: Annotated[Path, typer.Argument(help="A file of recorded requests, or state/requests", exists=True)],
    a: Annotated[str, typer.Option(help="A policy of ROOT")],
    b: Annotated[str, typer.Option(help="The policy to compare it with")],
    root: Root = Path(),
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many records, from the first")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Ask recorded requests again under A and under B, and say how far the answers are apart. Exit 1 if one failed."""
    compared = run(_replay(root, log, a, b, limit))
    found = summary(compared)
    if as_json:
        print_json({"a": a, "b": b, **found._asdict(), "records": [one._asdict() for one in compared]})
    else:
        _print(compared, found, a, b)
    raise typer.Exit(1 if found.failed else 0)


async def _replay(root: Path, log: Path, a: str, b: str, limit: int | None) -> list[Compared]:
    service = compose(root, Overrides(offline=True), sys.stderr.buffer)
    runtime = service.build()
    await runtime.start(service.load)
    try:
        if runtime.reasons():
            raise NotReady("; ".join(runtime.reasons()))
        for name in (a, b):
            if runtime.active is None or runtime.active.plan(name) is None:
                raise typer.BadParameter(f"{root} serves no policy {name}")
        records = read_records(log)
        chosen = records if limit is None else (one for one, _ in zip(records, range(limit), strict=False))
        return [one async for one in replay(runtime, chosen, a, b)]
    finally:
        runtime.close()


def _print(compared: Sequence[Compared], found: Summary, a: str, b: str) -> None:
    """The records that differ most, then all of them together."""
    answered = sorted((one for one in compared if one.error is None), key=lambda one: one.overlap)
    if answered:
        rows = [
            (one.request_id, one.k, f"{one.overlap:.3f}", "yes" if one.same else "no", _signed(one.score), *one.items)
            for one in answered[:SHOWN]
        ]
        print_table(("request", "k", "overlap@k", "same list", "score", a, b if b != a else f"{b} (b)"), rows)
        if len(answered) > SHOWN:
            typer.echo(f"... and {len(answered) - SHOWN} more with larger overlap; --json has them all")
    for one in compared:
        if one.error is not None:
            typer.echo(f"{one.place}: {one.error}")
    typer.echo(f"{counted(found.requests, 'request')}, {found.failed} failed")
    if found.underfilled is None or found.no_items is None or found.overlap is None:
        return
    typer.echo(f"overlap@k     mean {found.overlap:.4f}, least {found.least_overlap:.4f}")
    typer.echo(f"same list     {found.same:.2%}, same first item {found.same_first:.2%}")
    typer.echo(
        f"score b - a   mean {_signed(found.score)}, mean size {_signed(found.score_size)} (items in both lists)"
    )
    typer.echo(f"underfilled   {a} {found.underfilled[0]:.2%}, {b} {found.underfilled[1]:.2%}")
    typer.echo(f"no items      {a} {found.no_items[0]:.2%}, {b} {found.no_items[1]:.2%}")
    if found.comparable:
        typer.echo(f"as recorded   {found.reproduced} of {found.comparable} answers under the versions that gave them")


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4f}"
