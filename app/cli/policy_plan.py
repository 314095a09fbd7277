"""`widebeam policy plan`: what a server would swap if a folder became its policies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.admin import call
from app.cli.output import JsonFlag, print_json
from app.cli.policy_diff import Root, folder_data, folder_lines
from app.cli.policy_files import Deployed, deployed
from app.policies.diagnostics import Diagnostic, render
from app.policies.difference import FolderChange, folder_changes
from app.policies.load import PolicySet, compile_folder, snapshot
from app.runtime.status import utc_seconds

Admin = Annotated[
    str | None, typer.Option(help="Compare with this server, as http://host:port; without it, with ROOT/policies")
]


def plan(
    folder: Annotated[Path, typer.Argument(help="The folder that would become ROOT/policies", exists=True)],
    root: Root = Path(),
    admin: Admin = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what a server would swap: policies, experiments, structures to compile, users who change arm. Nothing is
    installed. Exit 1 if something would be rejected."""
    on = deployed(root)
    before = on.in_force()
    files, now = snapshot(folder, folder.as_posix()), utc_seconds()
    after = compile_folder(files, on.contract, on.catalogue, cache=on.cache(), running=before.traffic, now=now)
    found = folder_changes(before, after, now)
    if admin is not None:
        found = _against(found, before, call(admin, "GET", "policies"), call(admin, "GET", "status"), on)
    findings = _findings(after)
    if as_json:
        structures = sorted({one.structure.id for one in after.plans()} - {one.structure.id for one in before.plans()})
        diagnostics = [one.data() for one in findings]
        print_json({**folder_data(found), "compile": structures, "diagnostics": diagnostics})
    else:
        typer.echo("\n".join(folder_lines(found)))
        if findings:
            typer.echo("\n" + render(findings))
    bad = after.plan(after.default) is None or any(one.rule.severity == "error" for one in findings)
    raise typer.Exit(1 if bad else 0)


def _findings(after: PolicySet) -> list[Diagnostic]:
    own = [one for loaded in after.policies.values() for one in loaded.findings]
    return sorted({*own, *after.findings}, key=lambda one: (one.span, one.rule.code, one.message))


def _against(
    found: FolderChange, before: PolicySet, served: Mapping[str, Any], status: Mapping[str, Any], on: Deployed
) -> FolderChange:
    """The same with the server's ids in the place of ROOT's. Shares of users are only said where the server has the
    policies and experiments that ROOT has: it does not tell its salts and holdout."""
    theirs = status["active"]["contract"]
    if theirs != on.contract.id:
        note = f"the server's contract is {theirs}, that of {on.root} is {on.contract.id}: ids cannot be compared"
        return found._replace(users=(), notes=(*found.notes, note))
    ids = {name: one["policy_id"] for name, one in served["policies"].items() if one["policy_id"]}
    ours = {one.policy: one.policy_id for one in before.plans()}
    policies = []
    for one in found.policies:
        live = ids.pop(one.name, None)
        if live == one.before or one.what == "rejected":
            policies.append(one._replace(before=live))
            continue
        what = "removed" if one.after is None else "added" if live is None else "changed"
        what = "same" if live == one.after else what
        policies.append(one._replace(what=what, before=live, changes=()))
    different = [name for name in ours if ours[name] != served["policies"].get(name, {}).get("policy_id")]
    different += sorted(_apart(before, status))
    if different or ids:
        names = ", ".join([*different, *sorted(ids)])
        note = f"the server does not serve what {on.root}/policies has ({names}): nothing is said about its users"
        return found._replace(policies=tuple(policies), users=(), notes=(*found.notes, note))
    return found._replace(policies=tuple(policies))


def _apart(before: PolicySet, status: Mapping[str, Any]) -> set[str]:
    """Experiments that run otherwise on the server."""
    ours = {
        name: {"state": one.state, "layer": one.layer, "salt": one.salt, "slots": list(one.slots)}
        for name, one in before.traffic.experiments.items()
    }
    theirs = {
        name: {key: one[key] for key in ("state", "layer", "salt", "slots")}
        for name, one in status["experiments"].items()
        if "slots" in one
    }
    return {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
