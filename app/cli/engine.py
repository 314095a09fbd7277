"""`widebeam engine`: the kernels of a deployment, compiled beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.compose import available_cores
from app.cli.contract import Given, Weights, contract_on_gpu
from app.cli.groups import group
from app.cli.output import JsonFlag, print_json, print_table, say
from app.cli.vocab import made_by
from app.errors import Rejected, counted
from app.runtime import engine_artifact
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
    as_json: JsonFlag = False,
) -> None:
    """Compile every kernel of the contract into ROOT/engines/<id>. Needs NVRTC and no GPU; takes a minute or two.

    Run it where torch, triton, CuPy and NVRTC are those of the server: it refuses an engine made with others.
    """
    contract = contract_on_gpu(root, weights, precision)
    wanted = engine_artifact.of_contract(contract, arch)
    name = wanted.identity.id
    for package, version in wanted.identity.versions.items():
        if version == engine_artifact.NONE:
            say(f"{package} is not installed here: a server that has it will not take this engine")
    made = not (home(root, "engine") / name).exists()
    if made:
        say(f"compiling {counted(len(wanted.builds), 'module')} for {arch}")
        engine_artifact.build(root, wanted, made_by(), available_cores())
    directory = home(root, "engine") / name
    if as_json:
        print_json({"engine": name, "contract": contract.id, "arch": arch, "modules": len(wanted.builds), "made": made})
    else:
        typer.echo(f"{directory}: {len(wanted.builds)} modules" + ("" if made else ", there already"))


@app.command()
def show(name: Name, root: Root = Path(), as_json: JsonFlag = False) -> None:
    """Print what an engine was made for and with."""
    found = engine_artifact.read(_directory(root, name))
    if as_json:
        print_json(found)
        return
    print_table(("what", "value"), engine_artifact.shown(found))


@app.command()
def check(
    name: Name, root: Root = Path(), arch: Arch = "sm_90", weights: Weights = None, precision: Given = None
) -> None:
    """Check every byte of an engine, and that a server of this root, with what is installed here, would take it.

    Exit 1 with every difference where it would not.
    """
    directory = _directory(root, name)
    verify(directory, "engine")
    wanted = engine_artifact.of_contract(contract_on_gpu(root, weights, precision), arch)
    try:
        engine_artifact.check(engine_artifact.read(directory), wanted)
    except Rejected as error:
        for one in (error, *error.others):
            typer.echo(f"engines/{name}/{one.location}: {one.message}")
        raise typer.Exit(1) from error
    typer.echo(f"engines/{name}: as it is needed here")


def _directory(root: Path, name: str) -> Path:
    """Of an engine that is there. Raises Rejected."""
    found = next((one for one in versions(root, "engine") if one.version == name), None)
    if found is None:
        raise Rejected("no_such_version", f"engine {name!r} is not there", location="engines/")
    return found.directory
