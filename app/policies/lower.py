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
from app.policies.expr import Binary, Call, Compare, Expr, Field, Logic, Name, Negate, Not, Number
from app.policies.plan import Normalize, Scored, StepInputs

NAN, INF = float("nan"), float("inf")
MAX_PRODUCT = 16
"""Largest whole exponent that is written as a product."""


@dataclass
class Frame:
    """The named values of one call, each [n, F] or [n, 1]."""

    inputs: StepInputs
    known: dict[str, Tensor] = field(default_factory=dict)

    def fill(self, value: float) -> Tensor:
        """A constant on the inputs' device, without a copy from the host."""
        return torch.full((), value, dtype=torch.float32, device=self.inputs.logits.device)


Lowered = Callable[[Frame], Tensor]


@dataclass(frozen=True)
class Scope:
    """What is known when an expression is lowered: constants of the step, parameter columns, conditions that hold."""

    constants: Mapping[str, float]
    params: Mapping[str, int]
    true: frozenset[str] = frozenset()


def lower_number(node: Expr, scope: Scope) -> Lowered | np.float32:  # noqa: PLR0911  one case a node type
    """A number, or a constant where nothing in it varies."""
    match node:
        case Number(value=value):
            return np.float32(value)
        case Name(name=name) if name in scope.constants:
            return np.float32(scope.constants[name])
        case Name(name=name):
            return _name(name)
        case Field(space="param", name=name):
            return _param(scope.params[name])
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


def lower_condition(node: Expr, scope: Scope) -> Lowered | bool:
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
        case Compare(op=op, left=left, right=right):
            a, b = lower_number(left, scope), lower_number(right, scope)
            if isinstance(a, np.float32) and isinstance(b, np.float32):
                return COMPARE[op](a, b)
            compare = _COMPARE[op]
            return lambda frame: compare(_tensor(a, frame), _tensor(b, frame))
    raise Fault(f"{type(node).__name__} passed the checks and cannot be lowered")


_COMPARE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge, "==": torch.eq, "!=": torch.ne,
}  # fmt: skip


def _name(name: str) -> Lowered:
    if name == "prob":  # made where it is asked for
        return lambda frame: torch.exp(frame.known["logp"])
    return lambda frame: frame.known[name]


def _param(column: int) -> Lowered:
    return lambda frame: frame.inputs.params[:, column : column + 1]


def _tensor(value: Lowered | np.float32, frame: Frame) -> Tensor:
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
    return lambda frame: operation(*(_tensor(part, frame) for part in parts))


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
    return lambda frame: torch.where(condition(frame), _tensor(a, frame), _tensor(b, frame))


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


@dataclass(frozen=True)
class Parts:
    """The lowered phases of a step. mask True = no mask beyond the candidates themselves."""

    children: bool
    normalize: Normalize
    mask: Lowered | bool
    score: Lowered | np.float32
    rank: Lowered | np.float32 | None
    """None = the score itself."""


def program(parts: Parts) -> Callable[[StepInputs], Scored]:
    """The step's scoring as one function: masks, then normalisation, then score, then rank."""

    def run(inputs: StepInputs) -> Scored:
        frame = Frame(inputs)
        logits = inputs.logits.float()
        logit = logits.gather(1, inputs.code) if parts.children else logits
        valid = _valid(parts, inputs, frame, logit)
        norm = _norm(parts.normalize, inputs, logits, logit, valid)
        logp = logit if norm is None else torch.sub(logit, norm)
        frame.known.update(logit=logit, logp=logp, parent=inputs.parent[:, None])
        score = _tensor(parts.score, frame).expand(logit.shape)
        frame.known["score"] = score
        rank = score if parts.rank is None else _tensor(parts.rank, frame).expand(logit.shape)
        return _finish(score, rank, valid)

    return run


def _valid(parts: Parts, inputs: StepInputs, frame: Frame, logit: Tensor) -> Tensor:
    """Candidates that may be selected: real, with a token, not excluded, allowed by the mask."""
    valid = inputs.legal & (logit > -INF)
    if inputs.excluded is not None:
        valid = valid & ~inputs.excluded
    frame.known["width"] = inputs.width[:, None]
    if inputs.trie is not None:
        frame.known["trie"] = inputs.trie
    if inputs.seen is not None:
        frame.known["seen"] = inputs.seen
    if isinstance(parts.mask, bool):
        return valid if parts.mask else torch.zeros_like(valid)
    return valid & parts.mask(frame)


def _norm(normalize: Normalize, inputs: StepInputs, logits: Tensor, logit: Tensor, valid: Tensor) -> Tensor | None:
    """What is subtracted from a logit, [n, 1]; a dead row gets -inf, its candidates are invalid anyway."""
    if normalize == "none":
        return None
    if normalize == "full" and inputs.log_norm is not None:
        return inputs.log_norm[:, None]
    over = torch.where(valid, logit, -INF) if normalize == "valid" else logits
    return torch.logsumexp(over, dim=1, keepdim=True)


def _finish(score: Tensor, rank: Tensor, valid: Tensor) -> Scored:
    """NaN and +inf are bad: counted and invalid. Adding 0.0 makes -0.0 a tie of +0.0."""
    fine = score < INF  # false for NaN too
    if rank is score:
        final = torch.where(valid & fine, score, -INF).add_(0.0)
        return Scored(final, final, (valid & ~fine).sum(dim=1))
    fine = fine & (rank < INF)
    good = valid & fine & (score > -INF) & (rank > -INF)
    return Scored(
        torch.where(good, score, -INF).add_(0.0), torch.where(good, rank, -INF).add_(0.0), (valid & ~fine).sum(dim=1)
    )
