"""A step of a checked policy -> its lowered phases."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from app.core import StepShape
from app.errors import Fault
from app.policies.builtin import BUILT_IN
from app.policies.check_contract import conjuncts
from app.policies.check_types import bind, bounds, constant, dependence
from app.policies.expr import Argument, Binary, Expr, Field, Name, OneOf, Operation, show, walk
from app.policies.expr import Compare as Comparison
from app.policies.facts import Facts
from app.policies.generate import KEEPS, SELECTS, generate
from app.policies.generated import Generated
from app.policies.groups import group_of, keys_of
from app.policies.lower import Scope, lower_condition, lower_number
from app.policies.names import Dependence
from app.policies.operators import Operator, Operators
from app.policies.plan import Normalize, StepProgram
from app.policies.program import LEAVE_A_HEAD, Applied, Limit, Parts, Select, cuts, legality, program, pruning
from app.policies.resolve import Policy, Resolved

_NORMALIZE: dict[str, Normalize] = {"full": "full", "step": "step", "valid": "valid", "none": "none"}
_PRECUT: dict[Dependence, str] = {"": "R", "r": "R", "L": "L", "c": "E"}
NOISE = frozenset({"gumbel", "uniform"})
"""Names that are drawn anew for each request."""


def lower_step(
    policy: Policy, shape: StepShape, sizes: tuple[int, ...], facts: Facts, params: tuple[str, ...]
) -> StepProgram:
    """One step: `trie` as a conjunct of the mask makes the trie's children the candidates."""
    phases = policy.steps[shape.t - 1]
    mask, score, rank, logits = (expression(phases[word]) for word in ("mask", "score", "rank", "logits"))
    if score is None or rank is None or logits is None:
        raise Fault("a step without score, rank or logits passed the checks")
    children = mask is not None and "trie" in conjuncts(mask)
    constants = {"step": float(shape.t), "vocab": float(shape.codes)}
    scope = Scope(constants, facts, frozenset({"trie"}) if children else frozenset())
    quota = operations(phases["quota"])
    groups = [_given(one, "group") for one in quota]
    select = _select(phases["select"], scope)
    nodes = [one for one in (logits, mask, score, rank) if one is not None]
    names = frozenset(part.name for node in nodes for part in walk(node) if isinstance(part, Name))
    extra = frozenset().union(*(extra_in(node) for node in nodes), *(keys_of(node) for node in groups)) - {"prefix"}
    parts = Parts(
        step=shape.t,
        params=params,
        children=children,
        logits=None if show(logits) == "logit" else lower_number(logits, scope),
        normalize=_NORMALIZE[str(phases["normalize"].value)],
        mask=True if mask is None else lower_condition(mask, scope),
        keep=_applied(phases["keep"], policy.operators, scope),
        score=lower_number(score, scope),
        rank=None if show(rank) == "score" else lower_number(rank, scope),
        prune=_applied(phases["prune"], policy.operators, scope),
        caps=_limits(quota, "cap", shape.t, sizes, facts),
        floors=_limits(quota, "floor", shape.t, sizes, facts),
        select=select,
        names=names,
        extra=extra,
    )
    precut = _precut(rank, dependence(score, "score", policy.params, facts), policy, facts)
    follows = _follows_logits(parts, show(score), precut)
    own = "" if follows else _generated(parts, phases, scope)
    return StepProgram(
        children=children,
        uses=_uses(parts, groups) - ({"trie"} if children else set()),
        normalize=parts.normalize,
        precut=_with_cuts(precut, (*parts.keep, *parts.prune)),
        run=program(parts),
        carries=select.carries,
        legal=legality(parts) if follows or isinstance(own, Generated) else None,
        masked=parts.mask is not True,
        cuts=cuts(parts),
        after=pruning(parts) if parts.prune and (follows or isinstance(own, Generated)) else None,
        generated=own if isinstance(own, Generated) else None,
        unfit=own if isinstance(own, str) else "",
    )


def _follows_logits(parts: Parts, score: str, precut: str) -> bool:
    """Whether the step takes the best K by parent + logp of the logits as they are."""
    more = parts.keep or not _heads(parts) or parts.caps or parts.floors or parts.select.name != "top"
    plain = parts.logits is None and parts.rank is None and score in ("parent + logp", "logp + parent")
    return plain and not more and precut in ("R", "L")


def _heads(parts: Parts) -> bool:
    """Whether prune leaves a head of each request's order by score, so that the best K may be taken first."""
    return not parts.prune or (parts.rank is None and all(one.operator.name in LEAVE_A_HEAD for one in parts.prune))


