"""`widebeam policy`: check, explain, show, format policies; the schema and the pages of codes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import app as package
from app.cli import policy_files
from app.cli.groups import group
from app.cli.output import JsonFlag, print_json, say, tally
from app.cli.policy_diff import diff
from app.cli.policy_files import Deployed, deployed
from app.cli.policy_plan import plan as plan_command
from app.cli.policy_replay import replay_command
from app.cli.policy_test import test_command
from app.policies.compile import check_policy, lower
from app.policies.diagnostics import Diagnostic, listing, render, suggest
from app.policies.explain import explain as explained
from app.policies.explain import explain_text
from app.policies.facts import Facts
from app.policies.format import fmt as formatted
from app.policies.load import Folder, compile_folder, snapshot
from app.policies.operator_pages import describe, overview
from app.policies.plan import Plan
from app.policies.plugins import installed
from app.policies.resolve import Library, Policy
from app.policies.rules import RULES
from app.policies.schema import schema as policy_schema
from app.policies.source import Source
from app.policies.words import meanings, words

app = group("Check and explain selection policies.")

Root = Annotated[Path, typer.Option(help="Deployment root that gives the contract")]
PAGES = Path(package.__file__).parent.parent / "docs" / "policies" / "codes"


@app.command()
def check(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Policy files or folders; ROOT/policies by default")
    ] = None,
    root: Root = Path(),
    as_json: JsonFlag = False,
) -> None:
    """Check policy files. Exit 0 all good, 1 errors found, 2 wrong usage. Warnings alone exit 0.

    All of them on the contract of ROOT: policies of several roots are checked by a call for each.
    """
    on = deployed(root)
    findings: list[Diagnostic] = []
    checked: list[str] = []
    for path in paths or [root / "policies"]:
        folder, names = _folder(path)
        if path.is_dir() and not names and folder.traffic is None and not folder.refused:
            raise typer.BadParameter(f"{path} holds no policy files; a root's own are checked by --root {path}")
        loaded = compile_folder(folder, on.contract, on.catalogue, cache=on.cache())
        checked.append(f"{path}: {', '.join(sorted(names)) or 'traffic'}, on the contract of {root}")
        for name in names:
            findings += [one for one in loaded.policies[name].findings if one not in findings]
        if path.is_dir() or path.name == "traffic.yaml":
            findings += loaded.findings
        elif not names:
            own = [one for one in loaded.findings if one.span.file.endswith(f"/{path.name}")]
            if not own:
                raise typer.BadParameter(f"{path} is no policy file: those are called NAME.yaml")
            findings += own
    if as_json:
        print_json([one.data() for one in findings])
    elif findings:
        typer.echo(render(findings))
    if len(checked) > 1:
        say("\n".join(checked))
    say(tally(one.rule.severity for one in findings))
    raise typer.Exit(1 if any(one.rule.severity == "error" for one in findings) else 0)


@app.command()
def explain(
    policy: Annotated[str, typer.Argument(help="Name of a policy of ROOT, or a policy file")],
    root: Root = Path(),
    as_json: JsonFlag = False,
) -> None:
    """Print what a policy does at each step, and where each value came from."""
    on = deployed(root)
    resolved, plan = _plan(policy, on)
    if as_json:
        print_json(explained(resolved, plan, on.contract, on.catalogue))
    else:
        typer.echo(explain_text(resolved, plan, on.contract, on.catalogue))


@app.command()
def show(
    policy: Annotated[str, typer.Argument(help="Name of a policy of ROOT, a policy file, or an id that has served")],
    root: Root = Path(),
    out: Annotated[Path | None, typer.Option(help="Write its file, and its parents', into this folder")] = None,
) -> None:
    """Print the resolved policy and its ids as JSON."""
    on = deployed(root)
    if out is not None or policy_files.POLICY_ID.fullmatch(policy):
        plan = on.policy(policy)
        if out is not None:
            policy_files.write(*on.texts(policy), out)
    else:
        _, plan = _plan(policy, on)
    ids = {
        "policy": plan.policy,
        "policy_id": plan.policy_id,
        "structure_id": plan.structure.id,
        "plan_id": plan.plan_id,
    }
    print_json({**ids, "resolved": plan.resolved})


@app.command()
def schema(
    root: Annotated[
        Path | None, typer.Option(help="Deployment root whose declared names go into the hover text")
    ] = None,
) -> None:
    """Print the JSON Schema of policy files, for editors; operators of installed packages are in it."""
    print_json(policy_schema(installed(), None if root is None else deployed(root).facts))


@app.command("help")
def help_(
    word: Annotated[
        str | None,
        typer.Argument(
            help="A word of the language such as seen or rank, an operator such as top_p, a code such as K003, or a "
            "declared name, attr.x"
        ),
    ] = None,
    root: Root = Path(),
) -> None:
    """Print what a word of the language is, what an operator does, what a code means and how to mend it, or what a name
    of ROOT is (`attr.` is all of them); every operator and word where nothing is given."""
    operators = installed()
    if word is None:
        typer.echo(overview(operators))
        typer.echo(f"\nwords: {', '.join(sorted(words()))}")
        return
    if "." in word:
        typer.echo(_declared(word, deployed(root).facts))
        return
    found = [describe(operators[word])] if word in operators.known else []
    found += [*meanings(word), overview(operators, word)]
    if any(found):
        typer.echo("\n".join(filter(None, found)))
        return
    if word in operators.broken:
        raise typer.BadParameter(f"`{word}` cannot be used: {operators.broken[word]}")
    rule = RULES.get(word.upper())
    if rule is None:
        hint = suggest(word, [*operators.known, *words(), *RULES])
        hint = hint or "`widebeam policy help` lists operators and words; docs/policies/codes/ has the codes"
        raise typer.BadParameter(f"there is no word, operator or code {word}; {hint}")
    page = PAGES / f"{rule.code}.md"
    # an installed package has no docs beside it
    typer.echo(page.read_text("utf-8").rstrip() if page.is_file() else f"{rule.code} ({rule.severity}): {rule.title}")


@app.command()
def fmt(
    paths: Annotated[list[Path], typer.Argument(help="Policy files or folders", exists=True)],
    check_only: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 where a file would change")
    ] = False,
) -> None:
    """Give policy files their canonical spelling. Files that cannot be read are left alone and exit 1."""
    changed = unread = 0
    for path in [file for one in paths for file in (sorted(one.glob("*.yaml")) if one.is_dir() else [one])]:
        data = path.read_bytes()
        text = formatted(Source(str(path), data))
        if text is None:
            unread += 1
            say(f"{path}: cannot be read; see `widebeam policy check`")
        elif text.encode() != data:
            changed += 1
            say(f"{path}: {'would change' if check_only else 'formatted'}")
            if not check_only:
                path.write_bytes(text.encode())
    raise typer.Exit(1 if unread or (check_only and changed) else 0)


app.command("diff")(diff)
app.command("plan")(plan_command)
app.command("replay")(replay_command)
app.command("test")(test_command)


def _declared(word: str, facts: Facts) -> str:
    """What a deployment declares under a name, or under all names that begin so."""
    found = [
        f"{key}: {one.text}" for key, one in sorted(facts.items()) if key == word or word in (".", one.space + ".")
    ]
    if not found:
        raise typer.BadParameter(f"{word} is not declared; {suggest(word, facts) or listing(sorted(facts))}")
    return "\n".join(found)


def _folder(path: Path) -> tuple[Folder, list[str]]:
    """The policies beside a path, and which of them are meant."""
    if not path.exists():
        raise typer.BadParameter(f"{path} does not exist")
    directory = path if path.is_dir() else path.parent
    folder = snapshot(directory, shown=directory.as_posix())
    return folder, list(folder.sources) if path.is_dir() else [one for one in folder.sources if one == path.stem]


def _plan(policy: str, on: Deployed) -> tuple[Policy, Plan]:
    """A policy by name or file, compiled; its findings go to stderr, and errors end the command."""
    path = Path(policy) if policy.endswith(".yaml") else on.root / "policies" / f"{policy}.yaml"
    folder, names = _folder(path)
    if not names:
        raise typer.BadParameter(f"{policy} is no policy")
    resolved, found = check_policy(names[0], Library(folder.sources, on.operators), on.contract, on.catalogue)
    if len(found):
        say(found.text())
    if found.errors:
        raise typer.Exit(1)
    return resolved, lower(resolved, on.contract, on.catalogue)
