"""The operators of the language: one table.

An operator's `version` is part of the id of every policy that uses it: a change of its meaning changes those ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

ArgForm = Literal["int", "number", "group", "field"]


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


OPERATORS = _by_name(
    Operator("top_k", "keep", (Arg("n", "int", 1, 2**24),), "the n best codes of each row", available=False),
    Operator("top_p", "keep", (Arg("p", "number", 0, 1),), "the best codes that hold mass p", available=False),
    Operator(
        "min_p", "keep", (Arg("p", "number", 0, 1),), "codes with p times the best one's probability", available=False
    ),
    Operator("epsilon", "keep", (Arg("p", "number", 0, 1),), "codes with probability p or more", available=False),
    Operator("eta", "keep", (Arg("p", "number", 0, 1),), "epsilon that follows the row's entropy", available=False),
    Operator("typical", "keep", (Arg("p", "number", 0, 1),), "codes of typical information", available=False),
    Operator("within", "prune", (Arg("delta", "number", 0, 100),), "at most delta behind the best", available=False),
    Operator("above", "prune", (Arg("score", "number", -1e4, 0),), "at least this rank", available=False),
    Operator(
        "within_parent",
        "prune",
        (Arg("delta", "number", 0, 100),),
        "at most delta behind the row's best",
        available=False,
    ),
    Operator(
        "cap", "quota", (Arg("group", "group"), Arg("max", "int", 1, 2**20)), "at most max of a group", available=False
    ),
    Operator(
        "floor",
        "quota",
        (Arg("group", "group"), Arg("min", "int", 0, 2**20)),
        "at least min of a group",
        available=False,
    ),
    Operator("top", "select", (), "the best by rank"),
    Operator(
        "diverse",
        "select",
        (
            Arg("groups", "int", 2, 64),
            Arg("penalty", "number", 0, 100, param=True),
            Arg("history", "number", 0, 1, 0.0),
        ),
        "groups one after the other, codes of earlier groups penalised",
        available=False,
    ),
    Operator("stochastic", "select", (), "sampling without replacement", available=False),
    Operator("explore", "select", (Arg("share", "number", 0, 0.5, 0.05),), "some places for the rest", available=False),
    Operator(
        "dpp", "select", (Arg("pool", "int", 2, 8), Arg("strength", "number", 0, 10)), "determinantal", available=False
    ),
    Operator(
        "sid", "expand", (Arg("max_items", "int", 1, 1000, 1.0), Arg("by", "field", default="")), "items of each SID"
    ),
    Operator(
        "mmr",
        "rerank",
        (Arg("weight", "number", 0, 1, 0.7), Arg("pool", "int", 1, 2000, 200.0), Arg("by", "field", default="prefix")),
        "marginal relevance",
        available=False,
    ),
)
"""Operators by name."""
