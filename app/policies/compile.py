"""Text to plan, in passes that read top down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from app.core import Contract
from app.errors import Fault
from app.policies.asks import asks_of
from app.policies.check_contract import check_contract, widths_by_level
from app.policies.check_operators import check_operators
from app.policies.check_types import check_types
from app.policies.diagnostics import Findings, Span
from app.policies.expr import Operation
from app.policies.facts import Catalogue, Facts, facts_of
from app.policies.final import expand_by, lower_final
from app.policies.identity import params_in, plan_id, policy_id, resolved_data, structure_id
from app.policies.lower_step import argument, lower_step
from app.policies.plan import Plan, Structure
from app.policies.resolve import Library, Policy, Resolved, resolve
from app.policies.selfcheck import self_check
from app.policies.source import Sources


def compile_policy(
    name: str,
    sources: Sources | Library,
    contract: Contract,
    catalogue: Catalogue | None = None,
    *,
    proven: set[str] | None = None,
    between: Callable[[], None] = lambda: None,
) -> tuple[Plan | None, Findings]:
    """Text to plan. Never raises for bad text; every fault of the file is found in one run, sorted by position.

    No plan comes of a policy with errors, nor of an abstract one. Pass one `Library` for many policies of a folder:
    it reads every file once; and one `proven` for many policies of one contract and catalogue: the ids of structures
    that need no proof any more, since policies that share one differ in parameters and widths only, which are data.
    between: called between pieces of work.
    """
    between()
    policy, found = check_policy(name, sources, contract, catalogue)
    if found.errors or policy.abstract:
        return None, found
    between()
    plan = lower(policy, contract, catalogue)
    if proven is None or plan.structure.id not in proven:
        prove(plan, policy, contract, catalogue, found, between)
        if found.errors:
            return None, found
        if proven is not None:
            proven.add(plan.structure.id)
    return plan, found


def prove(
    plan: Plan,
    policy: Policy,
    contract: Contract,
    catalogue: Catalogue | None,
    found: Findings,
    between: Callable[[], None],
) -> None:
    """C101: a plan that differs from the oracle is refused."""
    others = [f"`{one.name}` of {one.source}" for one in plan.plugins]
    try:
        wrong = self_check(plan, contract.sizes, facts_of(contract, catalogue), between)
    except Exception as error:  # whatever an operator of another package does
        if not others:
            raise
        wrong = f"it cannot be compared, {type(error).__name__}: {error}"
    if wrong is not None:
        hint = "this is a bug of Widebeam; report the file"
        if others:
            hint = f"try it without {' and '.join(others)}; if it differs still, this is a bug of Widebeam"
        place = Span(policy.file, 1, 1, 2)
        found.add("C101", place, f"the plan differs from the reference: {wrong}", hint)


def check_policy(
    name: str, sources: Sources | Library, contract: Contract, catalogue: Catalogue | None = None
) -> tuple[Policy, Findings]:
    """The resolved policy and everything that is wrong with it."""
    library = sources if isinstance(sources, Library) else Library(sources)
    found, facts = library.findings(), facts_of(contract, catalogue)
    policy = resolve(name, library, len(contract.steps), found)
    check_types(policy, facts, contract.id, found)
    check_contract(policy, contract, catalogue, found)
    if not found.errors:
        check_operators(policy, contract, catalogue, found)
    return policy, found


def lower(policy: Policy, contract: Contract, catalogue: Catalogue | None = None) -> Plan:
    """A checked policy as a plan."""
    resolved, facts = resolved_data(policy), facts_of(contract, catalogue)
    params = params_in([one.value for settings in (*policy.steps, policy.final) for one in settings.values()])
    steps = tuple(lower_step(policy, step, contract.sizes, facts, params) for step in contract.steps)
    structure = Structure(structure_id(resolved, params, [step.precut for step in steps]), params, steps)
    by_level = widths_by_level(policy, contract)
    widths = by_level.pop("normal")
    limit = _limit(policy, widths)
    plan = Plan(
        policy=policy.name,
        policy_id=policy_id(resolved),
        plan_id=plan_id(structure.id, contract.id),
        structure=structure,
        widths=widths,
        params=tuple(policy.params[one].value for one in params),
        limit=limit,
        per_sid=_per_sid(policy.final["expand"]),
        resolved=resolved,
        operators=policy.operators,
        underfill="error" if policy.underfill == "error" else "allow",
        final=lower_final(policy, limit, facts),
        by=expand_by(policy.final["expand"]),
        asks=asks_of(policy),
    )
    levels = {level: _at(plan, policy, one, facts) for level, one in by_level.items()}
    return replace(plan, levels=levels) if levels else plan


def _limit(policy: Policy, widths: tuple[int, ...]) -> int:
    given = policy.final["limit"].value
    return given if isinstance(given, int) else widths[-1]


def _at(plan: Plan, policy: Policy, widths: tuple[int, ...], facts: Facts) -> Plan:
    """The plan with the widths of a load level; nothing of its steps is compiled anew."""
    limit = _limit(policy, widths)
    return replace(plan, widths=widths, limit=limit, final=lower_final(policy, limit, facts))


def _per_sid(expand: Resolved) -> int:
    operation = expand.value
    if not isinstance(operation, Operation):
        raise Fault("`expand` without an operator passed the checks")
    return int(argument(operation, "max_items"))
