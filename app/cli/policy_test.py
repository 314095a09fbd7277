"""`widebeam policy test`: the tests that live beside the policies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from app.cli.compose import Overrides
from app.cli.output import JsonFlag, print_json, say
from app.cli.policy_diff import Root
from app.cli.policy_files import Deployed, deployed
from app.core import Request
from app.errors import InvalidRequest, NotReady, Rejected, counted
from app.policies.cases import FOLDER, Case, RequestCase, StepCase, read_cases
from app.policies.diagnostics import Diagnostic, Findings, render
from app.policies.facts import facts_of
from app.policies.load import PolicySet
from app.policies.plan import Plan
from app.policies.source import Source
from app.policies.testing import failure, run_case
from app.runtime.loader import load_root
from app.runtime.logs import make_log
from app.runtime.recorded import read_records
from app.runtime.trial import Trial


class _Result(NamedTuple):
    """One test. unchecked: steps whose selection was too large for the reference."""

    case: Case
    failures: tuple[Diagnostic, ...]
    unchecked: tuple[int, ...] = ()


def test_command(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder of policies with tests/; ROOT/policies by default")
    ] = None,
    root: Root = Path(),
    as_json: JsonFlag = False,
) -> None:
    """Run the tests of a folder of policies. Exit 0 all pass, 1 one fails, 2 there are none."""
    on = deployed(root)
    folder = folder or root / "policies"
    files = sorted((folder / FOLDER).glob("*.yaml"))
    if not files:
        raise typer.BadParameter(f"there are no tests in {folder / FOLDER}")
    runner = _Runner(on, on.folder(folder))
    results, findings = list[_Result](), list[Diagnostic]()
    for file in files:
        done, found = runner.file(file)
        results += done
        findings += found
    _show(results, findings, runner.untested(results), as_json)
    failed = any(one.failures for one in results) or any(one.rule.severity == "error" for one in findings)
    raise typer.Exit(1 if failed else 0)


class _Runner:
    """Runs files of tests; the model is loaded when the first test asks a request."""

    def __init__(self, on: Deployed, policies: PolicySet) -> None:
        self._on, self._policies = on, policies
        self._trial: Trial | None = None

    def file(self, file: Path) -> tuple[list[_Result], list[Diagnostic]]:
        source = Source(file.as_posix(), file.read_bytes())
        lines = source.lines()
        found = Findings(lambda _: lines)
        cases = read_cases(source, found)
        return [self._run(case, file, lines) for case in cases], list(found)

    def untested(self, results: Sequence[_Result]) -> list[str]:
        """Policies that serve and that no test is about."""
        tested = {one.case.policy.value for one in results}
        return [plan.policy for plan in self._policies.plans() if plan.policy not in tested]

    def _run(self, case: Case, file: Path, lines: Sequence[str]) -> _Result:
        plan = self._policies.plan(case.policy.value)
        if plan is None:
            known = self._policies.policies.get(case.policy.value)
            why = "there is no policy" if known is None else "is abstract:" if known.abstract else "has errors:"
            message = f"{case.name}: {why} `{case.policy.value}`"
            return _Result(case, (failure(case.policy.span, message, "see `widebeam policy check`", lines),))
        if isinstance(case, StepCase):
            facts = facts_of(self._on.contract, self._on.catalogue)
            return _Result(case, run_case(case, plan, self._on.contract, facts, lines).failures)
        try:
            problems, unchecked = self._asked().problems(case, _request(case, file, plan))
        except (InvalidRequest, Rejected) as error:
            place = case.record.span if case.record else case.span
            return _Result(case, (failure(place, f"{case.name}: {error}", "", lines),))
        wrong = tuple(failure(span, f"{case.name}: {message}", hint, lines) for span, message, hint in problems)
        return _Result(case, wrong, unchecked)

    def _asked(self) -> Trial:
        if self._trial is None:
            deployment = Overrides(offline=True).apply(self._on.deployment)
            log = make_log(sys.stderr.buffer, "warning")
            loaded = load_root(self._on.root, deployment, log, operators=self._on.operators)
            if loaded.snapshot is None:
                raise NotReady("; ".join(str(reason) for reason in loaded.reasons))
            self._trial = Trial(loaded.snapshot.having(policies=self._policies), deployment)
        return self._trial


def _request(case: RequestCase, file: Path, plan: Plan) -> Request:
    """The request of a case. Raises Rejected where a record is not there."""
    if case.record is not None:
        name, _, wanted = case.record.value.partition("#")
        for one in read_records(file.parent / name):
            if one.request.request_id == wanted:
                return replace(one.request, policy=plan.policy, load=case.load or one.request.load)
        raise Rejected("no_record", f"{name} has no request {wanted}")
    asked = case.asked
    assert asked is not None
    return Request(
        request_id=case.name,
        context=asked.context,
        k=asked.k,
        policy=plan.policy,
        exclude=asked.exclude,
        ctx=asked.ctx,
        user=asked.user,
        seed=asked.seed,
        load=case.load,
    )


def _show(results: Sequence[_Result], findings: Sequence[Diagnostic], untested: Sequence[str], as_json: bool) -> None:
    failures = [one for result in results for one in result.failures]
    if as_json:
        tests = [
            {
                "test": one.case.name,
                "file": one.case.span.file,
                "line": one.case.span.line,
                "policy": one.case.policy.value,
                "ok": not one.failures,
                "reference_skipped_steps": list(one.unchecked),
            }
            for one in results
        ]
        diagnostics = [one.data() for one in (*findings, *failures)]
        print_json({"tests": tests, "diagnostics": diagnostics, "untested": list(untested)})
    elif findings or failures:
        typer.echo(render([*findings, *failures]))
    skipped = sum(bool(one.unchecked) for one in results)
    failed = sum(bool(one.failures) for one in results)
    say(f"{counted(len(results), 'test')}, {failed} failed")
    if skipped:
        say(f"{skipped} with steps that are too large for the reference to select in; their scores were compared")
    if untested:
        say(f"policies without a test: {', '.join(untested)}")
