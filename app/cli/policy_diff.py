"""`widebeam policy diff`: what differs between two policies, or two folders, by meaning."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import typer

from app.cli.output import JsonFlag, print_json
from app.cli.policy_files import Deployed, deployed
from app.policies.difference import Change, FileChange, FolderChange, changes, folder_changes
from app.policies.plan import Plan
from app.policies.users import Users
from app.runtime.status import utc_seconds

Root = Annotated[Path, typer.Option(help="Deployment root that gives the contract and the catalogue")]
Side = Annotated[str, typer.Argument(help="A policy of ROOT by name, a policy file, a policy id, or a folder")]

SIGNS: Final = {"added": "+", "removed": "-", "changed": "~", "edited": "=", "rejected": "!"}


def diff(a: Side, b: Side, root: Root = Path(), as_json: JsonFlag = False) -> None:
    """Say what changes from A to B: steps, widths, parameters; for folders also whom experiments move."""
    folders = [Path(one).is_dir() for one in (a, b)]
    if folders[0] != folders[1]:
        raise typer.BadParameter("compare two policies, or two folders")
    on = deployed(root)
    if folders[0]:
        found = folder_changes(on.folder(Path(a)), on.folder(Path(b)), utc_seconds())
        print_json(folder_data(found)) if as_json else typer.echo("\n".join(folder_lines(found)))
        raise typer.Exit(1 if rejected(found) else 0)
    _policies(on, a, b, as_json)


def _policies(on: Deployed, a: str, b: str, as_json: bool) -> None:
    before, after = on.policy(a), on.policy(b)
    found = changes(before, after)
    same = before.structure.id == after.structure.id
    if as_json:
        ids = {"a": _ids(before), "b": _ids(after), "same_structure": same}
        print_json({**ids, "changes": [one._asdict() for one in found]})
        return
    typer.echo(f"{before.policy} {before.policy_id} -> {after.policy} {after.policy_id}")
    typer.echo("\n".join(_change_lines(found)) or "  the same answers")
    typer.echo(f"  {'the same structure: nothing to compile' if same else 'another structure'}")


def _ids(plan: Plan) -> dict[str, str]:
    return {"policy": plan.policy, "policy_id": plan.policy_id, "structure_id": plan.structure.id}


def rejected(found: FolderChange) -> bool:
    """Whether something of the new folder cannot be served."""
    return any(one.what == "rejected" for one in (*found.policies, *found.experiments))


def folder_data(found: FolderChange) -> dict[str, object]:
    """A folder's changes as JSON-ready data; shares 0..1."""
    return {
        "policies": [_file_data(one) for one in found.policies],
        "experiments": [_file_data(one) for one in found.experiments],
        "traffic": [one._asdict() for one in found.traffic],
        "users": [
            {**one._asdict(), "layers": {name: layer._asdict() for name, layer in one.layers.items()}}
            for one in found.users
        ],
        "notes": list(found.notes),
    }


def _file_data(one: FileChange) -> dict[str, object]:
    return {**one._asdict(), "changes": [change._asdict() for change in one.changes]}


def folder_lines(found: FolderChange) -> list[str]:
    """A folder's changes for a terminal."""
    lines = [*_files("policies", found.policies), *_files("experiments", found.experiments)]
    if found.traffic:
        lines += ["traffic", *_change_lines(found.traffic)]
    lines += ["users"] if found.users else []
    for one in found.users:
        lines += _user_lines(one, alone=len(found.users) == 1)
    return [*lines, *(f"note: {one}" for one in found.notes)]


def _files(title: str, files: Iterable[FileChange]) -> list[str]:
    lines, same = [], 0
    for one in files:
        if one.what == "same":
            same += 1
            continue
        ids = " -> ".join(part for part in (one.before, one.after) if part)
        compile_ = "  (a structure to compile)" if one.compile else ""
        lines.append(f"  {SIGNS[one.what]} {one.name}: {one.what} {ids}".rstrip() + compile_)
        lines += ["    " + line for line in _change_lines(one.changes)]
    if same:
        lines.append(f"    {same} unchanged")
    return [title, *lines] if lines else []


def _change_lines(found: Iterable[Change]) -> list[str]:
    return [f"  {one.place}: {_shown(one.before)} -> {_shown(one.after)}" for one in found]


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return "; ".join(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else str(value)


def _user_lines(one: Users, *, alone: bool) -> list[str]:
    who = "all" if alone else "others" if one.surface is None else f"ctx.surface = {one.surface}"
    head = f"  {who}: {one.arm:.4%} change arm, at least {one.least:.4%} must; {one.policy:.4%} get another policy id"
    layers = [f"    {name}: {layer.arm:.4%}, at least {layer.least:.4%}" for name, layer in one.layers.items()]
    return [head, *(layers if len(layers) > 1 else [])]
