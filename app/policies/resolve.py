"""Documents -> one policy: `extends`, the steps of the deployment, defaults, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from app.core import Level
from app.errors import counted
from app.policies.builtin import BUILT_IN
from app.policies.diagnostics import Diagnostic, Findings, Span, suggest
from app.policies.expr import Operation, show, show_operation
from app.policies.names import FINAL_PHASES, OWN_LEVELS, STEP_PHASES, Phase
from app.policies.operators import Operators
from app.policies.parse import parse_expression, parse_operation
from app.policies.read import Content, Document, ParamDraft, Setting, Widths, read
from app.policies.source import Scalar, Sources

MAX_CHAIN = 8


@dataclass(frozen=True, slots=True)
class Resolved:
    """The value of a phase after merging. key: which step key gave it; span None = the language's default."""

    value: Content
    span: Span | None
    key: str = ""
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter with its range. broken: its definition was refused, its uses are not."""

    name: str
    value: float
    low: float
    high: float
    span: Span
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """A resolved policy. steps[t - 1] and final hold every phase; widths None = the contract's; load: other widths
    by load level; operators: those that
    it may use."""

    name: str
    file: str
    abstract: bool
    chain: tuple[str, ...]
    params: Mapping[str, Param]
    widths: Widths | None
    load: Mapping[Level, Widths]
    underfill: str
    steps: tuple[Mapping[str, Resolved], ...]
    final: Mapping[str, Resolved]
    operators: Operators


ReadFile = tuple[Document, tuple[Diagnostic, ...]]
"""A file's document and what was wrong with its text."""


@dataclass(slots=True)
class Library:
    """The files of a folder, each read at most once, however many policies extend it, and what they may use."""

    sources: Sources
    operators: Operators = BUILT_IN
    _lines: dict[str, list[str]] = field(default_factory=dict)
    _read: dict[str, ReadFile] = field(default_factory=dict)

    def findings(self) -> Findings:
        """An empty collection that knows these files' lines."""
        return Findings(self.lines)

    def lines(self, file: str) -> Sequence[str]:
        """Source lines of a file; nothing for an unknown one."""
        if file not in self._lines:
            source = next((one for one in self.sources.values() if one.file == file), None)
            self._lines[file] = source.lines() if source else []
        return self._lines[file]

    def document(self, name: str, found: Findings) -> Document:
        """The document of a policy; its findings go to `found`."""
        if name not in self._read:
            self._read[name] = self.read(name)
        document, own = self._read[name]
        for one in own:
            found.add(one.rule.code, one.span, one.message, one.help)
        return document

    def read(self, name: str) -> ReadFile:
        """Read one file; another library with the same text may be given the result."""
        own = self.findings()
        return read(name, self.sources[name], own), tuple(own)

    def give(self, name: str, known: ReadFile) -> None:
        """Know a file without reading it."""
        self._read[name] = known

    def chain(self, name: str) -> tuple[str, ...] | None:
        """A policy and its ancestors, youngest first; None where an ancestor is missing or the chain goes round."""
        names = [name]
        while (parent := self.document(names[-1], self.findings()).extends) is not None:
            if parent.value in names or parent.value not in self.sources:
                return None
            names.append(parent.value)
        return tuple(names)


def resolve(name: str, library: Library, steps: int, found: Findings) -> Policy:
    """Merge a policy with its ancestors and lay it over the steps 1..steps of the deployment."""
    chain = _chain(name, library, found)
    own = chain[0]
    merged = _merge(list(reversed(chain)), found)
    _step_keys(chain, steps, found)
    widths = next((one.widths for one in chain if one.widths), None)
    given = {level: next((one.load[level] for one in chain if level in one.load), None) for level in OWN_LEVELS}
    underfill = next((one.underfill.value for one in chain if one.underfill), "allow")
    return Policy(
        name=name,
        file=own.file,
        abstract=own.abstract,
        chain=tuple(one.name for one in chain),
        params=_params(chain, found),
        widths=widths,
        load={level: one.value for level, one in given.items() if one is not None and one.value is not None},
        underfill=underfill,
        steps=tuple(_step(t, steps, merged) for t in range(1, steps + 1)),
        final={word: _phase(phase, [("final", merged["final"])]) for word, phase in FINAL_PHASES.items()},
        operators=library.operators,
    )


