"""What expressions make of infinities and NaN, by kinds of numbers: facts that spare the selection kernels a look at
each candidate (`RANK_TELLS` and `RANK_MASKED` of `app/ops/selection/ranked.cuh`).

An expression is walked as `app/policies/generate.py` writes it, with sets of kinds in the place of numbers. A set holds
at least what may come out, so that what is found is true of all numbers; where a fact is not found it may hold, and the
kernels look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntFlag
from functools import reduce
from typing import NamedTuple

import numpy as np

from app.policies.check_types import constant
from app.policies.expr import Binary, Call, Compare, Expr, Field, Logic, Name, Negate, Not, Text
from app.policies.lower import MAX_PRODUCT, Scope, lower_condition, lower_number


class Kind(IntFlag):
    """A set of kinds of float32. ZERO is what may be flushed to it, subnormal numbers of both signs, too."""

    MINUS_INF = 1
    NEGATIVE = 2
    ZERO = 4
    POSITIVE = 8
    INF = 16
    NAN = 32


_FINITE = Kind.NEGATIVE | Kind.ZERO | Kind.POSITIVE
_ANY = _FINITE | Kind.MINUS_INF | Kind.INF | Kind.NAN
_ALIVE = _FINITE | Kind.INF
"""The score of a row whose candidates are looked at."""
_REFUSED = Kind.INF | Kind.NAN
"""A rank that the kernels see, and count."""
_ORDER = (Kind.MINUS_INF, Kind.NEGATIVE, Kind.ZERO, Kind.POSITIVE, Kind.INF)
_TINY = float(np.finfo(np.float32).tiny)


class Told(NamedTuple):
    """What ranks tell.

    score   a NaN or +inf of the score or the changed logit makes a rank of NaN or +inf, a score of -inf a rank that is
            no finite number
    masked  and a logit of -inf makes a rank of -inf, whatever is read of the candidate
    """

    score: bool
    masked: bool


def told(score: Expr, rank: Expr | None, scope: Scope, *, normalized: bool) -> Told:
    """What can be said of a step's ranks; operands as of `generate`. `logp` and the row's numbers may be anything: a
    changed logit of NaN or +inf has such a logp, too."""

    def ranks(logp: Kind, parent: Kind, values: Kind) -> Iterator[tuple[Kind, Kind]]:
        names = {"logp": logp, "parent": parent}
        for one in _each(_Walk(scope, names, values).number(score)):
            yield one, one if rank is None else _Walk(scope, names | {"score": one}, values).number(rank)

    def tells(logp: Kind) -> bool:
        wrong = bool(logp & _REFUSED)
        for own, found in ranks(logp, _ALIVE, _ANY):
            allowed = _REFUSED if wrong or own & _REFUSED else _REFUSED | Kind.MINUS_INF
            if (wrong or not own & _FINITE) and found & ~allowed:
                return False
        return True

    def masks() -> bool:
        for logp in (Kind.MINUS_INF, Kind.NAN) if normalized else (Kind.MINUS_INF,):  # NAN: nothing is legal
            if any(found & _FINITE for _, found in ranks(logp, _ALIVE, _ANY)):
                return False
        return all(found == Kind.MINUS_INF for _, found in ranks(Kind.MINUS_INF, _FINITE, _FINITE))

    known = all(tells(logp) for logp in _each(_ANY))
    return Told(known, known and masks())


def _each(kinds: Kind) -> Iterator[Kind]:
    """The kinds of a set, one by one."""
    return (one for one in Kind if one & kinds)


@dataclass(frozen=True)
class _Walk:
    """Kinds of an expression.

    names   those of logp, parent and score
    values  those of the row's numbers; a candidate's own, which are arbitrary where it is masked, are of any kind
    """

    scope: Scope
    names: dict[str, Kind]
    values: Kind

    def number(self, node: Expr) -> Kind:  # noqa: PLR0911  one case a node type
        """Of a number; anything where nothing is known."""
        known = lower_number(node, self.scope)
        if isinstance(known, np.float32):
            return _kind(float(known))
        match node:
            case Name(name=name) if name in self.names:
                return self.names[name]
            case Name(name="prob"):
                return _over(_exp, self.names["logp"])
            case Name(name="width"):
                return self.values
            case Negate(value=value):
                return _over(_minus, self.number(value))
            case Binary(op="**", left=left, right=right):
                return _power(self.number(left), constant(right) or 0.0)
            case Binary(op=op, left=left, right=right):
                return _over(_BINARY[op], self.number(left), self.number(right))
            case Call(function="where", args=(condition, a, b)):
                parts = [self.number(a if truth else b) for truth in self.condition(condition)]
                return reduce(lambda one, other: one | other, parts)
            case Call(function="clip", args=(x, low, high)):
                return _over(_lesser, _over(_larger, self.number(x), self.number(low)), self.number(high))
            case Call(function=("min" | "max") as function, args=args):
                one = _lesser if function == "min" else _larger
                return reduce(lambda a, b: _over(one, a, b), [self.number(arg) for arg in args])
            case Call(function=function, args=(x,)) if function in _CALLS:
                return _over(_CALLS[function], self.number(x))
            case Field(space=space) if space in ("param", "user"):
                return self.values
        return _ANY

    def condition(self, node: Expr) -> frozenset[bool]:
        """The truths that a condition may have."""
        known = lower_condition(node, self.scope)
        if isinstance(known, bool):
            return frozenset({known})
        match node:
            case Not(value=value):
                return frozenset(not one for one in self.condition(value))
            case Logic(op=op, items=items):
                parts, one, other = [self.condition(item) for item in items], op == "or", op != "or"
                found = {one} if any(one in part for part in parts) else set[bool]()
                return frozenset(found | ({other} if all(other in part for part in parts) else set[bool]()))
            case Compare(op=op, left=left, right=right) if not isinstance(right, Text):
                pairs = [(a, b) for a in _each(self.number(left)) for b in _each(self.number(right))]
                return frozenset(truth for a, b in pairs for truth in _compared(op, a, b))
        return frozenset({False, True})


def _kind(value: float) -> Kind:
    if math.isnan(value):
        return Kind.NAN
    if abs(value) < _TINY:
        return Kind.ZERO
    finite = math.isfinite(value)
    return (Kind.POSITIVE if finite else Kind.INF) if value > 0 else (Kind.NEGATIVE if finite else Kind.MINUS_INF)


def _over(operation: Callable[..., Kind], *operands: Kind) -> Kind:
    """The union of what an operation makes of each combination of kinds; NaN of NaN."""
    if len(operands) == 1:
        return reduce(lambda a, b: a | b, (Kind.NAN if x == Kind.NAN else operation(x) for x in _each(operands[0])))
    pairs = ((a, b) for a in _each(operands[0]) for b in _each(operands[1]))
    return reduce(lambda a, b: a | b, (Kind.NAN if Kind.NAN in (a, b) else operation(a, b) for a, b in pairs))


def _compared(op: str, a: Kind, b: Kind) -> frozenset[bool]:
    if Kind.NAN in (a, b):
        return frozenset({op == "!="})
    if a == b and a & _FINITE:
        return frozenset({False, True})
    x, y = _ORDER.index(a), _ORDER.index(b)
    return frozenset({{"<": x < y, "<=": x <= y, ">": x > y, ">=": x >= y, "==": x == y, "!=": x != y}[op]})


def _minus(a: Kind) -> Kind:
    return _ORDER[-1 - _ORDER.index(a)]


def _add(a: Kind, b: Kind) -> Kind:
    if (a | b) & ~_FINITE:
        return Kind.NAN if a == _minus(b) else b if a & _FINITE else a
    if a == b:
        return _FINITE if a == Kind.ZERO else a | (Kind.INF if a == Kind.POSITIVE else Kind.MINUS_INF)
    return _FINITE if Kind.ZERO not in (a, b) else (a | b)


def _mul(a: Kind, b: Kind) -> Kind:
    if Kind.ZERO in (a, b):  # a subnormal number may be made large
        other = b if a == Kind.ZERO else a
        return _FINITE if other & _FINITE else _REFUSED | Kind.MINUS_INF
    negative = bool(a & (Kind.NEGATIVE | Kind.MINUS_INF)) != bool(b & (Kind.NEGATIVE | Kind.MINUS_INF))
    far = Kind.MINUS_INF if negative else Kind.INF
    if (a | b) & ~_FINITE:
        return far
    return far | Kind.ZERO | (Kind.NEGATIVE if negative else Kind.POSITIVE)


def _div(a: Kind, b: Kind) -> Kind:
    if b == Kind.ZERO:
        return _ANY
    if not b & _FINITE:
        return Kind.ZERO if a & _FINITE else Kind.NAN
    if a == Kind.ZERO:
        return _FINITE
    return _mul(a, b)


def _lesser(a: Kind, b: Kind) -> Kind:
    return _ORDER[min(_ORDER.index(a), _ORDER.index(b))]


def _larger(a: Kind, b: Kind) -> Kind:
    return _ORDER[max(_ORDER.index(a), _ORDER.index(b))]


def _exp(a: Kind) -> Kind:
    small, large = Kind.ZERO | Kind.POSITIVE, Kind.POSITIVE | Kind.INF
    return {Kind.MINUS_INF: Kind.ZERO, Kind.NEGATIVE: small, Kind.ZERO: Kind.POSITIVE, Kind.POSITIVE: large}.get(a, a)


def _log(a: Kind) -> Kind:
    if a == Kind.ZERO:
        return Kind.NAN | Kind.MINUS_INF | Kind.NEGATIVE
    return a if a == Kind.INF else _FINITE if a == Kind.POSITIVE else Kind.NAN


def _sqrt(a: Kind) -> Kind:
    if a == Kind.ZERO:
        return Kind.NAN | Kind.ZERO | Kind.POSITIVE
    return a if a & (Kind.POSITIVE | Kind.INF) else Kind.NAN


def _abs(a: Kind) -> Kind:
    return _minus(a) if a & (Kind.NEGATIVE | Kind.MINUS_INF) else a


def _sigmoid(a: Kind) -> Kind:
    return Kind.ZERO if a == Kind.MINUS_INF else Kind.ZERO | Kind.POSITIVE if a == Kind.NEGATIVE else Kind.POSITIVE


def _power(base: Kind, exponent: float) -> Kind:
    """As `generate` has it: whole exponents as products."""
    if exponent == 0.5:
        return _over(_sqrt, base)
    if not exponent or exponent != int(exponent) or abs(exponent) > MAX_PRODUCT:
        return _ANY
    out = reduce(lambda a, b: _over(_mul, a, b), [base] * int(abs(exponent)))
    return _over(_div, Kind.POSITIVE, out) if exponent < 0 else out


_BINARY: dict[str, Callable[[Kind, Kind], Kind]] = {
    "+": _add, "-": lambda a, b: _add(a, _minus(b)), "*": _mul, "/": _div,
}  # fmt: skip
_CALLS: dict[str, Callable[[Kind], Kind]] = {
    "exp": _exp, "log": _log, "sqrt": _sqrt, "abs": _abs, "sigmoid": _sigmoid,
}  # fmt: skip
