"""Typed expressions -> torch, one operation at a time in fp32, in the written order.

Eager torch does not contract a * b + c. Three traps are avoided: division by a scalar is a multiplication by its
reciprocal on some devices (so constants are tensors there), `1 / x` is `reciprocal`, and `x ** n` differs between
libraries (so whole exponents are repeated multiplications). Constant parts are folded here, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from app.errors import Fault
from app.policies.check_contract import COMPARE
from app.policies.check_types import constant
from app.policies.expr import Binary, Call, Compare, Expr, Field, Logic, Name, Negate, Not, Number, OneOf, Text, show
from app.policies.facts import Facts

NAN, INF = float("nan"), float("inf")
MAX_PRODUCT = 16
"""Largest whole exponent that is written as a product."""


@dataclass
class Frame:
    """The named values of one call, all of one shape or broadcastable to it, on one device."""

    device: torch.device
    known: dict[str, Tensor] = field(default_factory=dict)

    def fill(self, value: float) -> Tensor:
        """A constant on the device, without a copy from the host."""
        return torch.full((), value, dtype=torch.float32, device=self.device)


Lowered = Callable[[Frame], Tensor]


@dataclass(frozen=True)
class Scope:
    """What is known when an expression is lowered: constants of the step, conditions that hold, declared columns."""

    constants: Mapping[str, float]
    facts: Facts
    true: frozenset[str] = frozenset()


def lower_number(node: Expr, scope: Scope) -> Lowered | np.float32:  # noqa: PLR0911, PLR0912  one case a node type
    """A number, or a constant where nothing in it varies."""
    match node:
        case Number(value=value):
            return np.float32(value)
        case Name(name="prob"):
            return lambda frame: torch.exp(frame.known["logp"])
        case Name(name=name) if name in scope.constants:
            return np.float32(scope.constants[name])
        case Name(name=name):
            return _name(name)
        case Field(space=space, name=name):
            return _name(f"{space}.{name}")
        case Negate(value=value):
            return _apply("-x", [lower_number(value, scope)])
        case Binary(op="**", left=left, right=right):
            return _power(lower_number(left, scope), constant(right) or 0.0)
        case Binary(op=op, left=left, right=right):
            return _apply(op, [lower_number(left, scope), lower_number(right, scope)])
        case Call(function="where", args=(condition, a, b)):
            return _where(lower_condition(condition, scope), lower_number(a, scope), lower_number(b, scope))
        case Call(function="clip", args=(x, low, high)):
            inner = _apply("max", [lower_number(x, scope), lower_number(low, scope)])
            return _apply("min", [inner, lower_number(high, scope)])
        case Call(function=function, args=args) if function in ("min", "max"):
            parts = [lower_number(arg, scope) for arg in args]
            out = parts[0]
            for part in parts[1:]:
                out = _apply(function, [out, part])
            return out
        case Call(function=function, args=(x,)):
            return _apply(function, [lower_number(x, scope)])
    raise Fault(f"{type(node).__name__} passed the checks and cannot be lowered")


def lower_condition(node: Expr, scope: Scope) -> Lowered | bool:  # noqa: PLR0911  one case a node type
    """A condition, or its truth where nothing in it varies."""
    match node:
        case Name(name=name) if name in scope.true:
            return True
        case Name(name=name):
            return _name(name)
        case Not(value=value):
            inner = lower_condition(value, scope)
            return (not inner) if isinstance(inner, bool) else lambda frame: ~inner(frame)
        case Logic(op=op, items=items):
            return _logic(op, [lower_condition(item, scope) for item in items])
        case Field(space=space, name=name):
            return _name(f"{space}.{name}")
        case Compare(left=Field(space=space), right=Text()) | OneOf(left=Field(space=space)) if space != "ctx":
            return _category(node, scope)
        case OneOf() | Compare(right=Text()):
            return _name(show(node))  # a condition on the request's texts, which the caller evaluates
        case Compare(op=op, left=left, right=right):
            a, b = lower_number(left, scope), lower_number(right, scope)
            if isinstance(a, np.float32) and isinstance(b, np.float32):
                return COMPARE[op](a, b)
            compare = _COMPARE[op]
            return lambda frame: compare(tensor_of(a, frame), tensor_of(b, frame))
    raise Fault(f"{type(node).__name__} passed the checks and cannot be lowered")


_COMPARE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge, "==": torch.eq, "!=": torch.ne,
}  # fmt: skip


def _name(name: str) -> Lowered:
    return lambda frame: frame.known[name]


def _category(node: OneOf | Compare, scope: Scope) -> Lowered:
    """A category against its values: numbers of labels against numbers; -1 is unknown and equals none."""
    field = node.left
    assert isinstance(field, Field), "checked"
    key = f"{field.space}.{field.name}"
    labels = scope.facts[key].labels
    values = node.values if isinstance(node, OneOf) else (node.right.value,) if isinstance(node.right, Text) else ()
    numbers = [labels.index(value) for value in values if value in labels]
    different = isinstance(node, Compare) and node.op == "!="

    def among(frame: Frame) -> Tensor:
        column = frame.known[key]
        out = torch.zeros_like(column, dtype=torch.bool)
        for number in numbers:
            out = out | (column == number)
        return ~out if different else out

    return among


def tensor_of(value: Lowered | np.float32, frame: Frame) -> Tensor:
    """The value of a lowered number in a frame."""
    return frame.fill(float(value)) if isinstance(value, np.float32) else value(frame)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, NAN, torch.div(a, b))


def _log(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.log(x), NAN)


_OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    "+": torch.add, "-": torch.sub, "*": torch.mul, "/": _divide, "-x": torch.neg, "min": torch.minimum,
    "max": torch.maximum, "log": _log, "exp": torch.exp, "sqrt": torch.sqrt, "abs": torch.abs, "sigmoid": torch.sigmoid,
}  # fmt: skip


def _apply(name: str, parts: list[Lowered | np.float32]) -> Lowered | np.float32:
    operation = _OPERATIONS[name]
    if all(isinstance(part, np.float32) for part in parts):
        folded = operation(
            *(torch.tensor(float(part), dtype=torch.float32) for part in parts if isinstance(part, np.float32))
        )
        return np.float32(folded.item())
    return lambda frame: operation(*(tensor_of(part, frame) for part in parts))


def _power(base: Lowered | np.float32, exponent: float) -> Lowered | np.float32:
    whole = int(abs(exponent)) if exponent == int(exponent) and abs(exponent) <= MAX_PRODUCT else None

    def power(x: Tensor) -> Tensor:
        if whole is None:
            return torch.sqrt(x) if exponent == 0.5 else torch.pow(x, torch.full_like(x, exponent))
        out = torch.ones_like(x)
        for at in range(whole):
            out = torch.mul(out, x) if at else x
        return _divide(torch.ones_like(x), out) if exponent < 0 else out

    if isinstance(base, np.float32):
        return np.float32(power(torch.tensor(float(base), dtype=torch.float32)).item())
    return lambda frame: power(base(frame))


def _where(condition: Lowered | bool, a: Lowered | np.float32, b: Lowered | np.float32) -> Lowered | np.float32:
    if isinstance(condition, bool):
        return a if condition else b
    return lambda frame: torch.where(condition(frame), tensor_of(a, frame), tensor_of(b, frame))


def _logic(op: str, parts: list[Lowered | bool]) -> Lowered | bool:
    against = op == "or"
    if any(part is against for part in parts):
        return against
    varying = [part for part in parts if not isinstance(part, bool)]
    if not varying:
        return not against
    join = torch.logical_or if against else torch.logical_and

    def joined(frame: Frame) -> Tensor:
        out = varying[0](frame)
        for part in varying[1:]:
            out = join(out, part(frame))
        return out

    return joined
