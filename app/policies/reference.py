"""The oracle of the policy language: one step in plain NumPy, written to be read.

It shares nothing with the compiler: expressions are read again here, from the resolved policy's text. Loops are
welcome, speed is not. `tests` hold every other path against it.

    candidates  a [W, F] grid of (row, code): row r is one live beam, column f the code `code[r, f]`
    T0          the order of candidates: rank descending, then order * C + code ascending (policy-language 0)
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from app.policies.operators import Operator, Operators
from app.policies.reference_operators import log_sum_exp

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Value = npt.NDArray[Any] | np.float32

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
    order     [W] int64, the rows' places; prefix [W, t - 1] int64, their codes
    carry     [W] float32: group, flag or Gumbel of each row, as its operator has it; None at step 1
    noise     [W, F] float32 by use: "gumbel", "uniform", "explore"
    extra     columns by name, [W, F]
    labels    values of categories by column, in the order of their numbers
    vocab     what `vocab` is, where it is not the number of columns
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
    order: Ints | None = None
    prefix: Ints | None = None
    carry: Floats | None = None
    noise: Mapping[str, Floats] = field(default_factory=dict)
    extra: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    vocab: int | None = None


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


def score_step(phases: Mapping[str, object], grid: Grid, operators: Operators) -> Ranks:
    """Score and rank of every candidate under one step of a resolved policy (`Plan.resolved["steps"][t - 1]`): all
    phases up to `rank`. operators: whose declarations give the reference of each."""
    names = _names(grid)
    raw, _ = sanitise(grid.logits)
    logits, broken = _changed(str(phases["logits"]), raw, names)
    logit = np.take_along_axis(logits, grid.code, axis=1)
    wrong = np.take_along_axis(broken, grid.code, axis=1) & grid.legal
    valid = grid.legal & (logit > -INF) & ~grid.excluded
    if phases["mask"] is not None:
        valid = valid & np.broadcast_to(evaluate(str(phases["mask"]), names), valid.shape)
    log_norm = grid.log_norm if phases["logits"] == "logit" else None
    names["logp"] = logp = normalise(str(phases["normalize"]), logits, logit, valid, log_norm)
    for text in texts(phases["keep"]):
        valid = keep(text, logp, valid, names, operators)
    with np.errstate(all="ignore"):
        names["prob"] = np.exp(logp)
    names["parent"] = np.broadcast_to(grid.parent[:, None], logit.shape)
    names["score"] = score = np.broadcast_to(evaluate(str(phases["score"]), names), logit.shape).astype(np.float32)
    names["sibling"] = siblings(score, valid)
    rank = np.broadcast_to(evaluate(str(phases["rank"]), names), logit.shape).astype(np.float32)
    bad = valid & (np.isnan(score) | (score == INF) | np.isnan(rank) | (rank == INF))
    good = valid & ~bad & (score > -INF) & (rank > -INF)
    zero = np.float32(0.0)  # -0.0 + 0.0 = +0.0: the two must tie
    ranks = np.where(good, score + zero, -INF), np.where(good, rank + zero, -INF)
    return Ranks(*ranks, (bad | wrong).sum(axis=1))


def _names(grid: Grid) -> dict[str, Value]:
    names: dict[str, Value] = {
        "step": np.float32(grid.step),
        "vocab": np.float32(grid.logits.shape[1] if grid.vocab is None else grid.vocab),
        "width": np.float32(grid.width),
        "trie": grid.trie,
        "seen": grid.seen,
    }
    names.update({f"param.{name}": np.float32(value) for name, value in grid.params.items()})
    names.update(grid.noise)
    for name, column in grid.extra.items():
        names[name] = column
        for at, label in enumerate(grid.labels.get(name, ())):
            names[f"{name}=={label}"] = column == at
    return names


def _changed(text: str, raw: Floats, names: Mapping[str, Value]) -> tuple[Floats, Bools]:
    """Logits after the `logits` phase, and where it gave NaN or +inf."""
    if text == "logit":
        return raw, np.zeros_like(raw, dtype=bool)
    made = np.broadcast_to(evaluate(text, {**names, "logit": raw}), raw.shape).astype(np.float32)
    broken = (np.isnan(made) | (made == INF)) & (raw > -INF)
    return np.where(broken | (raw == -INF), -INF, made).astype(np.float32), broken


def texts(value: object) -> list[str]:
    """The lines of a list phase; none where it has no list."""
    return [str(one) for one in value] if isinstance(value, list) else []


def best_first(values: Floats, valid: Bools) -> list[int]:
    """Valid columns of one row, best first, ties by column."""
    return sorted(np.flatnonzero(valid).tolist(), key=lambda at: -float(values[at]) + 0.0)


def siblings(score: Floats, valid: Bools) -> Floats:
    """V29: the 1-based place of each valid candidate in its row by score."""
    out = np.zeros_like(score)
    clean = np.where(np.isnan(score), -INF, score)
    for r in range(len(score)):
        for place, at in enumerate(best_first(clean[r], valid[r]), 1):
            out[r, at] = place
    return out


def keep(text: str, logp: Floats, valid: Bools, names: Mapping[str, Value], operators: Operators) -> Bools:
    """V08-V11 and those of other packages: one line of `keep`, row by row."""
    operator, arguments = called(text, names, operators)
    out = np.zeros_like(valid)
    for r in range(len(valid)):
        order = best_first(logp[r], valid[r])
        if order:
            out[r, order] = stays(operator, (len(order),), logp[r, order], *arguments)
    return out


def called(text: str, names: Mapping[str, Value], operators: Operators) -> tuple[Operator, list[float]]:
    """A line such as `top_p(0.9)`: the operator, and its arguments in the order of the declaration."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    operator = operators[call.func.id]
    given = dict(zip([one.name for one in operator.args], call.args, strict=False))
    given |= {str(one.arg): one.value for one in call.keywords}
    values = [_value(given[one.name], names) if one.name in given else one.default for one in operator.args]
    return operator, [float(np.float32(np.asarray(one).reshape(-1)[0])) for one in values]


