"""`widebeam vocab`: catalogues into a deployment root, out of it, and side by side."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from app.cli.deployment import read_deployment
from app.cli.groups import group
from app.cli.output import JsonFlag, print_json, print_table, say
from app.errors import counted
from app.vocab import inspect as inspection
from app.vocab.artifact import open_vocab, save_vocab
from app.vocab.build import residual_kmeans
from app.vocab.diff import Difference
from app.vocab.diff import diff as difference
from app.vocab.embeddings import read_embeddings
from app.vocab.formats import FORMATS, jsonl
from app.vocab.formats.source import Source
from app.vocab.items import Table
from app.vocab.manifest import FILE, Kind, versions
from app.vocab.publish import check_free, next_version
from app.vocab.table import read_table, table_of
from app.vocab.vocab import Vocab

app = group("Import, build, inspect and compare catalogues.")

Root = Annotated[Path, typer.Option(help="Deployment root", exists=True, file_okay=False)]
Version = Annotated[str | None, typer.Option(help="Name of the new version; by default the newest's, counted up")]
Requires = Annotated[
    list[str] | None, typer.Option(help="Weights version or digest that this vocab goes with; may be repeated")
]
SourceFile = Annotated[Path, typer.Argument(metavar="SRC", exists=True, dir_okay=False, help="File to read")]
IdsFile = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="Item ids in row order: one a line, a .json array, or .npy integers"
    ),
]
Which = Annotated[str | None, typer.Argument(help="Version of ROOT, or a version's directory; by default the newest")]
WhichTwo = Annotated[str, typer.Argument(help="Version of ROOT, or a version's directory")]


class Made(NamedTuple):
    """What a new vocab version is, as --json prints it."""

    kind: str
    version: str
    digest: str
    directory: str
    items: int
    sids: int
    warnings: list[str]


@app.command("import")
def import_(
    src: SourceFile,
    format_: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}")],
    root: Root = Path(),
    version: Version = None,
    ids: IdsFile = None,
    sid_tokens: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="sid_tokens.json, for files that hold token ids")
    ] = None,
    requires_weights: Requires = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a new vocab version of ROOT from a catalogue file.

    Exit 1 when the file is refused (the message says where), 2 wrong usage.
    """
    if format_ not in FORMATS:
        raise typer.BadParameter(f"`{format_}` is none of {', '.join(FORMATS)}", param_hint="--format")
    if ids is not None and format_ != "npy":
        raise typer.BadParameter("only `npy` takes its ids from a second file", param_hint="--ids")
    if sid_tokens is not None and format_ not in {"nvidia-jsonl", "xllm"}:
        raise typer.BadParameter("only `nvidia-jsonl` and `xllm` hold token ids", param_hint="--sid-tokens")
    sid = read_deployment(root).sid
    name = new_version(root, "vocab", version)
    source = Source(src, sid, ids, sid_tokens)
    _publish(read_table(format_, source), sid.sizes, root, name, requires_weights, as_json)