def _generated(parts: Parts, phases: Mapping[str, Resolved], scope: Scope) -> Generated | str:
    """The step as the kernels compute it, or why they cannot."""
    keep = operations(phases["keep"])
    operators = {"prune": not _heads(parts), "quota": parts.caps or parts.floors}
    more = [word for word, given in operators.items() if given]
    more = [one.op for one in keep if one.op not in KEEPS] + more
    if parts.select.name not in SELECTS:
        more.append(parts.select.name)
    if more:
        return f"{' and '.join(more)} {'work' if len(more) > 1 else 'works'} on all ranks"
    logits, score, rank = (expression(phases[word]) for word in ("logits", "score", "rank"))
    assert score is not None, "checked"
    return generate(
        logits if parts.logits is not None else None,
        [(one.op, _only(one)) for one in keep],
        score,
        rank if parts.rank is not None else None,
        scope,
        normalized=parts.normalize != "none",
        stochastic=parts.select.name == "stochastic",
    )


def _with_cuts(rank: str, cuts: tuple[Applied, ...]) -> str:
    """The class of a step: that of its rank, or of the operators that cut."""
    if rank == "E" or any(one.operator.precut == "E" for one in cuts):
        return "E"
    return "M" if cuts else rank


def _uses(parts: Parts, groups: list[Expr]) -> frozenset[str]:
    uses = parts.extra | (parts.names & {"trie", "seen"})
    noisy = bool(parts.names & NOISE) or parts.select.name in ("stochastic", "explore")
    if noisy:
        uses |= {"seed", "prefix"}
    if any("prefix" in keys_of(node) for node in groups):
        uses |= {"prefix"}
    if parts.select.carries:
        uses |= {"carry"}
    if parts.prune or groups or parts.select.carries:
        uses |= {"request"}
    return uses


def extra_in(node: Expr) -> frozenset[str]:
    """Columns of `extra` that an expression reads; a condition on `ctx` counts as one, by its text."""
    found: set[str] = set()
    for part in walk(node):
        if isinstance(part, OneOf | Comparison) and isinstance(part.left, Field) and part.left.space == "ctx":
            found.add(show(part))
        elif isinstance(part, Field) and part.space not in ("param", "ctx"):
            found.add(f"{part.space}.{part.name}")
    return frozenset(found)


def expression(resolved: Resolved) -> Expr | None:
    """The expression of a phase, None where there is none."""
    return resolved.value if isinstance(resolved.value, Expr) else None


def operations(resolved: Resolved) -> tuple[Operation, ...]:
    """The operators of a phase."""
    if isinstance(resolved.value, Operation):
        return (resolved.value,)
    return resolved.value if isinstance(resolved.value, tuple) else ()


def argument(operation: Operation, name: str) -> float:
    """A constant argument of a built-in operator, or its default."""
    given = _bound(operation).get(name)
    if given is not None:
        return constant(given.value) or 0.0
    default = next(arg.default for arg in BUILT_IN[operation.op].args if arg.name == name)
    return float(default or 0)


def _bound(operation: Operation) -> dict[str, Argument]:
    return bind(BUILT_IN[operation.op], operation)[0]


def _only(operation: Operation) -> Expr:
    """The argument of a built-in operator that takes one."""
    [given] = _bound(operation).values()
    return given.value


def _given(operation: Operation, name: str) -> Expr:
    return _bound(operation)[name].value


def _applied(resolved: Resolved, operators: Operators, scope: Scope) -> tuple[Applied, ...]:
    """The operators of an open phase with their arguments, in the order of their declarations."""
    return tuple(_one(operators[call.op], call, scope) for call in operations(resolved))


def _one(operator: Operator, call: Operation, scope: Scope) -> Applied:
    given = bind(operator, call)[0]
    values = (
        lower_number(given[arg.name].value, scope) if arg.name in given else np.float32(arg.default or 0)
        for arg in operator.args
    )
    return Applied(operator, tuple(values))


def _limits(
    given: tuple[Operation, ...], op: str, step: int, sizes: tuple[int, ...], facts: Facts
) -> tuple[Limit, ...]:
    word = "max" if op == "cap" else "min"
    return tuple(
        Limit(group_of(_given(one, "group"), step, sizes, facts), int(argument(one, word)))
        for one in given
        if one.op == op
    )


def _select(resolved: Resolved, scope: Scope) -> Select:
    [operation] = operations(resolved)
    if operation.op == "diverse":
        penalty = lower_number(_given(operation, "penalty"), scope)
        return Select("diverse", groups=int(argument(operation, "groups")), penalty=penalty)
    if operation.op == "explore":
        return Select("explore", share=argument(operation, "share"))
    return Select(operation.op)


def _precut(rank: Expr, score: Dependence, policy: Policy, facts: Facts) -> str:
    """The class of the rank; a penalty by the place among siblings keeps the order of a row that follows the score."""
    own = _PRECUT[dependence(rank, "rank", policy.params, facts, score)]
    match rank:
        case Binary(op="-", left=left, right=Binary(op="*", left=weight, right=Name(name="sibling"))):
            keeps = bounds(weight, policy.params)[0] >= 0
        case Binary(op="-", left=left, right=Name(name="sibling")):
            keeps = True
        case _:
            return own
    inner = dependence(left, "rank", policy.params, facts, score)
    return "M" if keeps and inner in ("L",) and score == "L" else own
