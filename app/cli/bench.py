"""`widebeam bench`: load a server, or run one of this project's measurements from a clone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

import app as package
from app.cli.groups import Listing, group
from app.cli.load import Result, Target, run_load
from app.cli.loop import run
from app.cli.output import JsonFile, print_table, say, to_json

CLONE = Path(package.__file__).parent.parent
"""Where bench/ lies in a clone. An installed package has none."""


class BenchGroup(Listing):
    """`load`, and any script of the clone's bench/ by name."""

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201  typer's types are private
        """`load` is ours; other names go to `script`."""
        if args and args[0] not in self.commands:
            return super().resolve_command(ctx, ["script", *args])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx, formatter):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Commands, and below them the measurements of the clone."""
        super().format_commands(ctx, formatter)
        rows = [(name, _about(file)) for name, file in measurements().items()]
        if rows:
            with formatter.section("Measurements (`widebeam bench NAME --help` says more)"):
                formatter.write_dl(rows)


def measurements() -> dict[str, Path]:
    """The scripts of the clone's bench/ by name."""
    return {file.stem.replace("_", "-"): file for file in sorted(CLONE.glob("bench/[!_]*.py"))}


def _about(file: Path) -> str:
    """What a script measures: the first paragraph of its docstring. Nothing is imported."""
    said = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    return " ".join(said.split("\n\n")[0].split())


app = group("Load a server (`load`), or run a measurement of a clone's bench/ by its name.", BenchGroup)


@app.callback()
def bench() -> None:
    """Load a server (`load`), or run a measurement of a clone's bench/ by its name."""


@app.command()
def load(
    url: Annotated[str, typer.Option(help="http://host:port of a server; its /v1/recommend is called")],
    requests: Annotated[Path, typer.Option(help="Request bodies, one JSON object a line; sent in turn")],
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second")] = 100.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to send")] = 10.0,
    json: JsonFile = None,
    seed: Annotated[int, typer.Option(help="Of the arrival times")] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a request counts as failed")] = 10.0,
    connections: Annotated[int, typer.Option(min=1, help="Most connections at once")] = 512,
) -> None:
    """Send requests at a fixed rate (Poisson arrivals, open loop) and report latency from the intended send time.

    This is a load tool: point it only at servers that may be loaded. Exit 1 when nothing was answered.
    """
    target, bodies = _target(url), _bodies(requests)
    with _ticker(seconds * rate) as tick:
        result = run(
            run_load(
                target, bodies, url=url, rate=rate, seconds=seconds, seed=seed, timeout_s=timeout,
                connections=connections, tick=tick,
            )
        )  # fmt: skip
    if json is not None:
        json.write_text(to_json(result), "utf-8")
    _print(result)
    if not result.answered:
        raise typer.Exit(1)


@app.command(
    hidden=True, add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def script(context: typer.Context, name: str) -> None:
    """Run bench/NAME.py of the clone with the remaining arguments."""
    known = measurements()
    if name not in known:
        where = f"known here: {', '.join(['load', *known])}" if known else "other names need a clone's bench/"
        say(f"no measurement `{name}`; {where}")
        raise typer.Exit(2)
    path = os.pathsep.join(filter(None, [str(CLONE), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", f"bench.{known[name].stem}", *context.args]
    done = subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": path})  # noqa: S603  the clone's file
    raise typer.Exit(done.returncode)


def _target(url: str) -> Target:
    try:
        return Target.parse(url)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--url") from error


def _bodies(file: Path) -> list[bytes]:
    try:
        bodies = [line.strip() for line in file.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="--requests") from error
    if not bodies:
        raise typer.BadParameter(f"{file} holds no requests", param_hint="--requests")
    return bodies


@contextmanager
def _ticker(total: float) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, one line elsewhere."""
    if not sys.stderr.isatty():
        say("sending requests")
        yield lambda _: None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("requests", total=total)
        yield lambda sent: progress.update(bar, completed=sent)


def _print(result: Result) -> None:
    print_table(("", "offered/s", "answered/s", "sent", "answered", "connections"), [
        ("rate", result.offered_per_s, result.achieved_per_s, result.sent, result.answered, result.connections),
    ])  # fmt: skip
    columns = ("ms", *result.latency_ms)
    if result.latency_ms:
        late = [result.late_ms[name] for name in result.latency_ms]
        print_table(columns, [("latency", *result.latency_ms.values()), ("sent late", *late)])
    if result.errors:
        print_table(("error", "requests"), sorted(result.errors.items()))
    if result.versions:
        rows = [(kind, name, count) for kind, seen in result.versions.items() for name, count in seen.items()]
        print_table(("version of", "name", "answers"), rows)
