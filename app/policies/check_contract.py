"""A resolved policy against the deployment: widths, sizes, what the catalogue can fill."""

from __future__ import annotations

from app.core import Contract, Level
from app.errors import counted
from app.policies.check_types import constant
from app.policies.diagnostics import Findings
from app.policies.expr import Compare, Expr, Logic, Name, Not
from app.policies.facts import Catalogue as Catalogue  # noqa: PLC0414  who checks a contract names its catalogue
from app.policies.read import Content, Widths
from app.policies.resolve import Policy

KEY_SPACE = 2**32
"""Candidates of a step are numbered order * C + code in 32 bits."""


def check_contract(policy: Policy, contract: Contract, catalogue: Catalogue | None, found: Findings) -> None:
    """K and W findings that need the contract."""
    _check_widths(policy.widths, contract, found)
    for given in policy.load.values():
        _check_widths(given, contract, found)
    if not found.errors:
        by_level = widths_by_level(policy, contract)
        for level, widths in by_level.items():
            own = policy.load.get(level)
            _check_fill(policy, widths, own or policy.widths, contract, catalogue, found)
            if own is not None and widths == by_level["normal"]:
                found.add("W002", own.span, f"load {level} has the widths of the policy itself", "remove it")
    for t, step in enumerate(policy.steps, 1):
        mask = step["mask"]
        if mask.span is not None and not mask.broken and truth_of(mask.value, t) is False:
            found.add("W001", mask.span, f"the mask of step {t} allows nothing", "no request would get an item")


def widths_of(policy: Policy, contract: Contract) -> tuple[int, ...]:
    """K_1..K_L: the policy's own, else the contract's."""
    if policy.widths is None:
        return contract.widths
    return tuple(one.value for one in policy.widths.value)


def widths_by_level(policy: Policy, contract: Contract) -> dict[Level, tuple[int, ...]]:
    """K_1..K_L at `normal`, and at each load level that has its own."""
    own = {level: tuple(one.value for one in given.value) for level, given in policy.load.items()}
    return {"normal": widths_of(policy, contract), **own}


def planned(widths: tuple[int, ...], sizes: tuple[int, ...], prefixes: tuple[int | None, ...]) -> tuple[int, ...]:
    """Rows after each step: min(K_t, rows before * C_t, prefixes of that depth where the trie is the mask)."""
    rows, out = 1, []
    for width, codes, known in zip(widths, sizes, prefixes, strict=True):
        rows = min(width, rows * codes, known if known is not None else width)
        out.append(rows)
    return tuple(out)


def _check_widths(given: Widths | None, contract: Contract, found: Findings) -> None:
    if given is None:
        return
    if len(given.value) != len(contract.steps):
        many = f"{counted(len(given.value), 'width')} for {counted(len(contract.steps), 'step')}"
        found.add("K002", given.span, many, f"contract {contract.id} has {counted(len(contract.steps), 'step')}")
        return
    for step, one in zip(contract.steps, given.value, strict=True):
        if one.value > step.width:
            message = f"width {one.value} at step {step.t} is above the contract limit {step.width}"
            hint = f"contract {contract.id} was compiled for widths up to {list(contract.widths)}"
            found.add("K003", one.span, message, hint)


def _check_fill(
    policy: Policy,
    widths: tuple[int, ...],
    given: Widths | None,
    contract: Contract,
    catalogue: Catalogue | None,
    found: Findings,
) -> None:
    """K004 and K013: what a step can hold, and whether its candidates can be numbered. given: where they stand."""
    sizes = contract.sizes
    known = trie_prefixes(policy, catalogue)
    rows = planned(widths, sizes, known)
    for t, (width, held, before, codes) in enumerate(zip(widths, rows, (1, *rows), sizes, strict=False), 1):
        span = given.value[t - 1].span if given else None
        if before * codes >= KEY_SPACE:
            message = f"step {t} has {before} x {codes} candidates, more than 32 bits can number"
            place = span or next(iter(policy.steps[t - 1].values())).span
            if place is not None:
                found.add("K013", place, message, "use a smaller width at the step before")
        if span is not None and width > held:
            why = (
                f"{before} x {codes} candidates"
                if held == before * codes
                else f"{known[t - 1]} prefixes in the catalogue"
            )
            found.add("K004", span, f"width {width} of step {t} is above what the step can hold, {held} ({why})")


def trie_prefixes(policy: Policy, catalogue: Catalogue | None) -> tuple[int | None, ...]:
    """Prefixes of each depth that bound a step: the catalogue's where every step so far is confined to it."""
    known: list[int | None] = []
    confined = catalogue is not None
    for t, step in enumerate(policy.steps, 1):
        mask = step["mask"].value
        confined = confined and isinstance(mask, Expr) and "trie" in conjuncts(mask)
        known.append(catalogue.prefixes[t - 1] if confined and catalogue is not None else None)
    return tuple(known)


def conjuncts(node: Expr) -> frozenset[str]:
    """Plain names that must hold for the condition to hold."""
    if isinstance(node, Name):
        return frozenset({node.name})
    if isinstance(node, Logic) and node.op == "and":
        return frozenset().union(*(conjuncts(item) for item in node.items))
    return frozenset()


def truth_of(value: Content, step: int) -> bool | None:
    """`truth` of what a phase holds."""
    return truth(value, step) if isinstance(value, Expr) else None


def truth(node: Expr, step: int) -> bool | None:
    """Whether a condition is always true or always false at a step; None where it depends on more."""
    match node:
        case Not(value=value):
            inner = truth(value, step)
            return None if inner is None else not inner
        case Logic(op=op, items=items):
            return _joined(op, items, step)
        case Compare(op=op, left=left, right=right):
            a, b = _known(left, step), _known(right, step)
            return None if a is None or b is None else COMPARE[op](a, b)
    return None


def _joined(op: str, items: tuple[Expr, ...], step: int) -> bool | None:
    """`and` is false when a part is false or two parts contradict each other; `or` the other way round."""
    values = [truth(item, step) for item in items]
    against = op == "or"
    plain = {item for item in items if not isinstance(item, Not)}
    names = {item.name for item in plain if isinstance(item, Name)}
    negated = {item.value.name for item in items if isinstance(item, Not) and isinstance(item.value, Name)}
    if against in values or names & negated:
        return against
    return (not against) if all(value is not None for value in values) else None


def _known(node: Expr, step: int) -> float | None:
    return float(step) if isinstance(node, Name) and node.name == "step" else constant(node)


COMPARE = {
    "<": lambda a, b: bool(a < b),
    "<=": lambda a, b: bool(a <= b),
    ">": lambda a, b: bool(a > b),
    ">=": lambda a, b: bool(a >= b),
    "==": lambda a, b: bool(a == b),
    "!=": lambda a, b: bool(a != b),
}
