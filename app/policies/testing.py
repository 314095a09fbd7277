"""Runs the cases of one step: through the compiled plan, and beside it through the oracle in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.core import Contract
from app.ops.selection import select_top
from app.policies import noise
from app.policies.cases import Parent, StepCase, Value
from app.policies.diagnostics import Diagnostic, Span
from app.policies.facts import Facts
from app.policies.plan import Plan, Scored, StepInputs, StepProgram
from app.policies.reference import Grid, score_step
from app.policies.reference_select import select_step
from app.policies.rules import Rule
from app.policies.selfcheck import near

FAILED: Final = Rule("test", "error", "a test of a policy fails")
SCORE: Final = 2e-3
"""How far a written score may be from the computed one: people write three digits."""

Pair = tuple[int, int]


class Unfit(Exception):
    """The case does not fit the policy or the deployment: where, and why."""

    def __init__(self, span: Span, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.span, self.message, self.hint = span, message, hint


@dataclass(frozen=True)
class Ran:
    """What became of a case. failures: empty = it passes."""

    case: StepCase
    failures: tuple[Diagnostic, ...]


def failure(span: Span, message: str, hint: str, lines: Sequence[str]) -> Diagnostic:
    """A failed expectation as a finding of the test file; `lines` are the file's."""
    excerpt = lines[span.line - 1] if 0 < span.line <= len(lines) else ""
    return Diagnostic(span, FAILED, message, hint, excerpt)


def run_case(case: StepCase, plan: Plan, contract: Contract, facts: Facts, lines: Sequence[str]) -> Ran:
    """Run one case on a plan compiled for the contract."""
    try:
        return Ran(case, tuple(_run(case, _with_params(case, plan.at(case.load or "normal")), contract, facts, lines)))
    except Unfit as error:
        return Ran(case, (failure(error.span, f"{case.name}: {error.message}", error.hint, lines),))


def _run(case: StepCase, plan: Plan, contract: Contract, facts: Facts, lines: Sequence[str]) -> list[Diagnostic]:
    t = case.step.value
    if t > len(contract.steps):
        raise Unfit(case.step.span, f"there is no step {t}", f"the deployment has steps 1 to {len(contract.steps)}")
    program = plan.structure.steps[t - 1]
    grid = _grid(case, plan, program, contract, facts)
    told: list[tuple[str, Tensor]] = []
    inputs = inputs_of(grid, plan, program, case.seed)
    scored = program.run(inputs._replace(told=lambda phase, who: told.append((phase, who))))
    got = _survivors(scored, grid)
    wrong: list[Diagnostic] = []

    def fails(span: Span, message: str, hint: str = "") -> None:
        wrong.append(failure(span, f"{case.name}: {message}", hint, lines))

    if tuple(got) != case.survivors.value:
        message = f"survivors are {_pairs(got)}, expected {_pairs(case.survivors.value)}"
        fails(case.survivors.span, message, _account(grid, told, got))
    elif case.scores is not None:
        scores = [float(scored.score[at]) for at in got]
        expected = case.scores.value
        apart = len(scores) != len(expected) or any(
            abs(one - two) > SCORE * max(1.0, abs(two)) for one, two in zip(scores, expected, strict=False)
        )
        if apart:
            shown = ", ".join(f"{one:.4g}" for one in scores)
            fails(case.scores.span, f"scores are [{shown}]")
    problem = differs(plan, grid, scored, got)
    if problem is not None:
        hint = "this is a bug of Widebeam, not of the policy: please report it with this test"
        fails(case.span, f"the compiled plan and the reference differ: {problem}", hint)
    return wrong


def _with_params(case: StepCase, plan: Plan) -> Plan:
    """The plan with the case's parameter values."""
    table = plan.resolved["params"]
    assert isinstance(table, Mapping)
    for name, given in case.params.items():
        if name not in table:
            raise Unfit(given.span, f"{plan.policy} has no parameter `{name}`")
        low, high = map(float, table[name]["range"])
        if not low <= given.value <= high:
            raise Unfit(given.span, f"param {name} is {given.value:g}; allowed range is {low:g} to {high:g}")
    names = plan.structure.params
    values = [
        case.params[name].value if name in case.params else value
        for name, value in zip(names, plan.params, strict=True)
    ]
    return replace(plan, params=tuple(values))


# ---- a case as a grid ----------------------------------------------------------------------------------------------