@app.command()
def build(
    src: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", exists=True, dir_okay=False, help="Embeddings [items, dim], .npy or .safetensors"
        ),
    ],
    root: Root = Path(),
    version: Version = None,
    ids: IdsFile = None,
    tensor: Annotated[str | None, typer.Option(help="Which tensor of a .safetensors file that holds several")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal SIDs")] = 0,
    requires_weights: Requires = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a new vocab version of ROOT with an SID of its own for each item, by residual k-means of item embeddings."""
    sizes = read_deployment(root).sid.sizes
    name = new_version(root, "vocab", version)
    points, names = read_embeddings(src, ids, tensor)
    table = table_of(names, residual_kmeans(points, sizes, seed), ids or src, sizes)
    _publish(table, sizes, root, name, requires_weights, as_json)


@app.command()
def inspect(which: Which = None, root: Root = Path(), as_json: JsonFlag = False) -> None:
    """Check a version and say what it looks like: collisions, codes in use, fan-out, largest prefixes."""
    report = inspection.inspect(open_vocab(directory_of(which, root)))
    if as_json:
        print_json(report)
        return
    typer.echo(
        f"{report.version}: {counted(report.items, 'item')} on {counted(report.sids, 'SID')} of sizes {report.sizes}"
    )
    typer.echo(f"digest {report.digest}")
    typer.echo(
        f"items that share their SID: {report.items_sharing}; {counted(report.most_items, 'item')} at most on one"
    )
    columns = ("step", "codes", "used", "prefixes", "fan-out mean", "fan-out max", "items below the largest", "which")
    print_table(
        columns,
        [
            (*msgspec.structs.astuple(step), largest.items, largest.sid)
            for step, largest in zip(report.steps, report.largest, strict=True)
        ],
    )
    if report.attributes:
        rows = [(one.name, one.type, one.items, "" if one.texts is None else one.texts) for one in report.attributes]
        print_table(("attribute", "type", "items", "texts"), rows)
    for warning in report.warnings:
        say(f"warning: {warning}")


@app.command()
def diff(
    a: WhichTwo,
    b: WhichTwo,
    root: Root = Path(),
    limit: Annotated[int, typer.Option(min=0, help="Examples of each kind")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """Say what changed from version A to version B: items added, removed, moved to another SID, other attributes."""
    found = difference(_open(a, root), _open(b, root), limit)
    if as_json:
        print_json(found)
    else:
        _print_difference(found)


@app.command()
def export(
    which: Which = None,
    format_: Annotated[str, typer.Option("--format", help="jsonl")] = "jsonl",
    out: Annotated[
        Path | None, typer.Option(help="File to make (never overwritten); standard output by default")
    ] = None,
    root: Root = Path(),
) -> None:
    """Write a version in its plain form, JSON lines."""
    if format_ != "jsonl":
        raise typer.BadParameter(f"`{format_}` cannot be written; `jsonl` can", param_hint="--format")
    vocab = _open(which, root)
    if out is None:
        jsonl.write(vocab, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    try:
        stream = out.open("xb")
    except OSError as error:
        raise typer.BadParameter(f"{out}: {error.strerror}", param_hint="--out") from error
    with stream:
        say(f"{counted(jsonl.write(vocab, stream), 'item')} in {out}")


def new_version(root: Path, kind: Kind, version: str | None) -> str:
    """The name of a version that is about to be made. Raises Rejected for one that exists or cannot be."""
    name = version if version is not None else next_version(root, kind)
    check_free(root, kind, name)
    return name


def made_by() -> str:
    """Who writes manifests here."""
    return f"widebeam {installed('widebeam')}"


def directory_of(which: str | None, root: Path) -> Path:
    """A version's directory, by path or by name; None = the newest complete one."""
    if which is None:
        newest = next((found for found in versions(root, "vocab") if found.complete), None)
        if newest is None:
            raise typer.BadParameter(f"{root / 'vocab'} holds no version", param_hint="--root")
        return newest.directory
    for directory in (root / "vocab" / which, Path(which)):
        if (directory / FILE).exists():
            return directory.absolute()
    raise typer.BadParameter(f"`{which}` is no version of {root / 'vocab'}, and no version's directory")


def _open(which: str | None, root: Path) -> Vocab:
    return open_vocab(directory_of(which, root))


def _publish(
    table: Table, sizes: tuple[int, ...], root: Path, name: str, weights: list[str] | None, as_json: bool
) -> None:
    requires: Mapping[Kind, list[str]] = {"weights": weights} if weights else {}
    published = save_vocab(table, sizes, root, name, made_by=made_by(), requires=requires)
    del table  # before the version is read back, as a server would read it: what was written is what is meant
    report = inspection.inspect(open_vocab(published.directory))
    made = Made(*published[:3], str(published.directory), report.items, report.sids, report.warnings)
    if as_json:
        print_json(made._asdict())
    else:
        typer.echo(
            f"{made.directory}: {counted(made.items, 'item')} on {counted(made.sids, 'SID')}, digest {made.digest[:12]}"
        )
    for warning in made.warnings:
        say(f"warning: {warning}")


def _print_difference(found: Difference) -> None:
    typer.echo(f"{found.old}: {counted(found.items_old, 'item')}; {found.new}: {counted(found.items_new, 'item')}")
    rows: list[tuple[str, int, Any]] = [
        ("added", found.added, ", ".join(found.first_added)),
        ("removed", found.removed, ", ".join(found.first_removed)),
        ("moved", found.moved, ", ".join(f"{one.id} {one.old} -> {one.new}" for one in found.first_moved)),
        ("changed", found.changed, ", ".join(found.first_changed)),
    ]
    print_table(("", "items", "first of them"), rows)
