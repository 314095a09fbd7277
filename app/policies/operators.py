"""The operators of the language: one table.

An operator's `version` is part of the id of every policy that uses it: a change of its meaning changes those ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

ArgForm = Literal["int", "number", "group", "field", "word"]


class Arg(NamedTuple):
    """An argument. Numbers lie in low..high; without a default it must be given. `param`: may be `param.x`."""

    name: str
    form: ArgForm
    low: float = 0.0
    high: float = 0.0
    default: float | str | None = None
    param: bool = False


class Operator(NamedTuple):
    """An operator: the phase where it stands and what it takes. available = compiled in this version."""

    name: str
    phase: str
    args: tuple[Arg, ...]
    about: str
    version: int = 1
    available: bool = True


def _by_name(*operators: Operator) -> Mapping[str, Operator]:
    return {operator.name: operator for operator in operators}


P = Arg("p", "number", 0, 1, param=True)
DELTA = Arg("delta", "number", 0, 100, param=True)
GROUP = Arg("group", "group")

OPERATORS = _by_name(
    Operator("top_k", "keep", (Arg("n", "int", 1, 2**24),), "the n best codes of each row"),
    Operator("top_p", "keep", (P,), "codes while the mass of better ones is below p"),
    Operator("min_p", "keep", (P,), "codes with at least p times the best one's probability"),
    Operator("epsilon", "keep", (P,), "codes with probability p or more"),
    Operator("eta", "keep", (P,), "epsilon with a threshold that follows the row's entropy"),
    Operator("typical", "keep", (P,), "codes of typical information", available=False),
    Operator("within", "prune", (DELTA,), "candidates at most delta behind the request's best"),
    Operator("above", "prune", (Arg("score", "number", -1e4, 0, param=True),), "candidates with at least this rank"),
    Operator("within_parent", "prune", (DELTA,), "candidates at most delta behind their row's best"),
    Operator("cap", "quota", (GROUP, Arg("max", "int", 1, 2**20)), "at most max of each group"),
    Operator("floor", "quota", (GROUP, Arg("min", "int", 0, 2**20)), "at least min of each group, where there are"),
    Operator("top", "select", (), "the best by rank"),
    Operator(
        "diverse",
        "select",
        (
            Arg("groups", "int", 2, 64),
            Arg("penalty", "number", 0, 100, param=True),
            Arg("history", "number", 0, 0, 0.0),
        ),
        "groups one after the other; a code costs penalty for each time that an earlier group took it",
    ),
    Operator("stochastic", "select", (), "a sample without replacement (Gumbel top-k)"),
    Operator("explore", "select", (Arg("share", "number", 0, 0.5, 0.05),), "a share of the places drawn from the rest"),
    Operator(
        "dpp",
        "select",
        (Arg("pool", "int", 2, 8), Arg("strength", "number", 0, 10)),
        "determinantal selection",
        available=False,
    ),
    Operator(
        "sid", "expand", (Arg("max_items", "int", 1, 1000, 1.0), Arg("by", "field", default="")), "items of each SID"
    ),
    Operator(
        "mmr",
        "rerank",
        (Arg("weight", "number", 0, 1, 0.7), Arg("pool", "int", 1, 2000, 200.0), Arg("by", "word", default="prefix")),
        "maximal marginal relevance: each next item trades its score against its likeness to those before",
    ),
)
"""Operators by name."""