def _grid(case: StepCase, plan: Plan, program: StepProgram, contract: Contract, facts: Facts) -> Grid:
    t, size = case.step.value, contract.sizes[case.step.value - 1]
    parents = case.parents
    if t == 1 and len(parents) > 1:
        raise Unfit(parents[1].span, "step 1 has one parent, the root")
    count = 1 + max(max((*one.logits, *one.trie, *one.seen, *one.exclude), default=0) for one in parents)
    if count > size:
        raise Unfit(case.span, f"code {count - 1} is above the codes of step {t}, 0 to {size - 1}")
    logits = np.full((len(parents), count), -np.inf, np.float32)
    for row, one in zip(logits, parents, strict=True):
        row[list(one.logits)] = list(one.logits.values())
    trie = _sets([one.trie for one in parents], count)
    prefix = _prefix(case, program)
    code = np.tile(np.arange(count), (len(parents), 1))
    return Grid(
        logits=logits,
        code=code,
        legal=trie if program.children else np.ones_like(trie),
        trie=trie,
        seen=_sets([one.seen for one in parents], count),
        excluded=_sets([one.exclude for one in parents], count),
        parent=np.array([one.score for one in parents], np.float32),
        log_norm=None,
        params=dict(zip(plan.structure.params, plan.params, strict=True)),
        step=t,
        width=case.width or plan.widths[t - 1],
        order=np.arange(len(parents)),
        prefix=prefix,
        carry=_carry(case, program),
        noise=drawn(program, prefix, code, t, case.seed),
        extra={key: _column(key, case, facts, count) for key in sorted(program.uses) if "." in key},
        labels={key: one.labels for key, one in facts.items() if one.labels},
        vocab=size,
    )


def _sets(sets: Sequence[frozenset[int]], count: int) -> npt.NDArray[np.bool_]:
    out = np.zeros((len(sets), count), bool)
    for row, one in zip(out, sets, strict=True):
        row[sorted(one)] = True
    return out


def _prefix(case: StepCase, program: StepProgram) -> npt.NDArray[np.int64]:
    """The codes of each parent; where the policy does not read them, any will do."""
    before = case.step.value - 1
    needed = bool({"prefix", "seed"} & program.uses)
    rows = []
    for at, one in enumerate(case.parents):
        if len(one.prefix) != before and (one.prefix or needed):
            raise Unfit(
                one.span, f"a parent of step {before + 1} has a prefix of {before} codes", "give it under `prefix`"
            )
        rows.append(one.prefix or (at,) * before)
    return np.array(rows, np.int64).reshape(len(rows), before)


def _carry(case: StepCase, program: StepProgram) -> npt.NDArray[np.float32] | None:
    if case.step.value == 1 or "carry" not in program.uses:
        return None
    for one in case.parents:
        if one.carry is None:
            raise Unfit(one.span, "this policy's beams carry a number", "give the parent's group or number as `carry`")
    return np.array([one.carry for one in case.parents], np.float32)


def drawn(
    program: StepProgram, prefix: npt.NDArray[np.int64], code: npt.NDArray[np.int64], t: int, seed: int
) -> dict[str, npt.NDArray[np.float32]]:
    """The noise of candidates [n, F], where the program draws any."""
    if "seed" not in program.uses:
        return {}
    seeds, rows, codes = torch.full((len(prefix),), seed), torch.from_numpy(prefix), torch.from_numpy(code)
    return {
        "gumbel": noise.gumbel(seeds, rows, codes, t).numpy(),
        "uniform": noise.uniform(seeds, rows, codes, t).numpy(),
        "explore": noise.gumbel(seeds, rows, codes, t, noise.EXPLORE).numpy(),
    }


def _column(key: str, case: StepCase, facts: Facts, count: int) -> npt.NDArray[np.generic]:
    """A column [n, F] of the case's values; those of codes that it does not name are 0, false or unknown."""
    declared = facts.get(key)
    form = declared.form if declared else "condition"
    labels = declared.labels if declared else ()
    kinds = {"number": np.dtype(np.float32), "condition": np.dtype(bool), "text": np.dtype(np.int64)}
    out = np.full((len(case.parents), count), -1 if form == "text" else 0, kinds[form])
    for row, one in zip(out, case.parents, strict=True):
        given = one.columns.get(key, case.columns.get(key))
        if given is None:
            raise Unfit(one.span, f"the policy reads `{key}`", "give it under `columns`, of the parent or of the test")
        values = given if isinstance(given, Mapping) else dict.fromkeys(range(count), given)
        for code, value in values.items():
            if code < count:
                row[code] = _cell(value, form, labels, key, one)
    return out


