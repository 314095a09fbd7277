"""A contract and texts to compile for the tests of this room."""

from __future__ import annotations

from collections.abc import Sequence

from app.config import Limits
from app.core import Contract, StepShape
from app.policies.compile import compile_policy
from app.policies.diagnostics import Findings
from app.policies.facts import Catalogue
from app.policies.plan import Plan
from app.policies.source import Source

BASE = """\
widebeam: 1
steps:
  all:
    mask: trie
    score: parent + logp
"""


def contract(sizes: Sequence[int] = (64, 64, 64), widths: Sequence[int] = (256, 512, 512)) -> Contract:
    steps = tuple(StepShape(t, codes, width) for t, (codes, width) in enumerate(zip(sizes, widths, strict=True), 1))
    limits = Limits(widths=tuple(widths))
    return Contract("onemodel@c41f", "onerec", steps, limits, "float32", (), (), (), (), True, "{}")


def sources(text: str | bytes, name: str = "feed", **others: str) -> dict[str, Source]:
    texts = {"base": BASE, **others, name: text}
    return {
        key: Source(f"policies/{key}.yaml", value if isinstance(value, bytes) else value.encode())
        for key, value in texts.items()
    }


def compiled(
    text: str | bytes, on: Contract | None = None, catalogue: Catalogue | None = None, **others: str
) -> tuple[Plan | None, Findings]:
    return compile_policy("feed", sources(text, **others), on or contract(), catalogue)


def plan_of(text: str, on: Contract | None = None, catalogue: Catalogue | None = None, **others: str) -> Plan:
    plan, found = compiled(text, on, catalogue, **others)
    assert plan is not None, found.text()
    return plan


def places(found: Findings) -> list[tuple[str, int, int]]:
    """(code, line, column) of every finding, in order."""
    return [(one.rule.code, one.span.line, one.span.col) for one in found]
