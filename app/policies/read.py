"""Node tree -> document: every key known, every value of the form that its key takes, every expression parsed.

Nothing is looked up here: names, parents and the contract come later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from app.core import Level
from app.policies.diagnostics import Findings, Span, listing, suggest
from app.policies.expr import Expr, Field, Operation
from app.policies.names import FINAL_PHASES, NORMALIZE, OWN_LEVELS, STEP_PHASES, STEP_WORDS, Phase
from app.policies.parse import parse_expression, parse_operation
from app.policies.source import Broken, Node, Scalar, Source, Table, compose
from app.policies.values import NAME, Given, Values

MAX_PARAMS = 64
MAX_LINES: Mapping[str, int] = {"keep": 8, "prune": 8, "quota": 16}

Content = Expr | Operation | tuple[Operation, ...] | str | int | None

_TOP = (
    "widebeam", "about", "owner", "extends", "abstract", "params", "widths", "load", "underfill", "steps", "final",
)  # fmt: skip


Widths = Given[tuple[Given[int], ...]]
"""Survivors after each step, each with its place."""


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
    """One policy file, read. load: levels with their widths, None = `none`."""

    name: str
    file: str
    extends: Given[str] | None = None
    abstract: bool = False
    about: str = ""
    owner: str = ""
    params: Mapping[str, ParamDraft] = field(default_factory=dict)
    widths: Widths | None = None
    load: Mapping[Level, Given[Widths | None]] = field(default_factory=dict)
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
    return _Reader(found).document(name, source.file, root)


class _Reader(Values):
    """One file."""

    def document(self, name: str, file: str, root: Table) -> Document:
        given = self.fields(root, "the policy", _TOP)
        self.version(given.get("widebeam"), Span(file, 1, 1, 2))
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
            load=self.load(given.get("load")),
            underfill=self.choice(given.get("underfill"), ("allow", "error")),
            steps=steps,
            step_keys=step_keys,
            final=self.phases(given["final"], FINAL_PHASES, "final") if "final" in given else {},
        )

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
            self.refuse_form(node, f"`{phase.name}` takes one {_FORMS[phase.form]}", "")
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
                self.refuse_form(
                    item, f"`{phase.name}` is a list of operators", "write one a line, each starting with `- `"
                )
        if len(parsed) > MAX_LINES[phase.name]:
            self.found.add("S012", key.span, f"more than {MAX_LINES[phase.name]} lines under `{phase.name}`")
        good = tuple(one for one in parsed if one is not None)
        return Setting(good, key.span, broken=len(self.found.errors) > before)

    def load(self, entry: tuple[Scalar, Node] | None) -> dict[Level, Given[Widths | None]]:
        """Widths by load level; `busy: none` takes back what is inherited."""
        levels: dict[Level, Given[Widths | None]] = {}
        for word, (key, node) in self.fields(entry[1], "load", ()).items() if entry else ():
            level = next((one for one in OWN_LEVELS if one == word), None)
            if level is None:
                own = "`normal` is the policy's own `widths`" if word == "normal" else ""
                hint = own or suggest(word, OWN_LEVELS) or f"load levels: {listing(OWN_LEVELS)}"
                self.found.add("S007", key.span, f"unknown load level `{word}`", hint)
            elif isinstance(node, Scalar) and node.text == "none" and node.style == "plain":
                levels[level] = Given(None, key.span)
            else:
                given = self.fields(node, f"load {word}", ("widths",))
                if isinstance(node, Table) and "widths" not in given:
                    self.found.add("S009", key.span, f"load {word} has no `widths`", "write `{widths: [64, 128, 256]}`")
                widths = self.widths(given.get("widths"))
                if widths is not None:
                    levels[level] = Given(widths, key.span)
        return levels

    def widths(self, entry: tuple[Scalar, Node] | None) -> Widths | None:
        if entry is None:
            return None
        items = self.items(entry[1], "widths")
        numbers = [self.integer(item, "widths", low=1, high=2**31 - 1) for item in items]
        given = tuple(one for one in numbers if one is not None)
        return Given(given, entry[1].span) if len(given) == len(numbers) > 0 else None


_FORMS: Mapping[str, str] = {
    "number": "expression",
    "condition": "condition",
    "operation": "operator, like `top()`",
    "choice": f"word: {listing(NORMALIZE)}",
    "field": "field, like `item.id`",
    "count": "whole number",
}