def _chain(name: str, library: Library, found: Findings) -> list[Document]:
    """The policy and its ancestors, youngest first."""
    chain = [library.document(name, found)]
    while chain[-1].extends is not None:
        parent = chain[-1].extends
        if parent.value in (names := [one.name for one in chain]):
            circle = " -> ".join([*names[names.index(parent.value) :], parent.value])
            found.add("X001", parent.span, f"`extends` goes round in a circle: {circle}")
            break
        if parent.value not in library.sources:
            hint = suggest(parent.value, library.sources) or "a parent is the name of another file of the folder"
            found.add("X002", parent.span, f"unknown policy `{parent.value}`", hint)
            break
        if len(chain) == MAX_CHAIN:
            found.add("X003", parent.span, f"more than {MAX_CHAIN} policies extend each other")
            break
        chain.append(library.document(parent.value, found))
    return chain


def _merge(oldest_first: list[Document], found: Findings) -> dict[str, dict[str, Setting]]:
    """Step keys and `final` -> phases; a younger file replaces phase by phase."""
    merged: dict[str, dict[str, Setting]] = {"final": {}}
    youngest = oldest_first[-1]
    for document in oldest_first:
        for key, phases in [*document.steps.items(), ("final", document.final)]:
            known = merged.setdefault(key, {})
            for phase, setting in phases.items():
                before = known.get(phase)
                if document is youngest and before is not None and _same(before, setting):
                    hint = f"it is `{phase}` of {before.span.file}:{before.span.line}; remove the line"
                    found.add("W003", setting.span, f"`{phase}` repeats what is inherited", hint)
                known[phase] = setting
    return merged


def _same(a: Setting, b: Setting) -> bool:
    return not a.broken and not b.broken and content_text(a.value) == content_text(b.value)


def content_text(value: Content) -> str | int | list[str] | None:
    """The canonical form of a phase's value, as JSON-ready data."""
    if isinstance(value, Operation):
        return show_operation(value)
    if isinstance(value, tuple):
        return [show_operation(one) for one in value]
    if value is None or isinstance(value, str | int):
        return value
    return show(value)


def _step(t: int, steps: int, merged: Mapping[str, Mapping[str, Setting]]) -> dict[str, Resolved]:
    """The phases of step t: its number wins over first and last, these over all."""
    keys = [str(t)] + (["last"] if t == steps else []) + (["first"] if t == 1 else []) + ["all"]
    layers = [(key, merged[key]) for key in keys if key in merged]
    return {word: _phase(phase, layers) for word, phase in STEP_PHASES.items()}


def _phase(phase: Phase, layers: list[tuple[str, Mapping[str, Setting]]]) -> Resolved:
    for key, settings in layers:
        setting = settings.get(phase.name)
        if setting is None:
            continue
        if setting.value is None and not setting.broken and phase.name not in _EMPTY:
            return Resolved(default_of(phase), setting.span, key)
        return Resolved(setting.value, setting.span, key, setting.broken)
    return Resolved(default_of(phase), None)


_EMPTY = frozenset({"mask", "keep", "prune", "quota", "dedupe", "rerank"})
"""Phases that a policy can be without; `none` gives the others their default back."""


@cache
def default_of(phase: Phase) -> Content:
    """The default of a phase, parsed."""
    if phase.default is None or phase.form == "choice":
        return phase.default
    where = Span("(default)", 1, 1, len(phase.default) + 1)
    scalar = Scalar(phase.default, where, "plain", ((1, 1),))
    quiet = Findings(lambda _: ())
    return parse_operation(scalar, quiet) if phase.form == "operation" else parse_expression(scalar, quiet)


def _params(chain: list[Document], found: Findings) -> dict[str, Param]:
    """Parameters, each field from the youngest file that gives it."""
    names = {name: None for document in reversed(chain) for name in document.params}
    return {name: _param(name, [one.params[name] for one in chain if name in one.params], found) for name in names}


def _param(name: str, drafts: list[ParamDraft], found: Findings) -> Param:
    span = drafts[0].span
    value = next((one.value for one in drafts if one.value), None)
    ends = next((one.range for one in drafts if one.range), None)
    broken = any(one.broken for one in drafts)
    if not broken and (value is None or ends is None):
        missing = "value" if value is None else "range"
        hint = "write `{value: 0.4, range: [0, 10]}`"
        found.add("S009", span, f"param {name} has no `{missing}`", hint)
    if value is None or ends is None or broken:
        return Param(name, 0.0, 0.0, 0.0, span, broken=True)
    low, high = ends.value
    if not low <= value.value <= high:
        found.add("S013", value.span, f"param {name} is {value.value:g}; allowed range is {low} to {high}")
        broken = True
    return Param(name, value.value, low, high, span, broken)


def _step_keys(chain: list[Document], steps: int, found: Findings) -> None:
    for document in chain:
        for key, span in document.step_keys.items():
            if key.isdigit() and int(key) > steps:
                found.add("W006", span, f"the deployment has no step {key}", f"it has {counted(steps, 'step')}")
