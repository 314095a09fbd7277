"""`where:` of an experiment: which requests it is for. Read by the language's own front end, checked, and turned into
a function of a request's `ctx` and `user`.

Two-valued: a request that lacks a field that the condition names, or for which a number of it does not exist
(`x / 0`, `log(0)`), is not in the experiment, whatever stands round it. So `not` never turns absence into a yes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from app.policies.assign import Condition, Facts
from app.policies.diagnostics import Findings, suggest
from app.policies.expr import (
    Binary,
    Call,
    Compare,
    Expr,
    Field,
    Index,
    Logic,
    Name,
    Negate,
    Not,
    Number,
    OneOf,
    Text,
    show,
    walk,
)
from app.policies.names import FUNCTIONS, FUNCTIONS_HELP
from app.policies.parse import parse_expression
from app.policies.source import Scalar

T = TypeVar("T")
Numeric = Callable[[Facts], float]
Truth = Callable[[Facts], bool]

_ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "**": math.pow,
}  # fmt: skip
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "log": math.log, "exp": math.exp, "sqrt": math.sqrt, "abs": abs, "min": min, "max": max,
    "sigmoid": lambda x: 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x)),
    "clip": lambda x, low, high: min(max(x, low), high),
}  # fmt: skip


class _Refused(Exception):
    """A part was reported; nothing above it is worth a finding."""


def compile_where(scalar: Scalar, found: Findings) -> Condition | None:
    """A condition, or None where it was refused (the findings are recorded)."""
    before = len(found)
    node = parse_expression(scalar, found)
    if node is None:
        return None
    try:
        test = _Compiler(found).truth(node)
    except _Refused:
        return None
    fields = _fields(node)
    return Condition(show(node), _guarded(test, fields), fields) if len(found) == before else None


def _fields(node: Expr) -> frozenset[tuple[str, str]]:
    return frozenset((part.space, part.name) for part in walk(node) if isinstance(part, Field))


def _guarded(test: Truth, fields: frozenset[tuple[str, str]]) -> Truth:
    ctx = frozenset(name for space, name in fields if space == "ctx")
    user = frozenset(name for space, name in fields if space == "user")

    def guarded(facts: Facts) -> bool:
        if not (ctx <= facts.ctx.keys() and user <= facts.user.keys()):
            return False
        try:
            return test(facts)
        except (ArithmeticError, ValueError):
            return False

    return guarded


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ArithmeticError
    return value


class _Compiler:
    """Checked nodes -> closures."""

    def __init__(self, found: Findings) -> None:
        self.found = found

    def truth(self, node: Expr) -> Truth:
        match node:
            case Not(value=value):
                inner = self.truth(value)
                return lambda facts: not inner(facts)
            case Logic(op=op, items=items):
                return self.logic(op, items)
            case Compare():
                return self.compare(node)
            case OneOf(left=left, values=values):
                text, among = self.text(left), frozenset(values)
                return lambda facts: text(facts) in among
            case Text():
                raise self.refuse("T011", node, "a text stands where a condition is needed")
            case Name(name=name):
                raise self.unknown(node, name)
            case Field(space="ctx"):
                raise self.refuse("T011", node, "a text stands where a condition is needed", 'compare it: `== "..."`')
        self.number(node)
        raise self.refuse("T005", node, "a number stands where a condition is needed", "compare it: `x > 0`")

    def logic(self, op: str, items: tuple[Expr, ...]) -> Truth:
        tests = tuple(self.each(self.truth, items))
        if op == "and":
            return lambda facts: all([test(facts) for test in tests])  # noqa: C419  every part, so that a part without
        return lambda facts: any([test(facts) for test in tests])  # noqa: C419  a number always decides: no order effects

    def each(self, read: Callable[[Expr], T], nodes: tuple[Expr, ...]) -> list[T]:
        """Read every node, so that all faults are found; then stop if one was faulty."""
        out, refused = list[T](), False
        for node in nodes:
            try:
                out.append(read(node))
            except _Refused:
                refused = True
        if refused:
            raise _Refused
        return out

    def compare(self, node: Compare) -> Truth:
        sides, compare = (node.left, node.right), _COMPARE[node.op]
        if any(isinstance(side, Text) or (isinstance(side, Field) and side.space == "ctx") for side in sides):
            if node.op not in ("==", "!="):
                raise self.refuse("T011", node, f"a text is not compared with `{node.op}`", "write `==`, `!=` or `in`")
            if not any(isinstance(side, Field) for side in sides):
                raise self.refuse("T011", node, "two texts are compared", "a text is compared with `ctx.name`")
            return self.both(self.each(self.text, sides), compare)
        return self.both(self.each(self.number, sides), compare)

    def both(self, sides: list[Callable[[Facts], T]], compare: Callable[[Any, Any], bool]) -> Truth:
        left, right = sides
        return lambda facts: compare(left(facts), right(facts))

    def text(self, node: Expr) -> Callable[[Facts], str]:
        match node:
            case Text(value=value):
                return lambda _: value
            case Field(space="ctx", name=name):
                return lambda facts: facts.ctx[name]
        raise self.refuse("T011", node, "a text is compared only with `ctx.name`")

    def number(self, node: Expr) -> Numeric:
        match node:
            case Number(value=number):
                return lambda _: number
            case Field(space="user", name=name):
                return lambda facts: facts.user[name]
            case Field():
                raise self.field(node)
            case Negate(value=negated):
                inner = self.number(negated)
                return lambda facts: -inner(facts)
            case Binary(op=op, left=left, right=right):
                apply = _ARITHMETIC[op]
                a, b = self.each(self.number, (left, right))
                return lambda facts: _finite(apply(a(facts), b(facts)))
            case Call():
                return self.call(node)
            case Name(name=name):
                raise self.unknown(node, name)
            case Text():
                raise self.refuse("T011", node, "a text stands where a number is needed")
            case Index(base=base):
                raise self.refuse("T003", node, f"`{base}[...]` does not exist in `where`")
        raise self.refuse("T004", node, "a condition stands where a number is needed", "write `where(condition, a, b)`")

    def call(self, node: Call) -> Numeric:
        function = FUNCTIONS.get(node.function)
        if function is None:
            hint = suggest(node.function, FUNCTIONS) or FUNCTIONS_HELP
            self.found.add("T007", node.name_span, f"unknown function `{node.function}`", hint)
            raise _Refused
        count = len(node.args)
        if count < function.least or (function.most is not None and count > function.most):
            wanted = f"{function.least}" if function.most is not None else f"{function.least} or more"
            raise self.refuse("T006", node, f"`{node.function}` takes {wanted} arguments, not {count}", function.about)
        if node.function == "where":
            test = self.truth(node.args[0])
            yes, no = self.each(self.number, node.args[1:])
            return lambda facts: (yes if test(facts) else no)(facts)
        apply, args = _FUNCTIONS[node.function], self.each(self.number, node.args)
        return lambda facts: _finite(apply(*(arg(facts) for arg in args)))

    def field(self, node: Field) -> _Refused:
        if node.space == "ctx":
            return self.refuse("T011", node, "a text stands where a number is needed", "numbers are in `user.`")
        return self.unknown(node, node.space)

    def unknown(self, node: Expr, name: str) -> _Refused:
        hint = suggest(name, ("ctx", "user")) or "`where` knows ctx.NAME (texts) and user.NAME (numbers) of the request"
        return self.refuse("T001", node, f"unknown name `{show(node)}`", hint)

    def refuse(self, code: str, node: Expr, message: str, hint: str = "") -> _Refused:
        self.found.add(code, node.span, message, hint)
        return _Refused()
