"""`widebeam contract`: make, show and check the contract of a deployment root."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from app.cli.deployment import read_deployment
from app.cli.groups import group
from app.cli.output import JsonFlag, print_json, print_table, say, tally
from app.config import Precision
from app.core import Contract
from app.engine.registry import family
from app.errors import BadDeployment, Rejected, counted
from app.policies.plugins import installed
from app.runtime.contracts import Contracts, Made
from app.runtime.desired import wishes
from app.runtime.gate import Finding, Report, examine
from app.runtime.loader import contract_dtype
from app.runtime.reading import model_files
from app.vocab.manifest import versions

app = group("Make, show and check the contract.")

Root = Annotated[Path, typer.Option(help="Deployment root")]
Weights = Annotated[str | None, typer.Option(help="This version instead of the one that a start would take")]

SHOWN: Final = ("batch", "rows", "context", "k", "queue", "rollback")
"""The limits that are one number each; the widths are the steps'."""
Given = Annotated[Precision | None, typer.Option(help="Instead of deployment.toml's")]


@app.command()
def generate(
    root: Root = Path(),
    weights: Weights = None,
    precision: Given = None,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Write nothing; exit 1 where the stored contract is not this one")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Export the model's functions and write ROOT/contracts/<id>.json. Takes seconds, needs no GPU, reads no tensor."""
    made = _made(root, weights, precision, anew=True, store=not check_only)
    stale = check_only and made.file is None
    if as_json:
        found = [{"code": one.code, "message": one.message, "location": one.location} for one in made.found]
        file = str(made.file) if made.file else None
        print_json({"contract": made.contract.id, "file": file, "functions": _summary(made), "findings": found})
    else:
        typer.echo(made.contract.id)
        for one in made.found:
            say(f"{one.location}: error {one.code}: {one.message}")
        for name, state in _summary(made).items():
            say(f"{name}: {state}")
        say("no such file is stored" if made.file is None else f"{made.file}")
    raise typer.Exit(1 if stale or (check_only and made.found) else 0)


@app.command()
def show(root: Root = Path(), weights: Weights = None, precision: Given = None, as_json: JsonFlag = False) -> None:
    """Say what the contract of a root is; --json prints the whole document. It is made, and stored, where there is none
    yet."""
    made = _made(root, weights, precision)
    if as_json:
        print_json(made.document)
    else:
        print_table(("part", "value"), _parts(made))


@app.command()
def check(
    root: Root = Path(),
    weights: Weights = None,
    vocab: Annotated[str | None, typer.Option(help="As --weights, of the vocab")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check weights, vocab, take-downs, policies and experiments against the contract and against each other.

    One report with every finding. Exit 0: nothing but warnings and notes, 1: errors.
    """
    try:
        report = examine(root, read_deployment(root), weights=weights, vocab=vocab, operators=installed())
    except BadDeployment as error:
        place = error.path or error.file
        report = Report(None, None, None, (Finding("error", error.code, place, error.message),))
    if as_json:
        print_json({**report._asdict(), "findings": [one._asdict() for one in report.findings]})
    else:
        for one in report.findings:
            typer.echo(f"{one.place}: {one.severity} {one.code}: {one.message}")
        say(f"contract {report.contract or 'none'}, weights {report.weights or 'none'}, vocab {report.vocab or 'none'}")
        say(tally(one.severity for one in report.findings))
    raise typer.Exit(1 if report.errors else 0)


def contract_on_gpu(root: Path, weights: str | None, precision: Precision | None) -> Contract:
    """The contract that a server of a root has on a GPU, wherever this runs. Raises Rejected, BadDeployment."""
    return _made(root, weights, precision, on_gpu=True).contract


def _made(
    root: Path, weights: str | None, precision: Precision | None, *, anew: bool = False, store: bool = True,
    on_gpu: bool = False,
) -> Made:  # fmt: skip
    deployment = read_deployment(root)
    if on_gpu:
        deployment = msgspec.structs.replace(deployment, device="cuda")
    if weights is None:
        chosen = wishes(root, root / deployment.server.state_dir, "weights").found
    else:
        chosen = tuple(one for one in versions(root, "weights") if one.version == weights)
    if not chosen:
        message = "there is no complete version" if weights is None else f"weights {weights!r} is not there"
        raise Rejected("no_weights", message, location="weights/")
    dtype = contract_dtype(deployment, precision)
    files = model_files(chosen[0].directory)
    return Contracts(root).make(family(deployment.family), files, deployment, dtype, anew=anew, store=store)


def _parts(made: Made) -> list[tuple[str, str]]:
    """What a person asks of a contract first."""
    contract, planned, bindings = made.contract, made.document["workspace"], made.document["weights"]
    assert isinstance(planned, dict)
    assert isinstance(bindings, list)
    tensors = f"{counted(len(bindings), 'parameter')} bound to {counted(len(contract.weights), 'tensor')}"
    return [
        ("contract", contract.id),
        ("stored", str(made.file) if made.file else "no"),
        ("family", contract.family),
        ("precision", contract.precision),
        *((f"step {one.t}", f"{counted(one.codes, 'code')}, beams up to {one.width}") for one in contract.steps),
        *((f"limits.{name}", f"{getattr(contract.limits, name):,}") for name in SHOWN),
        *((f"function {name}", state) for name, state in _summary(made).items()),
        ("weights", tensors),
        *((f"workspace.{name}", "not known" if value is None else f"{value:,}") for name, value in planned.items()),
    ]


def _summary(made: Made) -> dict[str, str]:
    return {one.name: "exported" if one.exported else f"not exported: {one.reason}" for one in made.functions}
