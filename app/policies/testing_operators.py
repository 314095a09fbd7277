"""For the tests of a package that adds an operator: does it keep what its declaration promises?

    from app.policies.testing_operators import check_operator

    def test_gap():
        check_operator(GAP)

The same inputs come every time. What differs is raised as an AssertionError with the row that shows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from app.config import Limits
from app.core import Contract, StepShape
from app.ops.selection import select_top
from app.policies.builtin import BUILT_IN
from app.policies.choose import Field
from app.policies.compile import compile_policy
from app.policies.operators import Arg, Operator, Operators
from app.policies.plugins import fault
from app.policies.resolve import Library
from app.policies.source import Source

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
SEED = 20261112
LEVELS = np.array([0.0, -0.0, -0.5, -1.0, -1.0, -2.0, -2.5, -9.0], np.float32)
KINDS = ("ties", "random", "wide", "equal", "single", "dead")
"""Many equal values, random ones, ones far apart, all equal, one candidate a row, a row without one."""


class _Trial(NamedTuple):
    """Rows of several requests, whose codes ascend in a row.

    value    [n, F] float32; arbitrary, NaN and infinite too, where a candidate is not valid
    request  [n] int64, non-decreasing · order [n] their places · widths K of each request · size codes of the step
    args     [n, P] float32
    """

    kind: str
    value: Floats
    valid: Bools
    code: npt.NDArray[np.int64]
    request: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    widths: tuple[int, ...]
    size: int
    args: Floats


def check_operator(operator: Operator, *, trials: int = 300, device: str = "cpu") -> None:
    """Hold an operator against its declaration.

    Its form; torch against the reference on random rows with ties, masked and broken candidates, equal values and
    single candidates, with arguments for all requests and with those of each; that its inputs are left alone; that
    somebody stays; that its precut class is right, one stage against two; that a policy with it compiles and passes
    the self-check. Raises AssertionError with what differs.
    """
    wrong = fault(operator)
    if wrong is not None:
        raise AssertionError(wrong)
    rng = np.random.default_rng(SEED)
    for at in range(trials):
        one = _trial(KINDS[at % len(KINDS)], operator, rng, each=at % 2 == 0)
        got, want = _computed(operator, one, device), _defined(operator, one)
        if not np.array_equal(got, want):
            row = int(np.flatnonzero((got != want).any(axis=1))[0])
            _fail(operator, one, row, f"torch keeps {got[row].tolist()}, the reference {want[row].tolist()}")
        _somebody(operator, one, got)
        if operator.precut in ("M", "M*"):
            _heads(operator, one, got)
        if operator.precut == "M":
            _two_stages(operator, one, got, device)
    _compiled(operator)


def _trial(kind: str, operator: Operator, rng: np.random.Generator, *, each: bool) -> _Trial:
    requests, size = int(rng.integers(1, 4)), int(rng.integers(2, 13))
    rows = rng.integers(1, 5, requests)
    n, f = int(rows.sum()), int(rng.integers(1, size + 1))
    value = rng.choice(LEVELS, (n, f)) if kind == "ties" else rng.normal(size=(n, f)) * (40 if kind == "wide" else 1)
    if kind == "equal":
        value = np.full((n, f), -1.25)
    valid = rng.random((n, f)) < rng.choice([0.6, 1.0])
    if kind == "single":
        valid = np.arange(f)[None] == rng.integers(0, f, (n, 1))
    if kind == "dead":
        valid[rng.integers(0, n)] = False
    if operator.phase == "keep":
        value = _normal(value, valid, rng.choice([0.5, 1.0]))
    hostile = rng.choice(np.array([np.nan, np.inf, -np.inf, 1e30, 0.0]), (n, f))
    drawn = [[_argument(one, rng) for one in operator.args] for _ in range(requests if each else 1)]
    args = np.array(drawn if each else drawn * requests, np.float32).reshape(requests, len(operator.args))
    return _Trial(
        kind,
        np.where(valid, value, hostile).astype(np.float32),
        valid,
        np.stack([np.sort(rng.choice(size, f, replace=False)) for _ in range(n)]).astype(np.int64),
        np.repeat(np.arange(requests), rows),
        np.concatenate([rng.permutation(count) for count in rows]).astype(np.int64),
        tuple(int(one) for one in rng.integers(1, 8, requests)),
        size,
        np.repeat(args, rows, axis=0),
    )


def _normal(value: npt.NDArray[Any], valid: Bools, mass: float) -> npt.NDArray[Any]:
    """Log-probabilities of valid candidates that hold so much of a row's mass."""
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.log(np.exp(np.where(valid, value, -np.inf)).sum(axis=1, keepdims=True) / mass)
    return np.where(np.isfinite(total), value - total, value)


