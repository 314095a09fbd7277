"""One spelling for policy files: canonical expressions, LF, no blanks at line ends. Comments stay where they are.

Only text inside the places of values changes, so the result is the same policy; `fmt(fmt(x)) == fmt(x)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from app.policies.diagnostics import Findings
from app.policies.expr import show, show_operation
from app.policies.names import FINAL_PHASES, STEP_PHASES, Phase
from app.policies.parse import parse_expression, parse_operation
from app.policies.source import Items, Node, Scalar, Source, Table, compose


def fmt(source: Source) -> str | None:
    """The formatted text of a file; None where it cannot be read (its findings say why)."""
    found = Findings(lambda _: ())
    root = compose(source, found)
    if root is None or found.errors:
        return None
    lines = source.lines()
    edits = sorted(((scalar.places[0], scalar, text) for scalar, text in _edits(root, found)), key=lambda one: one[0])
    for (row, col), scalar, text in reversed(edits):
        line = lines[row - 1]
        lines[row - 1] = line[: col - 1] + text + line[col - 1 + len(scalar.text) :]
    return "\n".join(line.rstrip() for line in lines).rstrip("\n") + "\n"


def _edits(root: Node, found: Findings) -> Iterator[tuple[Scalar, str]]:
    """Values on one line whose canonical text is another one."""
    for scalar, phase in _values(root):
        if len(scalar.places) != 1 or scalar.style == "block" or scalar.text == "none":
            continue
        text: str | None = None
        if phase.form in ("number", "condition"):
            expr = parse_expression(scalar, found)
            text = show(expr) if expr else None
        elif phase.form in ("operation", "operations"):
            operation = parse_operation(scalar, found)
            text = show_operation(operation) if operation else None
        if text is not None and text != scalar.text and _fits(text, scalar):
            yield scalar, text


def _fits(text: str, scalar: Scalar) -> bool:
    """Whether a text can stand where the scalar stands: quotes must not end early, plain text must stay plain."""
    if scalar.style == "quoted":
        return not any(char in text for char in "'\"\\")
    return not any(part in text for part in (" #", ": ")) and text[0] not in "-'\"[{&*!|>%@`?"


def _values(root: Node) -> Iterator[tuple[Scalar, Phase]]:
    for key, value in root.entries if isinstance(root, Table) else ():
        if key.text == "final":
            yield from _phases(value, FINAL_PHASES)
        elif key.text == "steps" and isinstance(value, Table):
            for _, step in value.entries:
                yield from _phases(step, STEP_PHASES)


def _phases(node: Node, phases: Mapping[str, Phase]) -> Iterator[tuple[Scalar, Phase]]:
    for key, value in node.entries if isinstance(node, Table) else ():
        phase = phases.get(key.text)
        if phase is not None:
            for one in value.items if isinstance(value, Items) else (value,):
                if isinstance(one, Scalar):
                    yield one, phase
