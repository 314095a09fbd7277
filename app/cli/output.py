"""What commands print: results on stdout as a table or as JSON, everything else on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from app.errors import counted

T = TypeVar("T")
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, for machines")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file as JSON")]


def print_json(document: object) -> None:
    """A document as indented JSON on stdout."""
    sys.stdout.write(to_json(document))


def to_json(document: object) -> str:
    """A document as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """A table on stdout; columns whose every cell is a number are aligned right."""
    cells = list(rows)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(columns):
        numbers = bool(cells) and all(isinstance(row[place], int | float) for row in cells)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*(str(cell) for cell in row))
    Console(markup=False, highlight=False).print(table)


def say(message: str) -> None:
    """A line for people, on stderr: stdout may be piped into another program."""
    sys.stderr.write(f"{message}\n")


def tally(severities: Iterable[str]) -> str:
    """How many findings of each kind: `1 error, 2 warnings, 0 notes`."""
    found = list(severities)
    return ", ".join(counted(found.count(kind), kind) for kind in ("error", "warning", "note"))


def progress(work: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """Go through `work`; a bar on a terminal, one plain line elsewhere."""
    if sys.stderr.isatty():
        return track(work, what, total, console=Console(stderr=True))
    say(what)
    return work