def _argument(arg: Arg, rng: np.random.Generator) -> float:
    """An end of its range, its default, or a value near the lower end, where most ranges are lively."""
    span = arg.high - arg.low
    choices = [arg.low, arg.high, float(arg.default or arg.low), arg.low + span * rng.random() ** 4]
    choices += [min(arg.high, max(arg.low, one)) for one in (0.5, 1.0, 1.5, 3.0)]
    value = float(rng.choice(np.array(choices)))
    return float(round(value)) if arg.form == "int" else value


# ---- one way and the other -----------------------------------------------------------------------------------------


def _computed(operator: Operator, one: _Trial, device: str) -> Bools:
    """Who stays by torch, as a plan would call it."""
    value, valid = torch.from_numpy(one.value).to(device), torch.from_numpy(one.valid).to(device)
    same = bool((one.args == one.args[:1]).all())
    args = torch.from_numpy(one.args[:1] if same else one.args).to(device)
    columns = [args[:, at : at + 1] for at in range(args.shape[1])]
    given: tuple[Any, ...] = (value, valid)
    if operator.phase == "prune":
        given = (torch.where(valid, value, -torch.inf), _field(one, device))
    before = [part.clone() for part in (*given, *columns) if isinstance(part, torch.Tensor)]
    assert operator.torch is not None
    out = operator.torch(*given, *columns)
    if not isinstance(out, torch.Tensor) or out.shape != value.shape or out.dtype != torch.bool:
        raise AssertionError(f"torch of `{operator.name}` gives no tensor of {tuple(value.shape)} truth values")
    after = [part for part in (*given, *columns) if isinstance(part, torch.Tensor)]
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True)):
        raise AssertionError(f"torch of `{operator.name}` writes into what it is given")
    kept: Bools = (out & valid).cpu().numpy()
    return kept


def _field(one: _Trial, device: str) -> Field:
    request, order, code = (torch.from_numpy(part).to(device) for part in (one.request, one.order, one.code))
    k, rows = torch.tensor(one.widths, device=device), tuple(np.bincount(one.request).tolist())
    return Field(request, order, code, k, one.widths, one.size, rows)


def _defined(operator: Operator, one: _Trial) -> Bools:
    """Who stays by the reference: row by row, or request by request."""
    out = np.zeros_like(one.valid)
    assert operator.reference is not None
    if operator.phase == "prune":
        for request in range(len(one.widths)):
            rows = np.flatnonzero(one.request == request)
            rank = np.where(one.valid[rows], one.value[rows], -np.inf).astype(np.float32)
            stays = operator.reference(rank, *_floats(one.args[rows[0]]))
            out[rows] = _form(operator, stays, rank.shape) & one.valid[rows]
        return out
    for row in range(len(out)):
        best = _best_first(one, row)
        if best:
            stays = operator.reference(one.value[row, best], *_floats(one.args[row]))
            out[row, best] = _form(operator, stays, (len(best),))
    return out


def _form(operator: Operator, stays: object, shape: tuple[int, ...]) -> Bools:
    if not isinstance(stays, np.ndarray) or stays.shape != shape or stays.dtype != np.bool_:
        raise AssertionError(f"the reference of `{operator.name}` gives no array of {shape} truth values")
    return stays


def _floats(args: Floats) -> list[float]:
    return [float(one) for one in args]


