"""`widebeam engine`: the kernels of a deployment, and of its policies, compiled beforehand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from app.cli.compose import available_cores
from app.cli.contract import Given, Weights, contract_on_gpu
from app.cli.groups import group
from app.cli.output import JsonFlag, print_json, print_table, say
from app.cli.policy_files import deployed
from app.cli.vocab import made_by
from app.core import Contract
from app.errors import Rejected, counted
from app.policies.plan import Plan
from app.runtime import engine_artifact
from app.runtime.engine_artifact import Engine
from app.vocab.manifest import home, verify, versions

app = group("Compile a deployment's kernels beforehand.")

Root = Annotated[Path, typer.Option(help="Deployment root")]
Arch = Annotated[str, typer.Option(help="GPU architecture: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120")]
Name = Annotated[str, typer.Argument(metavar="ID", help="As `build` prints it")]


@app.callback()
def engine() -> None:
    """Compile a deployment's kernels beforehand."""


@app.command()
def build(
    root: Root = Path(),
    arch: Arch = "sm_90",
    weights: Weights = None,
    precision: Given = None,
    policies: Annotated[
        list[Path] | None,
        typer.Option(exists=True, file_okay=False, help="A folder of policies besides ROOT's: what is to go live next"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compile every kernel of the contract and of ROOT/policies into ROOT/engines/<id>. Needs NVRTC and no GPU; takes a
    minute or two.

    Run it where torch, triton, CuPy and NVRTC are those of the server: it refuses an engine made with others. A policy
    that is edited afterwards is no reason to refuse it: the server compiles what is new beside the requests.
    """
    contract = contract_on_gpu(root, weights, precision)
    wanted = engine_artifact.of_contract(contract, arch, _plans(root, contract, policies or ()))
    for package, version in wanted.identity.versions.items():
        if version == engine_artifact.NONE:
            say(f"{package} is not installed here: a server that has it will not take this engine")
    modules, made = len(wanted.builds) + len(wanted.added), _make(root, wanted)
    if as_json:
        added = {one: len(builds) for one, builds in wanted.policies.items()}
        print_json({
            "engine": wanted.id, "contract": contract.id, "arch": arch, "modules": modules, "policies": added,
            "made": made,
        })  # fmt: skip
    else:
        of = f", {len(wanted.added)} of them of {', '.join(wanted.policies)}" if wanted.added else ""
        where = home(root, "engine") / wanted.id
        typer.echo(f"{where}: {counted(modules, 'module')}{of}" + ("" if made else ", there already"))


@app.command()
def show(name: Name, root: Root = Path(), as_json: JsonFlag = False) -> None:
    """Print what an engine was made for and with, and what of policies is in it."""
    found = engine_artifact.read(_directory(root, name))
    if as_json:
        print_json(found)
        return
    print_table(("what", "value"), engine_artifact.shown(found))


@app.command()
def check(
    name: Name,
    root: Root = Path(),
    arch: Arch = "sm_90",
    weights: Weights = None,
    precision: Given = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="Exit 1, too, where kernels of the root's policies are missing")
    ] = False,
) -> None:
    """Check every byte of an engine, and that a server of this root, with what is installed here, would take it; say
    what it has of the root's policies as they are now.

    Exit 1 with every difference where it would not.
    """
    directory = _directory(root, name)
    _verify(directory)
    found, contract = engine_artifact.read(directory), contract_on_gpu(root, weights, precision)
    wanted = engine_artifact.of_contract(contract, arch, _plans(root, contract))
    try:
        engine_artifact.check(found, wanted)
    except Rejected as error:
        for one in (error, *error.others):
            typer.echo(f"engines/{name}/{one.location}: {one.message}")
        raise typer.Exit(1) from error
    typer.echo(f"engines/{name}: as it is needed here")
    missing = 0
    for policy, builds in wanted.policies.items():
        absent, every = len(builds) - len(found.has(builds)), counted(len(builds), "module")
        late = f"{absent} of {every} missing: a server compiles what is missing before the policy serves"
        typer.echo(f"policy {policy}: {late if absent else f'all {every}'}")
        missing += absent
    if complete and missing:
        raise typer.Exit(1)


def _plans(root: Path, contract: Contract, folders: Iterable[Path] = ()) -> tuple[Plan, ...]:
    """Of the policies that a server of the root has in force, and of other folders; those with errors are named."""
    on = deployed(root, contract)
    found: list[Plan] = []
    for policies in (on.in_force(), *map(on.folder, folders)):
        for name, one in sorted(policies.policies.items()):
            if one.errors:
                instead = "its last good text counts" if one.plan else "it adds nothing"
                say(f"policy {name} has errors, which `widebeam policy check` shows: {instead}")
        found += policies.plans()
    return tuple(found)


def _make(root: Path, wanted: Engine) -> bool:
    """Compile an engine, unless it is there; whether it was not. Raises Rejected, also for one that is there and not
    whole."""
    directory = home(root, "engine") / wanted.id
    if not directory.exists():
        modules = counted(len(wanted.builds) + len(wanted.added), "module")
        say(f"making {modules} for {wanted.identity.arch}; what no other engine here has is compiled")
        try:
            engine_artifact.build(root, wanted, made_by(), available_cores())
        except Rejected as error:
            if error.code != "version_exists":  # another one has made the same meanwhile
                raise
        else:
            return True
    _verify(directory)
    return False


def _verify(directory: Path) -> None:
    """Every byte of an engine. Raises Rejected with the place as it is called from the root."""
    try:
        verify(directory, "engine")
    except Rejected as error:
        place = f"engines/{directory.name}" + (f"/{error.location}" if error.location else "")
        raise Rejected(error.code, error.message, location=place) from error


def _directory(root: Path, name: str) -> Path:
    """Of an engine that is there. Raises Rejected."""
    found = next((one for one in versions(root, "engine") if one.version == name), None)
    if found is None:
        raise Rejected("no_such_version", f"engine {name!r} is not there", location="engines/")
    return found.directory
