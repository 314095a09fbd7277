"""Expressions: text -> our own tree. Read with Python's parser, never evaluated by it.

    expr   := expr (+|-|*|/|**) expr | -expr | number | name | ns.field | func(expr, ...) | (expr)
    cond   := cond and cond | cond or cond | not cond | expr (<|<=|>|>=|==|!=) expr | ctx.x in ["a", "b"] | boolname
    call   := op(arg, ..., key=arg)
    group  := parent | token[i] | prefix[i] | attr.x | attr.x == value | item.x

Length, bracket depth and stacked signs are checked before parsing, nodes after; then an allow-list. Python's columns
are UTF-8 bytes; they become characters here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NoReturn

from app.policies.diagnostics import Findings, Span
from app.policies.expr import (
    Argument,
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
    Operation,
    Text,
)
from app.policies.names import FUNCTIONS_HELP
from app.policies.source import Scalar

MAX_TEXT = 2000
MAX_NODES = 96
MAX_DEPTH = 24
MAX_SIGNS = 16
MAX_NUMBER = 1e30

_BINARY: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_REFUSED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lambda: ("`lambda` is not part of the language", ""),
    ast.ListComp: ("a comprehension is not part of the language", ""),
    ast.SetComp: ("a comprehension is not part of the language", ""),
    ast.DictComp: ("a comprehension is not part of the language", ""),
    ast.GeneratorExp: ("a comprehension is not part of the language", ""),
    ast.NamedExpr: ("`:=` is not part of the language", ""),
    ast.JoinedStr: ("an f-string is not part of the language", ""),
    ast.IfExp: ("`if` ... `else` is not part of the language", "write `where(condition, a, b)`"),
    ast.Starred: ("`*` before an argument is not part of the language", ""),
    ast.Slice: ("a slice is not part of the language", ""),
    ast.Tuple: ("one expression is expected, not several with commas", ""),
    ast.List: ("a list stands only after `in`", ""),
    ast.Dict: ("braces are not part of the language", ""),
    ast.Set: ("braces are not part of the language", ""),
    ast.Await: ("`await` is not part of the language", ""),
    ast.Yield: ("`yield` is not part of the language", ""),
    ast.YieldFrom: ("`yield` is not part of the language", ""),
}
_OTHER_OPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Mod: ("%", ""),
    ast.FloorDiv: ("//", "write `/`"),
    ast.BitAnd: ("&", "write `and`"),
    ast.BitOr: ("|", "write `or`"),
    ast.BitXor: ("^", "write `**` for powers"),
    ast.Invert: ("~", "write `not`"),
    ast.MatMult: ("@", ""),
    ast.LShift: ("<<", ""),
    ast.RShift: (">>", ""),
    ast.Is: ("is", "write `==`"),
    ast.IsNot: ("is not", "write `!=`"),
    ast.NotIn: ("not in", "write `not (x in [...])`"),
}

_TOKEN = re.compile(
    r"(?P<space>[ \t\n]+)|(?P<comment>#[^\n]*)"
    r"|(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<string>\"[^\"\\\n]*\"|'[^'\\\n]*')"
    r"|(?P<op>[-+*/%<>=()\[\]{},.:&|~^@!;])"
)
_OPEN = {")": "(", "]": "[", "}": "{"}


class _Refused(Exception):
    """This expression is done with."""


def parse_expression(scalar: Scalar, found: Findings) -> Expr | None:
    """An expression or a condition; None where it was refused (the finding is recorded)."""
    try:
        reader = _Reader(scalar, found)
        return reader.expr(reader.parse())
    except _Refused:
        return None


def parse_operation(scalar: Scalar, found: Findings) -> Operation | None:
    """A call of an operator; None where it was refused (the finding is recorded)."""
    try:
        reader = _Reader(scalar, found)
        return reader.operation(reader.parse())
    except _Refused:
        return None


class _Reader:
    """One text on its way to a tree."""

    def __init__(self, scalar: Scalar, found: Findings) -> None:
        self.scalar, self.found = scalar, found
        self.text = scalar.text
        self.lines = self.text.split("\n")

    def parse(self) -> ast.expr:
        self.scan()
        try:
            tree = ast.parse(f"(\n{self.text}\n)", mode="eval").body
        except SyntaxError as error:
            self.syntax(error)
        except (ValueError, MemoryError, RecursionError):
            self.refuse("S014", self.scalar.span, "the expression cannot be read")
        if isinstance(tree, ast.Tuple) and not tree.elts:
            self.refuse("S010", self.scalar.span, "the expression is empty")
        if sum(isinstance(node, ast.expr) for node in ast.walk(tree)) > MAX_NODES:
            self.refuse("S012", self.scalar.span, f"the expression has more than {MAX_NODES} parts")
        return tree

    def scan(self) -> None:
        """Refuse before parsing: length, depth, stacked signs, characters and numbers that the language has not."""
        if self.scalar.style == "folded":
            self.refuse(
                "S018", self.scalar.span, "an expression of several lines", "start it with `|` and indent its lines"
            )
        if len(self.text) > MAX_TEXT:
            self.refuse("S012", self.scalar.span, f"the expression has more than {MAX_TEXT} characters")
        opened: list[tuple[str, int]] = []
        signs, before = 0, ""
        for kind, token, at in self.tokens():
            if kind in ("space", "comment"):
                continue
            if before == "number" and kind in ("number", "name") and self.text[at - 1] not in " \t\n":
                self.refuse("S014", self.offset(at), f"`{token}` follows a number directly", "numbers are decimal")
            signs = signs + 1 if token in ("-", "+", "~", "not") else 0
            if signs > MAX_SIGNS or (len(opened) >= MAX_DEPTH and token in _OPEN.values()):
                what = "signs in a row" if signs > MAX_SIGNS else "brackets inside each other"
                limit = MAX_SIGNS if signs > MAX_SIGNS else MAX_DEPTH
                self.refuse("S012", self.offset(at), f"more than {limit} {what}")
            if token in ("(", "[", "{"):
                opened.append((token, at))
            elif token in _OPEN and (not opened or opened.pop()[0] != _OPEN[token]):
                self.refuse("S014", self.offset(at), f"`{token}` was never opened")
            before = kind
        if opened:
            flow = "inside `{...}` or `[...]` a comma ends the value: put quotes round it"
            hint = flow if self.scalar.style == "plain" else ""
            self.refuse("S014", self.offset(opened[-1][1]), f"`{opened[-1][0]}` was never closed", hint)

    def tokens(self) -> Iterator[tuple[str, str, int]]:
        at = 0
        while at < len(self.text):
            match = _TOKEN.match(self.text, at)
            if match is None:
                char = self.text[at]
                what = "a quote that is never closed" if char in "'\"" else f"`{char}` is not part of the language"
                self.refuse("S014", self.offset(at), what)
            yield str(match.lastgroup), match[0], at
            at = match.end()

    def syntax(self, error: SyntaxError) -> NoReturn:
        line, col = (error.lineno or 2) - 2, (error.offset or 1) - 1
        if line >= len(self.lines) or not "".join(self.lines[line:])[col:].strip():
            last = max((at for at, row in enumerate(self.lines) if row.strip()), default=0)
            col = len(self.lines[last].rstrip())
            self.refuse("S014", self.scalar.at(last, col, col + 1), "the expression ends too early")
        end = (error.end_offset or 0) - 1 if error.end_lineno == error.lineno else 0
        message = error.msg[:1].lower() + error.msg[1:]
        self.refuse("S014", self.scalar.at(max(line, 0), max(col, 0), end), message.rstrip("."))

    def expr(self, node: ast.expr) -> Expr:  # noqa: PLR0911, PLR0912  one case a node type
        """One allowed node."""
        span = self.span(node)
        match node:
            case ast.Constant():
                return self.constant(node, span)
            case ast.Name():
                return Name(node.id, span)
            case ast.Attribute(value=ast.Name() as space):
                start = self.column(node.end_lineno, node.end_col_offset) - len(node.attr)
                return Field(
                    space.id, node.attr, span, self.scalar.at((node.end_lineno or 2) - 2, start, start + len(node.attr))
                )
            case ast.Attribute():
                return self.refuse("S015", span, "one dot is allowed: `namespace.name`")
            case ast.Subscript():
                return self.index(node, span)
            case ast.Call():
                return self.call(node, span)
            case ast.UnaryOp(op=ast.USub()):
                return Negate(self.expr(node.operand), span)
            case ast.UnaryOp(op=ast.UAdd()):
                return self.expr(node.operand)
            case ast.UnaryOp(op=ast.Not()):
                return Not(self.expr(node.operand), span)
            case ast.BinOp() if type(node.op) in _BINARY:
                return Binary(_BINARY[type(node.op)], self.expr(node.left), self.expr(node.right), span)
            case ast.BoolOp():
                op = "and" if isinstance(node.op, ast.And) else "or"
                return Logic(op, tuple(self.expr(item) for item in node.values), span)
            case ast.Compare():
                return self.compare(node, span)
            case ast.BinOp() | ast.UnaryOp():
                return self.other(node.op, span)
            case _:
                return self.refuse("S015", span, *_REFUSED.get(type(node), ("this is not part of the language", "")))

    def constant(self, node: ast.Constant, span: Span) -> Expr:
        if isinstance(node.value, str):
            return Text(node.value, span)
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            self.refuse("S015", span, f"`{node.value!r}` is not part of the language")
        if abs(node.value) > MAX_NUMBER:
            self.refuse("T010", span, f"the number is above {MAX_NUMBER:g}")
        return Number(float(node.value), span)

    def index(self, node: ast.Subscript, span: Span) -> Expr:
        match node:
            case ast.Subscript(value=ast.Name(id=base), slice=ast.Constant(value=int(at))) if not isinstance(at, bool):
                return Index(base, at, span)
        if isinstance(node.slice, ast.Slice):
            self.refuse("S015", span, *_REFUSED[ast.Slice])
        return self.refuse("S015", span, "an index is a plain number", "write `token[1]` or `prefix[1]`")

    def call(self, node: ast.Call, span: Span) -> Expr:
        if not isinstance(node.func, ast.Name):
            called = ast.unparse(node.func)
            self.refuse("T007", self.span(node.func), f"unknown function `{called}`", FUNCTIONS_HELP)
        if node.keywords:
            self.refuse("S015", span, f"`{node.func.id}` takes its arguments by place")
        return Call(node.func.id, tuple(self.expr(arg) for arg in node.args), span, self.span(node.func))

    def compare(self, node: ast.Compare, span: Span) -> Expr:
        if len(node.ops) > 1:
            self.refuse("S015", span, "a chain of comparisons", "join them with `and`")
        op, right = node.ops[0], node.comparators[0]
        if type(op) in _COMPARE:
            return Compare(_COMPARE[type(op)], self.expr(node.left), self.expr(right), span)
        if not isinstance(op, ast.In):
            self.other(op, span)
        values = (
            [one.value for one in right.elts if isinstance(one, ast.Constant)] if isinstance(right, ast.List) else []
        )
        texts = tuple(one for one in values if isinstance(one, str))
        if not isinstance(right, ast.List) or len(texts) != len(right.elts) or not texts:
            self.refuse("S015", self.span(right), "a list of quoted texts stands after `in`", 'write `in ["a", "b"]`')
        return OneOf(self.expr(node.left), texts, span)

    def operation(self, node: ast.expr) -> Operation:
        """`op(arg, key=arg)`."""
        span = self.span(node)
        if isinstance(node, ast.Name):
            self.refuse("S014", span, "an operator needs its brackets", f"write `{node.id}()`")
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            self.refuse("S014", span, "an operator is expected here", "write `operator(argument, key=value)`")
        args = [Argument(None, self.expr(arg), self.span(arg)) for arg in node.args]
        for keyword in node.keywords:
            if keyword.arg is None:
                self.refuse("S015", span, "`**` before an argument is not part of the language")
            start = self.column(keyword.lineno, keyword.col_offset)
            place = self.scalar.at(keyword.lineno - 2, start, start + len(keyword.arg))
            args.append(Argument(keyword.arg, self.expr(keyword.value), place))
        return Operation(node.func.id, tuple(args), span, self.span(node.func))

    def other(self, op: ast.AST, span: Span) -> NoReturn:
        sign, hint = _OTHER_OPS.get(type(op), ("this sign", ""))
        self.refuse("S015", span, f"`{sign}` is not part of the language", hint)

    def span(self, node: ast.expr) -> Span:
        line = node.lineno - 2
        start = self.column(node.lineno, node.col_offset)
        same = node.end_lineno == node.lineno
        end = self.column(node.end_lineno, node.end_col_offset) if same else len(self.lines[line])
        return self.scalar.at(line, start, end)

    def column(self, lineno: int | None, col: int | None) -> int:
        """Python's UTF-8 byte column -> characters."""
        row = self.lines[(lineno or 2) - 2]
        return len(row.encode()[: col or 0].decode(errors="ignore"))

    def offset(self, at: int) -> Span:
        line = self.text.count("\n", 0, at)
        col = at - (self.text.rfind("\n", 0, at) + 1)
        return self.scalar.at(line, col, col + 1)

    def refuse(self, code: str, span: Span, message: str, hint: str = "") -> NoReturn:
        self.found.add(code, span, message, hint)
        raise _Refused
