"""A step's expressions as C, for the selection kernels (`app/ops/selection/ranked.cuh`): ranks are then made where the
logits are read, and no tensor of them is written.

The text depends on the structure alone: parameters, widths and what requests say are read from a table, so that an edit
of parameters compiles nothing and arms share a kernel. Of the operators of rows `top_k`, `min_p` and `epsilon` have
such a form, of the ways to select `top` and `stochastic`; those of requests and the place among siblings have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from app.ops.selection import MOST_COLUMNS
from app.policies.check_types import constant
from app.policies.expr import Binary, Call, Compare, Expr, Field, Logic, Name, Negate, Not, OneOf, Text, show
from app.policies.generated import Generated
from app.policies.infinities import told
from app.policies.lower import MAX_PRODUCT, Scope, lower_condition, lower_number

FLOORS = {"min_p": "add(best, {})", "epsilon": "{}"}
"""Operators of `keep` that leave what reaches a log-probability, by the row's largest, `best`, and that of their p."""
HEADS = frozenset({"top_k"})
"""Operators of `keep` that leave so many of a row."""
KEEPS = HEADS | FLOORS.keys()
DRAWN = {"gumbel": "RANK_GUMBEL", "uniform": "RANK_UNIFORM"}
"""Names whose numbers the kernels draw, each where it is read, and what asks them to."""
SELECTS = frozenset({"top", "stochastic"})
"""Ways to select that have such a form."""
_BINARY = {"+": "add", "-": "sub", "*": "mul", "/": "div"}
_CALLS = {"min": "lesser", "max": "larger", "log": "log_of", "exp": "exp_of", "sqrt": "root", "abs": "size_of",
          "sigmoid": "sigmoid"}  # fmt: skip
_OWN = frozenset({"logit", "logp", "parent", "score"})
"""Names that the kernels give."""
_OF_ROWS = frozenset({"param", "user", "ctx"})


class _NoForm(Exception):
    """An expression that the kernels have no form for, and why."""


def generate(
    logits: Expr | None, keep: Sequence[tuple[str, Expr]], score: Expr, rank: Expr | None, scope: Scope, *,
    normalized: bool, stochastic: bool = False,
) -> Generated | str:  # fmt: skip
    """The step's phases as C, or why there is none.

    logits, rank  None where they are `logit` and `score` · keep: operators, of KEEPS, and their n or p
    stochastic    the way to select: its rank, which is handed on, is made of the score
    """
    if keep and logits is not None:
        return "keep works on changed logits"
    text = _Text(scope)
    try:
        lines = [f"#define RANK_NORMED {int(normalized)}"]
        if logits is not None:
            lines.append(f"#define RANK_LOGIT {text.number(logits)}")
        floors = [FLOORS[op].format(f"log_64({text.number(p)})") for op, p in keep if op in FLOORS]
        if floors:
            lines.append(f"#define RANK_FLOOR {reduce(lambda one, other: f'larger({one}, {other})', floors)}")
        heads = [text.number(n) for op, n in keep if op in HEADS]
        if heads:  # in any order: each leaves the beginning of the same order of a row
            lines.append(f"#define RANK_MOST {reduce(lambda one, other: f'lesser({one}, {other})', heads)}")
        lines.append(f"#define RANK_SCORE {text.number(score)}")
        if rank is not None:
            lines.append(f"#define RANK {text.number(rank)}")
        if stochastic:
            lines.append(f"#define RANK_DRAWN add(score, {text.draw('gumbel')})")
            lines.append(f"#define RANK conditioned(drawn, top, {text.value('carry')})")
    except _NoForm as error:
        return str(error)
    if len(text.columns) > MOST_COLUMNS:
        return f"it reads {len(text.columns)} numbers of a candidate, and kernels {MOST_COLUMNS}"
    lines += [f"#define RANK_VALUES {len(text.values)}", f"#define RANK_COLUMNS {len(text.columns)}"]
    lines += [f"#define {DRAWN[name]} 1" for name in text.drawn]
    if not text.drawn:
        facts = told(score, rank, scope, normalized=normalized)
        lines += ["#define RANK_TELLS 1"] * facts.score + ["#define RANK_MASKED 1"] * facts.masked
    made = "\n".join(lines) + "\n"
    return Generated(made, tuple(text.values), tuple(text.columns), noisy=bool(text.drawn), carries=stochastic)


