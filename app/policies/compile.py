"""Text to plan, in passes that read top down."""

from __future__ import annotations

from app.core import Contract, StepShape
from app.errors import Fault
from app.policies.check_contract import Catalogue, check_contract, conjuncts, widths_of
from app.policies.check_types import bind, check_types, constant, dependence, names_in
from app.policies.diagnostics import Findings
from app.policies.expr import Expr, Name, Operation
from app.policies.identity import params_in, plan_id, policy_id, resolved_data, structure_id
from app.policies.lower import Parts, Scope, lower_condition, lower_number, program
from app.policies.names import Dependence
from app.policies.operators import OPERATORS
from app.policies.plan import Normalize, Plan, StepProgram, Structure
from app.policies.resolve import Library, Policy, Resolved, resolve
from app.policies.source import Sources

_NORMALIZE: dict[str, Normalize] = {"full": "full", "step": "step", "valid": "valid", "none": "none"}


def compile_policy(
    name: str, sources: Sources | Library, contract: Contract, catalogue: Catalogue | None = None
) -> tuple[Plan | None, Findings]:
    """Text to plan. Never raises for bad text; every fault of the file is found in one run, sorted by position.

    No plan comes of a policy with errors, nor of an abstract one. Pass one `Library` for many policies of a folder:
    it reads every file once.
    """
    policy, found = check_policy(name, sources, contract, catalogue)
    if found.errors or policy.abstract:
        return None, found
    return lower(policy, contract), found


def check_policy(
    name: str, sources: Sources | Library, contract: Contract, catalogue: Catalogue | None = None
) -> tuple[Policy, Findings]:
    """The resolved policy and everything that is wrong with it."""
    library = sources if isinstance(sources, Library) else Library(sources)
    found = library.findings()
    policy = resolve(name, library, len(contract.steps), found)
    check_types(policy, found)
    check_contract(policy, contract, catalogue, found)
    return policy, found


def lower(policy: Policy, contract: Contract) -> Plan:
    """A checked policy as a plan."""
    resolved = resolved_data(policy)
    params = params_in([step[word].value for step in policy.steps for word in step])
    steps = tuple(_step(policy, step, params) for step in contract.steps)
    structure = Structure(structure_id(resolved, [step.precut for step in steps]), params, steps)
    widths = widths_of(policy, contract)
    limit = policy.final["limit"].value
    return Plan(
        policy=policy.name,
        policy_id=policy_id(resolved),
        plan_id=plan_id(structure.id, contract.id),
        structure=structure,
        widths=widths,
        params=tuple(policy.params[one].value for one in params),
        limit=limit if isinstance(limit, int) else widths[-1],
        per_sid=_per_sid(policy.final["expand"]),
        resolved=resolved,
        underfill="error" if policy.underfill == "error" else "allow",
    )


def _step(policy: Policy, shape: StepShape, params: tuple[str, ...]) -> StepProgram:
    """One step: `trie` as a conjunct of the mask makes the trie's children the candidates."""
    phases = policy.steps[shape.t - 1]
    mask, score, rank = (_expr(phases[word]) for word in ("mask", "score", "rank"))
    children = mask is not None and "trie" in conjuncts(mask)
    constants = {"step": float(shape.t), "vocab": float(shape.codes)}
    scope = Scope(
        constants, {name: at for at, name in enumerate(params)}, frozenset({"trie"}) if children else frozenset()
    )
    if score is None or rank is None:
        raise Fault("a step without score or rank passed the checks")
    same = isinstance(rank, Name) and rank.name == "score"
    normalize = _NORMALIZE[str(phases["normalize"].value)]
    parts = Parts(
        children=children,
        normalize=normalize,
        mask=True if mask is None else lower_condition(mask, scope),
        score=lower_number(score, scope),
        rank=None if same else lower_number(rank, scope),
    )
    uses = frozenset().union(*(names_in(one) for one in (mask, score, rank) if one is not None)) & {"trie", "seen"}
    return StepProgram(
        children=children,
        uses=uses - {"trie"} if children else uses,
        normalize=normalize,
        precut=_PRECUT[dependence(rank, "rank", policy.params, dependence(score, "score", policy.params))],
        run=program(parts),
    )


_PRECUT: dict[Dependence, str] = {"": "R", "r": "R", "L": "L", "c": "E"}


def _expr(resolved: Resolved) -> Expr | None:
    value = resolved.value
    return value if isinstance(value, Expr) else None


def _per_sid(expand: Resolved) -> int:
    operation = expand.value
    if not isinstance(operation, Operation):
        raise Fault("`expand` without an operator passed the checks")
    bound, _ = bind(OPERATORS[operation.op], operation)
    value = constant(bound["max_items"].value) if "max_items" in bound else OPERATORS[operation.op].args[0].default
    return int(value or 1)