def stays(operator: Operator, shape: tuple[int, ...], *given: Any) -> Bools:
    """What the operator's reference says; a reference that answers in another form is a fault of its package."""
    assert operator.reference is not None
    out = operator.reference(*given)
    if not isinstance(out, np.ndarray) or out.shape != shape or out.dtype != np.bool_:
        raise TypeError(f"the reference of `{operator.name}` gives no array of {shape} truth values")
    return out


def normalise(over: str, logits: Floats, logit: Floats, valid: Bools, log_norm: Floats | None) -> Floats:
    """Log-probabilities of the candidates. The sum is taken in double precision and rounded once."""
    if over == "none":
        return logit
    if over == "full" and log_norm is not None:
        norm = log_norm
    else:
        members = np.where(valid, logit, -INF) if over == "valid" else logits
        norm = np.array([log_sum_exp(row) for row in members.astype(np.float64)], dtype=np.float32)
    with np.errstate(invalid="ignore"):
        return (logit - norm[:, None]).astype(np.float32)


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


def _value(node: ast.expr, names: Mapping[str, Value]) -> Value:  # noqa: PLR0911, PLR0912  one case a node type
    match node:
        case ast.Compare() if (text := ast.unparse(node).replace("'", '"')) in names:
            return names[text]  # a condition on the request's texts
        case ast.Constant(value=int() | float() as number):
            return np.float32(number)
        case ast.Name(id=name):
            return names[name]
        case ast.Attribute(value=ast.Name(id=space), attr=name):
            return names[f"{space}.{name}"]
        case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(value=str() as label)]):
            same = names[f"{ast.unparse(left)}=={label}"]
            return np.logical_not(same) if isinstance(op, ast.NotEq) else same
        case ast.Compare(left=left, ops=[ast.In()], comparators=[ast.List(elts=labels)]):
            among = [names[f"{ast.unparse(left)}=={ast.literal_eval(one)}"] for one in labels]
            return np.asarray(np.logical_or.reduce(among))
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
