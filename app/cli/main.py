"""The tree of `widebeam` commands. A command's module is imported when it runs, so that `--help` costs nothing."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Final, NamedTuple

import typer
from typer.main import get_command as click_command

from app.cli.groups import Listing
from app.errors import WidebeamError


class Entry(NamedTuple):
    """Where a command lives: `module:attribute` under `app.cli`, a typer application or a plain function."""

    place: str
    help: str


COMMANDS: Final = {
    "demo": Entry("demo:demo", "Start a server on the shipped root, ask for three users, print, stop."),
    "serve": Entry("serve:serve", "Serve a deployment root over HTTP."),
    "recommend": Entry("recommend:recommend", "Answer a file of requests without a server."),
    "weights": Entry("weights:app", "Publish model weights into a deployment root."),
    "vocab": Entry("vocab:app", "Import, build, inspect and compare catalogues."),
    "takedown": Entry("takedown:app", "Take items down, and look at the lists."),
    "contract": Entry("contract:app", "Make, show and check the contract of a deployment root."),
    "engine": Entry("engine:app", "Compile a deployment's kernels beforehand."),
    "snapshot": Entry("snapshot:app", "Look at a running server's snapshots, promote, roll back."),
    "policy": Entry("policy:app", "Check and explain selection policies."),
    "bench": Entry("bench:app", "Load a server, or reproduce a measurement of this project."),
}


class LazyGroup(Listing):
    """Lists the commands from the table; imports one only to run it."""

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201  typer's types are private
        """The real command behind a listed one."""
        name, listed, rest = super().resolve_command(ctx, args)
        if name not in COMMANDS:
            return name, listed, rest
        command = load(COMMANDS[name].place)
        command.name = name
        return name, command, rest


def load(place: str):  # type: ignore[no-untyped-def]  # noqa: ANN201  typer's command class is private
    """Import the command at `module:attribute`."""
    module, _, attribute = place.partition(":")
    found = getattr(import_module(f"app.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        return click_command(found)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command()(found)
    return click_command(single)


app = typer.Typer(
    cls=LazyGroup,
    help="Widebeam serves generative recommendation models with wide beams.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _list(name: str, entry: Entry) -> None:
    """Put a command on the list, without what it does."""

    def listed() -> None:
        raise AssertionError("replaced before it runs")

    app.command(name, help=entry.help)(listed)


for _name, _entry in COMMANDS.items():
    _list(_name, _entry)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"widebeam {version('widebeam')}")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Widebeam serves generative recommendation models with wide beams."""


def run() -> None:
    """The entry point of the console script: 0 done, 1 the thing checked is bad, 2 wrong usage."""
    try:
        app(prog_name="widebeam")
    except WidebeamError as error:
        sys.stderr.write(f"{error if str(error) != error.message else _placed(error)}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _placed(error: WidebeamError) -> str:
    return f"{error.path}: {error.message}" if error.path else error.message