@dataclass
class _Text:
    """Expressions on their way to C, with the names that they read."""

    scope: Scope
    values: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)

    def number(self, node: Expr) -> str:  # noqa: PLR0911, PLR0912  one case a node type
        """A number: one call an operation, in the written order."""
        known = lower_number(node, self.scope)
        if isinstance(known, np.float32):
            return f"__int_as_float({known.view(np.uint32):#x})"
        match node:
            case Name(name=name) if name in _OWN:
                return name
            case Name(name=name) if name in DRAWN:
                return self.draw(name)
            case Name(name="prob"):
                return "prob_of(logp)"
            case Name(name="width"):
                return self.value("width")
            case Field(space=space, name=name):
                return self.named(space, f"{space}.{name}")
            case Negate(value=value):
                return f"minus({self.number(value)})"
            case Binary(op="**", left=left, right=right):
                return _power(self.number(left), constant(right) or 0.0)
            case Binary(op=op, left=left, right=right):
                return f"{_BINARY[op]}({self.number(left)}, {self.number(right)})"
            case Call(function="where", args=(condition, a, b)):
                return f"({self.condition(condition)} ? {self.number(a)} : {self.number(b)})"
            case Call(function="clip", args=(x, low, high)):
                return f"lesser(larger({self.number(x)}, {self.number(low)}), {self.number(high)})"
            case Call(function=function, args=(first, *rest)) if function in _CALLS:
                out = self.number(first) if rest else f"{_CALLS[function]}({self.number(first)})"
                for one in rest:
                    out = f"{_CALLS[function]}({out}, {self.number(one)})"
                return out
        raise _NoForm(f"`{show(node)}` is not computed inside the kernels")

    def condition(self, node: Expr) -> str:  # noqa: PLR0911  one case a node type
        """A truth value."""
        known = lower_condition(node, self.scope)
        if isinstance(known, bool):
            return str(known).lower()
        match node:
            case Not(value=value):
                return f"!({self.condition(value)})"
            case Logic(op=op, items=items):
                return "(" + f" {'||' if op == 'or' else '&&'} ".join(self.condition(item) for item in items) + ")"
            case Compare(left=Field(space="ctx"), right=Text()) | OneOf(left=Field(space="ctx")):
                return f"({self.value(show(node))} != 0.f)"
            case Compare(left=Field() as field_, right=Text()) | OneOf(left=Field() as field_):
                return self.category(node, field_)
            case Compare(op=op, left=left, right=right):
                return f"({self.number(left)} {op} {self.number(right)})"
            case Name(name=name) if name in ("trie", "seen"):
                return f"({self.column(name)} != 0.f)"
            case Field(space=space, name=name):
                return f"({self.named(space, f'{space}.{name}')} != 0.f)"
        raise _NoForm(f"`{show(node)}` is not computed inside the kernels")

    def category(self, node: Expr, of: Field) -> str:
        """A category is a number, its labels' places; -1 is unknown and equals none."""
        key = f"{of.space}.{of.name}"
        values = node.values if isinstance(node, OneOf) else ()
        different = False
        if isinstance(node, Compare) and isinstance(node.right, Text):
            values, different = (node.right.value,), node.op == "!="
        labels = self.scope.facts[key].labels
        numbers = [labels.index(value) for value in values if value in labels]
        among = " || ".join(f"{self.named(of.space, key)} == {number}.f" for number in numbers) or "false"
        return f"{'!' if different else ''}({among})"

    def named(self, space: str, key: str) -> str:
        """A declared value: of the row where the request, or the row alone, determines it."""
        row = space in _OF_ROWS or (space == "head" and self.scope.facts[key].fixed)
        return self.value(key) if row else self.column(key)

    def value(self, name: str) -> str:
        """A number of the row."""
        if name not in self.values:
            self.values.append(name)
        return f"value({self.values.index(name)})"

    def draw(self, name: str) -> str:
        """A number that is drawn, of DRAWN."""
        if name not in self.drawn:
            self.drawn.append(name)
        return name

    def column(self, name: str) -> str:
        """A number of the candidate."""
        if name not in self.columns:
            self.columns.append(name)
        return f"column({self.columns.index(name)})"


def _power(base: str, exponent: float) -> str:
    """As `lower` has it: whole exponents as products, which are the same everywhere."""
    whole = int(abs(exponent)) if exponent == int(exponent) and abs(exponent) <= MAX_PRODUCT else None
    if whole is None:
        return f"root({base})" if exponent == 0.5 else f"power({base}, {float(np.float32(exponent))!r}f)"
    if whole == 0:
        raise _NoForm("a power of 0 is not computed inside the kernels")
    out = base
    for _ in range(whole - 1):
        out = f"mul({out}, {base})"
    return f"div(1.f, {out})" if exponent < 0 else out
