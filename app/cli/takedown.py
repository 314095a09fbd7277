"""`widebeam takedown`: items that nobody gets any more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.deployment import read_deployment
from app.cli.groups import group
from app.cli.output import JsonFlag, print_json, print_table, say
from app.cli.vocab import Root, Version, made_by, new_version
from app.errors import Rejected, counted
from app.runtime.desired import asked, places, wishes
from app.runtime.takedowns import FILE, load_takedowns, read_ids
from app.vocab.artifact import open_vocab
from app.vocab.manifest import Found, version_key, versions
from app.vocab.publish import commit, draft

app = group("Take items down, and look at the lists.")

SHOWN = 5
"""Ids that a warning names."""


@app.command()
def publish(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Item ids, one a line: the whole list")],
    root: Root = Path(),
    version: Version = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a new list of ROOT, which replaces the one before: what it does not name comes back.

    Servers take it from the next request on. Ids that the catalogue does not know are a warning: they may be of a
    version that is still to come. Exit 1 when the file is refused; then nothing changes.
    """
    state = root / read_deployment(root).server.state_dir
    ids = _read(file)
    name, before = new_version(root, "takedowns", version), versions(root, "takedowns")
    warnings = [*_older(name, before), *_asked(root, state, name), *_unknown(root, state, ids), *_back(before, ids)]
    with draft(root, "takedowns") as made:
        made.write(FILE, ["".join(f"{one}\n" for one in ids).encode()])
        published = commit(made, "takedowns", name, made_by(), {})
    if as_json:
        shown = {**published._asdict(), "directory": str(published.directory)}
        print_json({**shown, "items": len(ids), "warnings": warnings})
    else:
        down = f"{counted(len(ids), 'item')} taken down" if ids else "nothing is taken down any more"
        typer.echo(f"{published.directory}: {down}, digest {published.digest[:12]}")
    for warning in warnings:
        say(f"warning: {warning}")


@app.command("list")
def list_(root: Root = Path(), as_json: JsonFlag = False) -> None:
    """The lists of ROOT, newest first, with how many items each takes down. Exit 1 where one cannot be used."""
    rows = [_row(one) for one in versions(root, "takedowns")]
    if as_json:
        print_json(rows)
    else:
        columns = ("version", "items", "digest", "problem")
        print_table(columns, [tuple("" if one[key] is None else one[key] for key in columns) for one in rows])
    raise typer.Exit(1 if any(one["problem"] for one in rows) else 0)


def _row(one: Found) -> dict[str, object]:
    try:
        found, _ = load_takedowns(one.directory)
    except Rejected as error:
        return {"version": one.version, "items": None, "digest": None, "problem": str(error)}
    return {"version": one.version, "items": len(found.ids), "digest": found.digest[:12], "problem": None}


def _read(file: Path) -> list[str]:
    """The ids of a file that a person made: a mark of its encoding or a blank line would be an id that nobody has."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise Rejected("file_unreadable", f"cannot be read: {error.strerror}", location=str(file)) from error
    if data.startswith(b"\xef\xbb\xbf"):
        raise Rejected("bad_id", "begins with a byte order mark: save as UTF-8 without one", location=str(file))
    return read_ids(data, str(file))


def _older(name: str, before: tuple[Found, ...]) -> list[str]:
    """A name before the newest's is a list that no server takes."""
    newest = before[0].version if before else None
    if newest is None or version_key(name) > version_key(newest):
        return []
    return [f"{name} comes before {newest}, which is the newest by name and stays in force"]


def _asked(root: Path, state: Path, name: str) -> list[str]:
    """A pin or release.json may hold servers to another list."""
    for file, place in places(root, state):
        try:
            wanted = asked(file, place).get("takedowns", name)
        except Rejected as error:
            return [f"which list is asked for cannot be told: {error}"]
        if wanted != name:
            return [f"{place} asks for {wanted}: {name} waits until it does not"]
    return []


def _unknown(root: Path, state: Path, ids: list[str]) -> list[str]:
    """Ids that are not in the catalogue that a start would take."""
    try:
        found = wishes(root, state, "vocab").found
        if not found:
            return [f"{root / 'vocab'} holds no catalogue: whether it knows these ids was not looked at"]
        known = open_vocab(found[0].directory).find(ids) >= 0
    except Rejected as error:
        return [f"the catalogue cannot be read, so whether it knows these ids was not looked at: {error}"]
    unknown = [one for one, there in zip(ids, known.tolist(), strict=True) if not there]
    if not unknown:
        return []
    return [f"vocab {found[0].version} does not know {counted(len(unknown), 'id')}: {_first(unknown)}"]


def _back(before: tuple[Found, ...], ids: list[str]) -> list[str]:
    """Items of the newest list before that this one does not name."""
    for one in before:
        try:
            gone = sorted({*load_takedowns(one.directory)[0].ids} - {*ids})
        except Rejected:
            continue
        verb = "comes" if len(gone) == 1 else "come"
        return [f"{counted(len(gone), 'item')} of {one.version} {verb} back: {_first(gone)}"] if gone else []
    return []


def _first(ids: list[str]) -> str:
    return ", ".join(ids[:SHOWN]) + (", .." if len(ids) > SHOWN else "")
