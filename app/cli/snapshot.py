"""`widebeam snapshot`: the snapshots of a running server, over its admin port."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

import typer

from app.cli.admin import TIMEOUT_S, Admin, ServerSays, call
from app.cli.groups import group
from app.cli.output import JsonFlag, print_json, print_table

app = group("Look at a server's snapshots, promote, roll back.")
PIN: Final = "state/pin.json"
LOOKS: Final = 50
LOOK_S: Final = 0.1
Which = Annotated[str | None, typer.Argument(help="A snapshot's id, as `list` shows it")]


@app.command("list")
def list_(admin: Admin, json: JsonFlag = False) -> None:
    """What is in memory, and what is asked for."""
    found = call(admin, "GET", "snapshots")
    if json:
        print_json(found)
        return
    rows = [
        (one["id"], _state(one), one["weights"]["version"], one["vocab"]["version"], one["contract"], one["requests"])
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
    """Serve a snapshot in memory again, until `unpin`; without an id the one that served before.

    Without an id it is refused, with exit 1, while a rollback or a pin stands: two people in a hurry would bring back
    what the first of them took away. The message names what can be rolled back to.
    """
    if snapshot is None:
        found = call(admin, "GET", "snapshots")
        pinned = found["pin"]
        if pinned is not None and pinned["cause"] != "promote":
            raise ServerSays(_stands(found, admin))
        kept = [one for one in found["snapshots"] if one["state"] == "ready" and one["deployment"] == "current"]
        before = sorted((one for one in kept if one["active_at"]), key=lambda one: str(one["active_at"]))
        if not before:
            raise ServerSays("nothing is kept that has served before under this deployment.toml")
        snapshot = str(before[-1]["id"])
    _decided(call(admin, "POST", f"snapshots/{snapshot}:rollback"), json)


def _stands(found: dict[str, Any], admin: str) -> str:
    """Why a rollback without an id is refused, and how to go on."""
    what = "a rollback stands already" if found["pin"]["cause"] == "rollback" else "a pin stands"
    lines = [f"{what} ({_named(found['pin']['versions'])}), and nothing was changed. In memory:"]
    for one in found["snapshots"]:
        versions = f"weights {one['weights']['version']}, vocab {one['vocab']['version']}"
        last = f", served last from {one['active_at']}" if one["state"] == "ready" and one["active_at"] else ""
        lines.append(f"  {one['id']}  {one['state']}: {versions}{last}")
    lines.append(f"to go to one of them: widebeam snapshot rollback ID --admin {admin}")
    lines.append(f"to follow release.json or the newest versions again: widebeam snapshot unpin --admin {admin}")
    return "\n".join(lines)


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
    """Follow release.json, or the newest versions, again, and say which those are."""
    document = call(admin, "POST", "snapshots:unpin")
    if json:
        print_json(document)
        return
    found = call(admin, "GET", "snapshots")
    for _ in range(LOOKS):  # until the server has looked at the disk again
        if found["desired"].get("by") != PIN:
            break
        time.sleep(LOOK_S)
        found = call(admin, "GET", "snapshots")
    typer.echo(f"nothing is pinned: {_follows(found)}")


def _follows(found: dict[str, Any]) -> str:
    """What serves without a pin, in words."""
    desired = found["desired"]
    by = desired.get("by") or "the newest versions"
    if found["pin"] is not None or by == PIN:
        return "what serves next is not known yet, see `widebeam snapshot list`"
    if "wanted" not in desired:
        return f"{by} cannot be followed; what serves goes on"
    active = [one for one in found["snapshots"] if one["state"] == "active"]
    serving = {kind: active[0][kind]["version"] for kind in ("weights", "vocab")} if active else {}
    verb = "serve" if serving == desired["wanted"] else "will serve"
    return f"{_named(desired['wanted'])} {verb} ({by})"


def _state(snapshot: dict[str, Any]) -> str:
    """Its state, and whether it may serve again as deployment.toml is now."""
    earlier = snapshot["state"] == "ready" and snapshot["deployment"] == "earlier"
    return "ready, of an earlier deployment.toml" if earlier else str(snapshot["state"])


def _decided(found: dict[str, Any], json: bool) -> None:
    if json:
        print_json(found)
    else:
        typer.echo(
            f"{found['state']}: {found.get('snapshot', '')} pinned to {_named(found['pin'])}".replace(":  ", ": ")
        )
        if "problem" in found:
            typer.echo(f"which cannot be yet: {found['problem']['message']}")


def _named(versions: dict[str, str]) -> str:
    return ", ".join(f"{kind} {version}" for kind, version in versions.items())
