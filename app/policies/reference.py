"""The oracle of the policy language: one step in plain NumPy, written to be read.

It shares nothing with the compiler: expressions are read again here, from the resolved policy's text. Loops are
welcome, speed is not. `tests` hold every other path against it.

    candidates  a [W, F] grid of (row, code): row r is one live beam, column f the code `code[r, f]`
    T0          the order of candidates: rank descending, then order * C + code ascending (policy-language 0)
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Value = Floats | Bools | np.float32

INF = np.float32(np.inf)
MAX_PRODUCT = 16


@dataclass(frozen=True)
class Grid:
    """What one request's step is given.

    logits    [W, C] float32, raw: NaN and +inf count as -inf
    code      [W, F] int64: the candidates' codes, ascending in a row
    legal     [W, F] bool: False = padding
    trie, seen, excluded  [W, F] bool
    parent    [W] float32
    log_norm  [W] float32, or None = log-sum-exp over the step's codes
    params    values by name; step t; width K_t
    """

    logits: Floats
    code: Ints
    legal: Bools
    trie: Bools
    seen: Bools
    excluded: Bools
    parent: Floats
    log_norm: Floats | None
    params: Mapping[str, float]
    step: int
    width: int


@dataclass(frozen=True)
class Ranks:
    """score, rank [W, F] float32, -inf = invalid; bad [W] int64 counts NaN and +inf of expressions."""

    score: Floats
    rank: Floats
    bad: Ints


def sanitise(logits: Floats) -> tuple[Floats, Ints]:
    """NaN and +inf logits become -inf and are counted by row."""
    wrong = np.isnan(logits) | (logits == INF)
    return np.where(wrong, -INF, logits).astype(np.float32), wrong.sum(axis=1)


def score_step(phases: Mapping[str, object], grid: Grid) -> Ranks:
    """Score and rank of every candidate under one step of a resolved policy (`Plan.resolved["steps"][t - 1]`)."""
    logits, _ = sanitise(grid.logits)
    logit = np.take_along_axis(logits, grid.code, axis=1)
    names: dict[str, Value] = {
        "step": np.float32(grid.step),
        "vocab": np.float32(logits.shape[1]),
        "width": np.float32(grid.width),
        "trie": grid.trie,
        "seen": grid.seen,
        **{f"param.{name}": np.float32(value) for name, value in grid.params.items()},
    }
    valid = grid.legal & (logit > -INF) & ~grid.excluded
    if phases["mask"] is not None:
        valid = valid & np.broadcast_to(evaluate(str(phases["mask"]), names), valid.shape)
    names["logp"] = logp = normalise(str(phases["normalize"]), logits, logit, valid, grid.log_norm)
    with np.errstate(all="ignore"):
        names["prob"] = np.exp(logp)
    names["parent"] = np.broadcast_to(grid.parent[:, None], logit.shape)
    names["score"] = score = np.broadcast_to(evaluate(str(phases["score"]), names), logit.shape).astype(np.float32)
    rank = np.broadcast_to(evaluate(str(phases["rank"]), names), logit.shape).astype(np.float32)
    wrong = valid & (np.isnan(score) | (score == INF) | np.isnan(rank) | (rank == INF))
    good = valid & ~wrong & (score > -INF) & (rank > -INF)
    zero = np.float32(0.0)  # -0.0 + 0.0 = +0.0: the two must tie
    return Ranks(np.where(good, score + zero, -INF), np.where(good, rank + zero, -INF), wrong.sum(axis=1))


def normalise(over: str, logits: Floats, logit: Floats, valid: Bools, log_norm: Floats | None) -> Floats:
    """Log-probabilities of the candidates. The sum is taken in double precision and rounded once."""
    if over == "none":
        return logit
    if over == "full" and log_norm is not None:
        norm = log_norm
    else:
        members = np.where(valid, logit, -INF) if over == "valid" else logits
        norm = np.array([_log_sum_exp(row) for row in members.astype(np.float64)], dtype=np.float32)
    with np.errstate(invalid="ignore"):
        return (logit - norm[:, None]).astype(np.float32)


def _log_sum_exp(row: npt.NDArray[np.float64]) -> float:
    top = row.max(initial=-np.inf)
    return float(top + np.log(np.exp(row - top).sum())) if top > -np.inf else -np.inf


def top(rank: Floats, order: Ints, code: Ints, codes: int, k: int) -> Ints:
    """The best k valid candidates in T0 as flat positions r * F + f; fewer where fewer are valid."""
    number = (order[:, None] * codes + code).ravel()
    by_number = np.argsort(number, kind="stable")
    flat = rank.ravel()[by_number]
    best = by_number[np.argsort(-flat, kind="stable")]
    return best[rank.ravel()[best] > -INF][:k].astype(np.int64)


# ---- expressions ---------------------------------------------------------------------------------------------------


def evaluate(text: str, names: Mapping[str, Value]) -> Value:
    """The value of a canonical expression: fp32, left to right as written, rounded after each operation."""
    with np.errstate(all="ignore"):
        return _value(ast.parse(text, mode="eval").body, names)


def _value(node: ast.expr, names: Mapping[str, Value]) -> Value:  # noqa: PLR0911  one case a node type
    match node:
        case ast.Constant(value=int() | float() as number):
            return np.float32(number)
        case ast.Name(id=name):
            return names[name]
        case ast.Attribute(value=ast.Name(id=space), attr=name):
            return names[f"{space}.{name}"]
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return np.logical_not(_value(inner, names))
        case ast.UnaryOp(operand=inner):
            return np.negative(_value(inner, names))
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return _power(_value(left, names), float(_value(right, names)))
        case ast.BinOp(op=op, left=left, right=right):
            return _ARITHMETIC[type(op)](_value(left, names), _value(right, names))
        case ast.BoolOp(op=op, values=parts):
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            out = _value(parts[0], names)
            for part in parts[1:]:
                out = join(out, _value(part, names))
            return out
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _COMPARE[type(op)](_value(left, names), _value(right, names))
        case ast.Call(func=ast.Name(id=function), args=args):
            return _call(function, [_value(arg, names) for arg in args])
    raise ValueError(f"no reference for {ast.unparse(node)}")


def _divide(a: Value, b: Value) -> Value:
    out: Value = np.where(np.equal(b, 0), np.float32(np.nan), np.divide(a, b)).astype(np.float32)
    return out


def _product(a: Value, b: Value) -> Value:
    out: Value = np.multiply(a, b)
    return out


def _power(x: Value, n: float) -> Value:
    if n == int(n) and abs(n) <= MAX_PRODUCT:
        out: Value = np.ones_like(x, dtype=np.float32)
        for at in range(int(abs(n))):
            out = _product(out, x) if at else x
        return _divide(np.float32(1), out) if n < 0 else out
    if n == 0.5:
        return np.sqrt(x)
    other: Value = np.asarray(np.power(x, np.float32(n)), dtype=np.float32)
    return other


def _call(function: str, args: list[Value]) -> Value:
    match function, args:
        case "where", [condition, a, b]:
            out: Value = np.where(condition, a, b).astype(np.float32)
            return out
        case "clip", [x, low, high]:
            return np.minimum(np.maximum(x, low), high)
        case "min" | "max", [first, *rest]:
            for one in rest:
                first = np.minimum(first, one) if function == "min" else np.maximum(first, one)
            return first
        case "log", [x]:
            return np.where(np.greater(x, 0), np.log(x), np.float32(np.nan)).astype(np.float32)
        case "sigmoid", [x]:
            return _divide(np.float32(1), np.float32(1) + np.exp(np.negative(x)))
    return _ONE[function](args[0])


_ONE: Mapping[str, Callable[..., Value]] = {"exp": np.exp, "sqrt": np.sqrt, "abs": np.abs}
_ARITHMETIC: Mapping[type[ast.operator], Callable[..., Value]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: _divide,
}
_COMPARE: Mapping[type[ast.cmpop], Callable[..., Value]] = {
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
    ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
}
