"""Expressions of the language as a tree, and as their canonical text; `parse.py` reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from app.policies.diagnostics import Span


@dataclass(frozen=True, slots=True)
class Number:
    """A constant."""

    value: float
    span: Span


@dataclass(frozen=True, slots=True)
class Name:
    """A name of the phase: `logp`."""

    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class Field:
    """A name of a namespace: `param.temp`; `name_span` is the part after the dot."""

    space: str
    name: str
    span: Span
    name_span: Span


@dataclass(frozen=True, slots=True)
class Index:
    """`token[i]` or `prefix[i]`."""

    base: str
    index: int
    span: Span


@dataclass(frozen=True, slots=True)
class Text:
    """A quoted text, for comparisons with `ctx` and attributes."""

    value: str
    span: Span


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the language: `log(x)`."""

    function: str
    args: tuple[Expr, ...]
    span: Span
    name_span: Span


@dataclass(frozen=True, slots=True)
class Negate:
    """`-x`."""

    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Binary:
    """`left op right` with op one of + - * / **."""

    op: str
    left: Expr
    right: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Compare:
    """`left op right` with op one of < <= > >= == !=."""

    op: str
    left: Expr
    right: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class OneOf:
    """`left in ["a", "b"]`."""

    left: Expr
    values: tuple[str, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Not:
    """`not x`."""

    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Logic:
    """`a and b and ...` or `a or b or ...`."""

    op: str
    items: tuple[Expr, ...]
    span: Span


Expr = Number | Name | Field | Index | Text | Call | Negate | Binary | Compare | OneOf | Not | Logic


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an operator; `name` is None where it is given by place."""

    name: str | None
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Operation:
    """A call of an operator: `cap(token[1], max=8)`."""

    op: str
    args: tuple[Argument, ...]
    span: Span
    name_span: Span


def number_text(value: float) -> str:
    """The shortest decimal that reads back as the same number."""
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return re.sub(r"e\+?(-?)0*", r"e\1", repr(value))  # 1e-06 is 1e-6


_LEVEL = {"or": 1, "and": 2, "+": 5, "-": 5, "*": 6, "/": 6, "**": 8}


def show(node: Expr, above: int = 0) -> str:
    """The canonical text of an expression: one spelling for each tree, brackets only where they are needed."""
    text, level = _show(node)
    return f"({text})" if level < above else text


def _show(node: Expr) -> tuple[str, int]:  # noqa: PLR0911  one case a node type
    match node:
        case Number(value=value):
            return number_text(value), 9
        case Name(name=name):
            return name, 9
        case Field(space=space, name=name):
            return f"{space}.{name}", 9
        case Index(base=base, index=index):
            return f"{base}[{index}]", 9
        case Text(value=value):
            return _quoted(value), 9
        case Call(function=function, args=args):
            return f"{function}({', '.join(show(arg) for arg in args)})", 9
        case Negate(value=value):
            return f"-{show(value, 7)}", 7
        case Binary(op=op, left=left, right=right):
            level = _LEVEL[op]
            # `**` binds to the right, the others to the left
            sides = (level + 1, 7) if op == "**" else (level, level + 1)
            return f"{show(left, sides[0])} {op} {show(right, sides[1])}", level
        case Compare(op=op, left=left, right=right):
            return f"{show(left, 5)} {op} {show(right, 5)}", 4
        case OneOf(left=left, values=values):
            return f"{show(left, 5)} in [{', '.join(_quoted(one) for one in values)}]", 4
        case Not(value=value):
            return f"not {show(value, 3)}", 3
        case Logic(op=op, items=items):
            level = _LEVEL[op]
            return f" {op} ".join(show(item, level + 1) for item in items), level


def _quoted(value: str) -> str:
    return f"'{value}'" if '"' in value else f'"{value}"'


def show_operation(node: Operation) -> str:
    """The canonical text of an operator call."""
    args = (show(arg.value) if arg.name is None else f"{arg.name}={show(arg.value)}" for arg in node.args)
    return f"{node.op}({', '.join(args)})"


def children(node: Expr) -> tuple[Expr, ...]:
    """The parts of a node."""
    match node:
        case Call(args=parts) | Logic(items=parts):
            return parts
        case Negate(value=value) | Not(value=value) | OneOf(left=value):
            return (value,)
        case Binary(left=left, right=right) | Compare(left=left, right=right):
            return (left, right)
    return ()


def walk(node: Expr) -> Iterator[Expr]:
    """A node and everything below it."""
    yield node
    for part in children(node):
        yield from walk(part)