def _cell(value: Value, form: str, labels: tuple[str, ...], key: str, parent: Parent) -> float | bool | int:
    if form == "text":
        if str(value) not in labels:
            raise Unfit(parent.span, f"`{key}` has no value `{value}`", f"values: {', '.join(labels)}")
        return labels.index(str(value))
    if isinstance(value, bool) != (form == "condition") or isinstance(value, str):
        raise Unfit(parent.span, f"`{key}` is a {'flag' if form == 'condition' else 'number'}, not `{value}`")
    return value


def inputs_of(grid: Grid, plan: Plan, program: StepProgram, seed: int) -> StepInputs:
    """The same for the compiled step."""
    n, uses = len(grid.parent), program.uses
    assert grid.order is not None
    assert grid.prefix is not None
    extra = {key: torch.from_numpy(np.ascontiguousarray(column)) for key, column in grid.extra.items()}
    return StepInputs(
        logits=torch.from_numpy(grid.logits),
        log_norm=None,
        code=torch.from_numpy(grid.code),
        legal=torch.from_numpy(grid.legal),
        trie=torch.from_numpy(grid.trie) if "trie" in uses else None,
        seen=torch.from_numpy(grid.seen) if "seen" in uses else None,
        excluded=torch.from_numpy(grid.excluded),
        parent=torch.from_numpy(grid.parent),
        params=torch.tensor(plan.params, dtype=torch.float32).expand(n, len(plan.params)),
        step=grid.step,
        width=torch.full((n,), float(grid.width)),
        request=torch.zeros(n, dtype=torch.int64),
        order=torch.from_numpy(grid.order),
        widths=(grid.width,),
        rows=(n,),
        prefix=torch.from_numpy(grid.prefix),
        seed=torch.full((n,), seed),
        carry=None if grid.carry is None else torch.from_numpy(grid.carry),
        extra={key: one[:, 0] if key.startswith(("user.", "ctx.")) else one for key, one in extra.items()},
    )


# ---- what came of it -----------------------------------------------------------------------------------------------


def _survivors(scored: Scored, grid: Grid) -> list[Pair]:
    assert grid.order is not None
    order, code = torch.from_numpy(grid.order), torch.from_numpy(grid.code)
    best = select_top(scored.rank, code, order, grid.logits.shape[1], [0, len(grid.parent)], [grid.width])
    kept = int(best.n_valid[0])
    return list(zip(best.parent[:kept].tolist(), best.column[:kept].tolist(), strict=True))


def differs(plan: Plan, grid: Grid, scored: Scored, got: Sequence[Pair]) -> str | None:
    """How the compiled step differs from the oracle: scores, or survivors other than near-ties. None = not at all."""
    steps = plan.resolved["steps"]
    assert isinstance(steps, list)
    phases = steps[grid.step - 1]
    ranks = score_step(phases, grid, plan.operators)
    if not near(scored.score.numpy(), ranks.score):
        return "scores"
    want = select_step(phases, grid, plan.operators, ranks).survivors
    if list(got) == want:
        return None
    close = len(got) == len(want) and near(*(np.array([ranks.rank[at] for at in one]) for one in (got, want)))
    return None if close else f"survivors {_pairs(got)} and {_pairs(want)}"


def _account(grid: Grid, told: Sequence[tuple[str, Tensor]], got: Sequence[Pair]) -> str:
    """Each candidate with a logit: its rank, or the phase that removed it."""
    rank = next(who for phase, who in told if phase == "rank")
    parts = []
    for row, code in zip(*np.nonzero(grid.logits > -np.inf), strict=True):
        gone = next((phase for phase, who in told if not _left(who, row, code)), None)
        value = float(rank[row, code])
        text = f"[{row}, {code}]"
        text += f" rank {value:.4g}" if value > -np.inf else ""
        if gone is not None:
            text += f" removed by {'numbers' if gone == 'rank' else 'trie' if gone == 'logits' else gone}"
        elif (row, code) not in got:
            text += " beyond the width"
        parts.append((-value, text))
    return "; ".join(text for _, text in sorted(parts))


def _left(who: Tensor, row: int, code: int) -> bool:
    return bool(who[row, code]) if who.dtype == torch.bool else bool(who[row, code] > -torch.inf)


def _pairs(pairs: Sequence[Pair]) -> str:
    return str([list(one) for one in pairs]) if pairs else "none"
