"""The words of the language: phases in their order, the names that each phase knows, the functions.

*Dependence* of a number on the candidate (policy-language 2.2): "" none, "r" constant in a row, "L" a row constant
plus a positive multiple of the logit, "c" anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from app.core import Level

Form = Literal["number", "condition", "operation", "operations", "choice", "field", "count"]
Dependence = Literal["", "r", "L", "c"]

NORMALIZE = ("full", "step", "valid", "none")


class Phase(NamedTuple):
    """A phase key. `available`: compiled in this version; `default`: canonical text where nothing is given."""

    name: str
    form: Form
    about: str
    available: bool = True
    default: str | None = None


def _by_name(*phases: Phase) -> Mapping[str, Phase]:
    return {phase.name: phase for phase in phases}


STEP_PHASES = _by_name(
    Phase("logits", "number", "changes the logits before they are normalised", default="logit"),
    Phase("normalize", "choice", "what log-probabilities are normalised over", default="full"),
    Phase("mask", "condition", "which candidates are allowed at all", default="trie"),
    Phase("keep", "operations", "cuts the tail of each row"),
    Phase("score", "number", "the number that a beam carries to the next step", default="parent + logp"),
    Phase("rank", "number", "the number that orders candidates in this step", default="score"),
    Phase("prune", "operations", "drops candidates that are far behind"),
    Phase("quota", "operations", "caps and floors per group"),
    Phase("select", "operation", "how the survivors are taken", default="top()"),
)
FINAL_PHASES = _by_name(
    Phase("expand", "operation", "SIDs to items", default="sid(max_items=1)"),
    Phase("mask", "condition", "drops items"),
    Phase("score", "number", "the final score", default="score"),
    Phase("dedupe", "field", "one entry for each key", default="item.id"),
    Phase("quota", "operations", "caps and floors in the list"),
    Phase("rerank", "operation", "orders the list anew"),
    Phase("limit", "count", "longest list; the last width where it is not given"),
)
STEP_WORDS = ("all", "first", "last")

LEVELS: tuple[Level, ...] = ("quiet", "normal", "busy")
OWN_LEVELS: tuple[Level, ...] = ("busy", "quiet")
"""All, and those that a policy may give widths of their own, under `load`."""


class Known(NamedTuple):
    """A name in a phase: a number with its dependence, or a condition."""

    form: Literal["number", "condition"]
    dependence: Dependence


def _numbers(words: str, dependence: Dependence) -> dict[str, Known]:
    return {word: Known("number", dependence) for word in words.split()}


def _conditions(words: str) -> dict[str, Known]:
    return {word: Known("condition", "c") for word in words.split()}


_SCORE = {**_numbers("parent", "r"), **_numbers("logp", "L"), **_numbers("prob", "c"), **_numbers("step width", "")}
NAMES: Mapping[str, Mapping[str, Known]] = {
    "logits": {**_numbers("logit", "L"), **_numbers("step vocab", "")},
    "mask": {**_numbers("step", ""), **_conditions("trie seen")},
    "score": {**_SCORE, **_numbers("vocab", ""), **_conditions("trie seen")},
    "rank": {**_SCORE, **_numbers("score sibling gumbel uniform", "c"), **_conditions("seen")},
    "final.mask": {**_numbers("score position", "c"), **_conditions("seen")},
    "final.score": {**_numbers("score position", "c"), **_conditions("seen")},
}
"""Names by phase. `score` in `rank` has the dependence of the score expression; what stands here is the worst case."""

EVERYWHERE = frozenset({"param", "user", "ctx"})
SPACES: Mapping[str, frozenset[str]] = {
    "logits": EVERYWHERE,
    "mask": EVERYWHERE | {"blocked", "boosted", "attr"},
    "score": EVERYWHERE | {"head", "prior", "attr"},
    "rank": EVERYWHERE | {"head", "prior", "attr", "boosted"},
    "final.mask": EVERYWHERE | {"item", "blocked", "boosted"},
    "final.score": EVERYWHERE | {"item", "blocked", "boosted"},
}


class Function(NamedTuple):
    """A function: how many arguments (`most` None = any number)."""

    least: int
    most: int | None
    about: str


FUNCTIONS: Mapping[str, Function] = {
    "log": Function(1, 1, "natural logarithm; x <= 0 makes the candidate invalid"),
    "exp": Function(1, 1, "e to the power x"),
    "sqrt": Function(1, 1, "square root; x < 0 makes the candidate invalid"),
    "abs": Function(1, 1, "absolute value"),
    "sigmoid": Function(1, 1, "1 / (1 + exp(-x))"),
    "min": Function(2, None, "the smallest"),
    "max": Function(2, None, "the largest"),
    "clip": Function(3, 3, "x, at least lo and at most hi"),
    "where": Function(3, 3, "a where the condition holds, else b"),
}
FUNCTIONS_HELP = f"functions: {', '.join(FUNCTIONS)}"
