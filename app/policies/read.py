"""Node tree -> document: every key known, every value of the form that its key takes, every expression parsed.

Nothing is looked up here: names, parents and the contract come later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from app.policies.diagnostics import Findings, Span, listing, suggest
from app.policies.expr import MAX_NUMBER, Expr, Field, Operation, parse_expression, parse_operation
from app.policies.names import FINAL_PHASES, NORMALIZE, STEP_PHASES, STEP_WORDS, Phase
from app.policies.source import Broken, Items, Node, Scalar, Source, Table, compose

LANGUAGE = 1
MAX_PARAMS = 64
MAX_LINES: Mapping[str, int] = {"keep": 8, "prune": 8, "quota": 16}
NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")

T = TypeVar("T")
Content = Expr | Operation | tuple[Operation, ...] | str | int | None

_INT = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_TOP = (
    "widebeam", "about", "owner", "extends", "abstract", "params", "widths", "load", "underfill", "steps", "final",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Given(Generic[T]):
    """A value and where it stands."""

    value: T
    span: Span


@dataclass(frozen=True, slots=True)
class Setting:
    """What a file says under one phase key. value None = `none`; broken = refused already, so nobody repeats it."""

    value: Content
    span: Span
    broken: bool = False


@dataclass(frozen=True, slots=True)
class ParamDraft:
    """A parameter as one file gives it: value, range (low, high), or parts of them."""

    span: Span
    value: Given[float] | None = None
    range: Given[tuple[float, float]] | None = None
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """One policy file, read."""

    name: str
    file: str
    extends: Given[str] | None = None
    abstract: bool = False
    about: str = ""
    owner: str = ""
    params: Mapping[str, ParamDraft] = field(default_factory=dict)
    widths: Given[tuple[Given[int], ...]] | None = None
    underfill: Given[str] | None = None
    steps: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)
    step_keys: Mapping[str, Span] = field(default_factory=dict)
    final: Mapping[str, Setting] = field(default_factory=dict)


def read(name: str, source: Source, found: Findings) -> Document:
    """A policy file as a document; what was refused is missing or marked broken in it."""
    root = compose(source, found)
    if not isinstance(root, Table):
        if isinstance(root, Scalar) and not root.text:
            found.add("S010", root.span, "the file is empty", "start with `widebeam: 1`")
        elif root is not None and not isinstance(root, Broken):
            found.add("S008", root.span, "a policy is a mapping", "start with `widebeam: 1`")
        return Document(name, source.file)
    return Reader(found).document(name, source.file, root)


class Reader:
    """Reads mappings and values, and reports what they should have been."""

    def __init__(self, found: Findings) -> None:
        self.found = found

    def document(self, name: str, file: str, root: Table) -> Document:
        given = self.fields(root, "the policy", _TOP)
        self.version(given.get("widebeam"), Span(file, 1, 1, 2))
        if "load" in given:
            self.found.add("P003", given["load"][0].span, "`load` is not available in this version")
        steps, step_keys = self.steps(given.get("steps"))
        return Document(
            name=name,
            file=file,
            extends=self.name(given.get("extends")),
            abstract=self.flag(given.get("abstract")),
            about=self.text(given.get("about")),
            owner=self.text(given.get("owner")),
            params=self.params(given.get("params")),
            widths=self.widths(given.get("widths")),
            underfill=self.choice(given.get("underfill"), ("allow", "error")),
            steps=steps,
            step_keys=step_keys,
            final=self.phases(given["final"], FINAL_PHASES, "final") if "final" in given else {},
        )

    def version(self, entry: tuple[Scalar, Node] | None, start: Span) -> None:
        if entry is None:
            self.found.add("S009", start, "`widebeam` is missing", f"start the file with `widebeam: {LANGUAGE}`")
            return
        value = self.integer(entry[1], "widebeam")
        if value is not None and value.value != LANGUAGE:
            help_ = f"this server knows version {LANGUAGE}"
            self.found.add("S017", value.span, f"version {value.value} of the language", help_)

    # ---- mappings --------------------------------------------------------------------------------------------------

    def fields(self, node: Node, where: str, known: Iterable[str]) -> dict[str, tuple[Scalar, Node]]:
        """The entries of a mapping by key; unknown and repeated keys are refused. Empty values are refused too."""
        if not isinstance(node, Table):
            self.form(node, f"{where} is a mapping", "write its keys on lines of their own, indented")
            return {}
        known = tuple(known)
        entries: dict[str, tuple[Scalar, Node]] = {}
        for key, value in node.entries:
            if known and key.text not in known:
                hint = suggest(key.text, known) or f"keys: {', '.join(known)}"
                self.found.add("S007", key.span, f"unknown key `{key.text}` in {where}", hint)
            elif key.text in entries:
                first = entries[key.text][0].span.line
                self.found.add("S003", key.span, f"`{key.text}` is given twice in {where} (first at line {first})")
            elif self.is_empty(value):
                self.found.add("S010", key.span, f"`{key.text}` has no value", "give one, or remove the line")
                entries[key.text] = (key, Broken(value.span))
            else:
                entries[key.text] = (key, value)
        return entries

    def params(self, entry: tuple[Scalar, Node] | None) -> dict[str, ParamDraft]:
        if entry is None:
            return {}
        drafts: dict[str, ParamDraft] = {}
        for name, (key, node) in self.fields(entry[1], "params", ()).items():
            if not NAME.fullmatch(name):
                self.found.add("S011", key.span, f"`{name}` is no name", "names are a-z, 0-9 and _, a letter first")
                continue
            drafts[name] = self.param(name, key, node)
        if len(drafts) > MAX_PARAMS:
            self.found.add("S012", entry[0].span, f"more than {MAX_PARAMS} parameters")
        return drafts

    def param(self, name: str, key: Scalar, node: Node) -> ParamDraft:
        before = len(self.found.errors)
        given = self.fields(node, f"param {name}", ("value", "range", "about"))
        value = self.decimal(given["value"][1], "value") if "value" in given else None
        self.text(given.get("about"))
        ends: Given[tuple[float, float]] | None = None
        if "range" in given:
            span = given["range"][1].span
            numbers = [self.decimal(one, "range") for one in self.items(given["range"][1], "range")]
            values = [one.value for one in numbers if one is not None]
            if len(values) == len(numbers) == 2 and values[0] <= values[1]:
                ends = Given((values[0], values[1]), span)
            elif len(values) == len(numbers) and not isinstance(given["range"][1], Broken):
                self.found.add("S011", span, "a range is two numbers, the lower first", "write `range: [0, 2]`")
        return ParamDraft(key.span, value, ends, broken=len(self.found.errors) > before)

    def steps(self, entry: tuple[Scalar, Node] | None) -> tuple[dict[str, dict[str, Setting]], dict[str, Span]]:
        if entry is None:
            return {}, {}
        steps: dict[str, dict[str, Setting]] = {}
        spans: dict[str, Span] = {}
        for word, (key, node) in self.fields(entry[1], "steps", ()).items():
            if word not in STEP_WORDS and not re.fullmatch("[1-9][0-9]?", word):
                hint = suggest(word, STEP_WORDS) or "step keys: all, first, last, or the number of a step from 1"
                self.found.add("S007", key.span, f"unknown step `{word}`", hint)
                continue
            spans[word] = key.span
            steps[word] = self.phases((key, node), STEP_PHASES, f"step {word}")
        return steps, spans

    def phases(self, entry: tuple[Scalar, Node], phases: Mapping[str, Phase], where: str) -> dict[str, Setting]:
        settings = {}
        for name, (key, node) in self.fields(entry[1], where, phases).items():
            settings[name] = self.setting(phases[name], key, node)
        return settings

    def setting(self, phase: Phase, key: Scalar, node: Node) -> Setting:  # noqa: PLR0911  each refusal returns
        """What stands under a phase key."""
        broken = Setting(None, key.span, broken=True)
        if isinstance(node, Broken):
            return broken
        choice = phase.form == "choice"
        if isinstance(node, Scalar) and node.text == "none" and node.style == "plain" and not choice:
            return Setting(None, node.span)
        if not phase.available:
            self.found.add("P003", key.span, f"`{phase.name}` is not available in this version")
            return broken
        if phase.form == "operations":
            return self.operations(phase, key, node)
        if not isinstance(node, Scalar):
            self.form(node, f"`{phase.name}` takes one {_FORMS[phase.form]}", "")
            return broken
        value: Content = None
        if choice:
            given = self.choice((key, node), NORMALIZE)
            value = given.value if given else None
        elif phase.form == "operation":
            value = parse_operation(node, self.found)
        elif phase.form == "count":
            count = self.integer(node, phase.name, low=1)
            value = count.value if count else None
        else:
            value = parse_expression(node, self.found)
            if phase.form == "field" and value is not None and not (isinstance(value, Field) and value.space == "item"):
                self.found.add("S011", node.span, f"`{phase.name}` takes a field of `item`", "write `item.id`")
                return broken
        return Setting(value, node.span, broken=value is None)

    def operations(self, phase: Phase, key: Scalar, node: Node) -> Setting:
        parsed: list[Operation | None] = []
        before = len(self.found.errors)
        for item in self.items(node, phase.name):
            if isinstance(item, Scalar):
                parsed.append(parse_operation(item, self.found))
            else:
                self.form(item, f"`{phase.name}` is a list of operators", "write one a line, each starting with `- `")
        if len(parsed) > MAX_LINES[phase.name]:
            self.found.add("S012", key.span, f"more than {MAX_LINES[phase.name]} lines under `{phase.name}`")
        good = tuple(one for one in parsed if one is not None)
        return Setting(good, key.span, broken=len(self.found.errors) > before)

    # ---- values ----------------------------------------------------------------------------------------------------

    def items(self, node: Node, where: str) -> tuple[Node, ...]:
        if isinstance(node, Items):
            if not node.items:
                self.found.add("S010", node.span, f"`{where}` is an empty list", "remove it, or write `none`")
            return node.items
        self.form(node, f"`{where}` is a list", "write one entry a line, each starting with `- `")
        return ()

    def widths(self, entry: tuple[Scalar, Node] | None) -> Given[tuple[Given[int], ...]] | None:
        if entry is None:
            return None
        items = self.items(entry[1], "widths")
        numbers = [self.integer(item, "widths", low=1, high=2**31 - 1) for item in items]
        given = tuple(one for one in numbers if one is not None)
        return Given(given, entry[1].span) if len(given) == len(numbers) > 0 else None

    def name(self, entry: tuple[Scalar, Node] | None) -> Given[str] | None:
        if entry is None or not isinstance(entry[1], Scalar):
            if entry is not None:
                self.form(entry[1], f"`{entry[0].text}` takes one name", "")
            return None
        if not NAME.fullmatch(entry[1].text):
            self.found.add(
                "S011",
                entry[1].span,
                f"`{entry[1].text}` is no policy name",
                "names are a-z, 0-9 and _, a letter first",
            )
            return None
        return Given(entry[1].text, entry[1].span)

    def text(self, entry: tuple[Scalar, Node] | None) -> str:
        if entry is None:
            return ""
        if not isinstance(entry[1], Scalar):
            self.form(entry[1], f"`{entry[0].text}` is a text", "")
            return ""
        return entry[1].text

    def flag(self, entry: tuple[Scalar, Node] | None) -> bool:
        given = self.choice(entry, ("true", "false"))
        return given is not None and given.value == "true"

    def choice(self, entry: tuple[Scalar, Node] | None, words: tuple[str, ...]) -> Given[str] | None:
        if entry is None:
            return None
        key, node = entry
        if not isinstance(node, Scalar):
            self.form(node, f"`{key.text}` is one of {', '.join(words)}", "")
            return None
        if node.text not in words or node.style != "plain":
            hint = suggest(node.text, words) or f"one of: {', '.join(words)}"
            self.found.add("S011", node.span, f"`{node.text}` is no value of `{key.text}`", hint)
            return None
        return Given(node.text, node.span)

    def integer(self, node: Node, where: str, low: int = 0, high: int = 10**9) -> Given[int] | None:
        text = self.number_text(node, where)
        if text is None:
            return None
        if not _INT.fullmatch(text) or len(text) > 18:
            hint = "write it in decimal digits, without leading zeros, exponent or quotes"
            self.found.add("S011", node.span, f"`{_short(text)}` is no whole number", hint)
            return None
        if not low <= int(text) <= high:
            self.found.add("S011", node.span, f"{int(text)} is outside {low} to {high}")
            return None
        return Given(int(text), node.span)

    def decimal(self, node: Node, where: str) -> Given[float] | None:
        text = self.number_text(node, where)
        if text is None:
            return None
        if not _NUMBER.fullmatch(text):
            self.found.add("S011", node.span, f"`{_short(text)}` is no number", "write it like `0.5`, `-3` or `1e-6`")
            return None
        value = float(text)
        if not math.isfinite(value) or abs(value) > MAX_NUMBER:
            self.found.add("T010", node.span, f"the number is above {MAX_NUMBER:g}")
            return None
        return Given(value, node.span)

    def number_text(self, node: Node, where: str) -> str | None:
        if not isinstance(node, Scalar):
            self.form(node, f"`{where}` takes a number", "")
            return None
        if node.style != "plain":
            self.found.add("S011", node.span, f"`{where}` takes a number, this is text", "remove the quotes")
            return None
        return node.text

    def form(self, node: Node, message: str, hint: str) -> None:
        if not isinstance(node, Broken):
            self.found.add("S008", node.span, message, hint)

    @staticmethod
    def is_empty(node: Node) -> bool:
        plain = isinstance(node, Scalar) and node.style == "plain" and node.text in ("", "~", "null")
        return plain or (isinstance(node, Table) and not node.entries)


_FORMS: Mapping[str, str] = {
    "number": "expression",
    "condition": "condition",
    "operation": "operator, like `top()`",
    "choice": f"word: {listing(NORMALIZE)}",
    "field": "field, like `item.id`",
    "count": "whole number",
}


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
