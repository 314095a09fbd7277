"""`widebeam snapshot`: the snapshots of a running server, over its admin port."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from app.cli.admin import TIMEOUT_S, Admin, ServerSays, call
from app.cli.output import JsonFlag, print_json, print_table

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look at a server's snapshots, promote, roll back.")
Which = Annotated[str | None, typer.Argument(help="A snapshot's id, as `list` shows it")]


@app.command("list")
def list_(admin: Admin, json: JsonFlag = False) -> None:
    """What is in memory, and what is asked for."""
    found = call(admin, "GET", "snapshots")
    if json:
        print_json(found)
        return
    rows = [
        (one["id"], one["state"], one["weights"]["version"], one["vocab"]["version"], one["contract"], one["requests"])
        for one in found["snapshots"]
    ]
    print_table(("snapshot", "state", "weights", "vocab", "contract", "requests"), rows)
    desired = found["desired"]
    if desired.get("asked"):
        asked = ", ".join(f"{kind} {version}" for kind, version in desired["asked"].items())
        typer.echo(f"asked for by {desired['by']}: {asked}")
    if "problem" in desired:
        typer.echo(f"which cannot be: {desired['problem']['message']}")


@app.command()
def promote(
    admin: Admin,
    snapshot: Which = None,
    weights: Annotated[str | None, typer.Option(help="A version that may have to be loaded first")] = None,
    vocab: Annotated[str | None, typer.Option(help="A version that may have to be loaded first")] = None,
    wait: Annotated[float, typer.Option(min=0, max=600, help="Seconds to wait for versions to be loaded")] = 60.0,
    json: JsonFlag = False,
) -> None:
    """Serve a snapshot that is in memory, or versions from the disk, until `unpin`. Exit 1 if it is refused."""
    if (snapshot is None) == (weights is None and vocab is None):
        raise typer.BadParameter("name a snapshot, or versions")
    if snapshot is not None:
        _decided(call(admin, "POST", f"snapshots/{snapshot}:promote"), json)
        return
    versions = {kind: version for kind, version in (("weights", weights), ("vocab", vocab)) if version is not None}
    _decided(call(admin, "POST", f"snapshots:promote?wait={wait:g}", versions, TIMEOUT_S + wait), json)


@app.command()
def rollback(admin: Admin, snapshot: Which = None, json: JsonFlag = False) -> None:
    """Go back to a snapshot in memory, without one to what served before, until `unpin`."""
    if snapshot is None:
        kept = [one for one in call(admin, "GET", "snapshots")["snapshots"] if one["state"] == "ready"]
        before = sorted((one for one in kept if one["active_at"]), key=lambda one: str(one["active_at"]))
        if not before:
            raise ServerSays("nothing is kept that has served before")
        snapshot = str(before[-1]["id"])
    _decided(call(admin, "POST", f"snapshots/{snapshot}:rollback"), json)


@app.command()
def pin(admin: Admin, snapshot: Which = None, json: JsonFlag = False) -> None:
    """Stay with a snapshot, without one with the active one: newer versions prepare, and wait."""
    if snapshot is None:
        active = [one["id"] for one in call(admin, "GET", "snapshots")["snapshots"] if one["state"] == "active"]
        if not active:
            raise ServerSays("nothing serves yet")
        snapshot = active[0]
    _decided(call(admin, "POST", f"snapshots/{snapshot}:pin"), json)


@app.command()
def unpin(admin: Admin, json: JsonFlag = False) -> None:
    """Follow release.json, or the newest versions, again."""
    found = call(admin, "POST", "snapshots:unpin")
    if json:
        print_json(found)
    else:
        typer.echo("nothing is pinned")


def _decided(found: dict[str, Any], json: bool) -> None:
    if json:
        print_json(found)
    else:
        pinned = ", ".join(f"{kind} {version}" for kind, version in found["pin"].items())
        typer.echo(f"{found['state']}: {found.get('snapshot', '')} pinned to {pinned}".replace(":  ", ": "))