def _best_first(one: _Trial, row: int) -> list[int]:
    return sorted(np.flatnonzero(one.valid[row]).tolist(), key=lambda at: -float(one.value[row, at]) + 0.0)


# ---- what the declaration promises ---------------------------------------------------------------------------------


def _somebody(operator: Operator, one: _Trial, kept: Bools) -> None:
    """Of a row (keep) or a request (prune) that has candidates, at least one stays."""
    if operator.phase == "keep":
        empty = one.valid.any(axis=1) & ~kept.any(axis=1)
    else:
        alive, left = ({int(r) for r in one.request[part.any(axis=1)]} for part in (one.valid, kept))
        empty = np.isin(one.request, list(alive - left))
    if empty.any():
        _fail(operator, one, int(np.flatnonzero(empty)[0]), "nobody stays")


def _heads(operator: Operator, one: _Trial, kept: Bools) -> None:
    for row in range(len(kept)):
        stays = kept[row, _best_first(one, row)].tolist()
        if stays != sorted(stays, reverse=True):
            _fail(operator, one, row, f"precut {operator.precut}: who stays is no head of the row, best first: {stays}")


def _two_stages(operator: Operator, one: _Trial, kept: Bools, device: str) -> None:
    """Precut M: rows cut to their best K before the operator give the survivors that whole rows give."""
    cut = np.zeros_like(one.valid)
    for row in range(len(cut)):
        cut[row, _best_first(one, row)[: one.widths[one.request[row]]]] = True
    twice = _computed(operator, one._replace(valid=cut), device)
    whole, first = _survivors(one, kept), _survivors(one, twice)
    if whole != first:
        row = next((at for at in range(len(kept)) if not np.array_equal(kept[at] & cut[at], twice[at])), 0)
        _fail(operator, one, row, "precut M: rows that were cut to their best K give other survivors; it is M* or E")


def _survivors(one: _Trial, kept: Bools) -> list[list[tuple[int, int]]]:
    rank = torch.from_numpy(np.where(kept, one.value, -np.inf).astype(np.float32))
    start = [0, *np.cumsum(np.bincount(one.request, minlength=len(one.widths))).tolist()]
    code, order = torch.from_numpy(one.code), torch.from_numpy(one.order)
    best = select_top(rank, code, order, one.size, start, list(one.widths))
    out, first = [], 0
    for at, width in enumerate(one.widths):
        own = slice(first, first + int(best.n_valid[at]))
        out.append(list(zip(best.parent[own].tolist(), best.column[own].tolist(), strict=True)))
        first += width
    return out


def _fail(operator: Operator, one: _Trial, row: int, what: str) -> NoReturn:
    shown = {
        "kind": one.kind,
        "values": one.value[row].tolist(),
        "valid": one.valid[row].tolist(),
        **{arg.name: float(one.args[row, at]) for at, arg in enumerate(operator.args)},
    }
    raise AssertionError(f"`{operator.name}`: {what}\n  row {row}: {shown}")


# ---- in a policy ---------------------------------------------------------------------------------------------------


def _compiled(operator: Operator) -> None:
    """A policy with it passes every check of the language, and the self-check."""
    own = replace(operator, source=operator.source or "the package under test")
    operators = Operators({**BUILT_IN.known, own.name: own})
    given = ", ".join(f"{arg.name}={_plain(arg)}" for arg in own.args)
    lines = [f"    {own.phase}:", f"      - {own.name}({given})"]
    text = "\n".join(["widebeam: 1", "steps:", "  all:", "    normalize: valid", *lines, ""])
    library = Library({"trial": Source("policies/trial.yaml", text.encode())}, operators)
    steps = tuple(StepShape(t, 8, 16) for t in (1, 2))
    contract = Contract("trial", "trial", steps, Limits(widths=(16, 16)), "float32", (), (), (), (), True, "{}")
    _, found = compile_policy("trial", library, contract)
    if found.errors:
        raise AssertionError(found.text())


def _plain(arg: Arg) -> str:
    value = float(arg.default) if arg.default is not None else arg.low + (arg.high - arg.low) / 4
    return f"{round(value)}" if arg.form == "int" else f"{value:.6f}"
