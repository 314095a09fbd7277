"""The operators that come with the language: one table."""

from __future__ import annotations

from app.policies import choose, keep
from app.policies import reference_operators as reference
from app.policies.operators import Arg, Operator, Operators

P = Arg("p", "number", 0, 1, param=True)
DELTA = Arg("delta", "number", 0, 100, param=True)
GROUP = Arg("group", "group")

_OPERATORS = (
    Operator(
        "top_k",
        "keep",
        (Arg("n", "int", 1, 2**24),),
        "the n best codes of each row",
        torch=keep.top_k,
        reference=reference.top_k,
        precut="M",
    ),
    Operator(
        "top_p",
        "keep",
        (P,),
        "codes while the mass of better ones is below p",
        torch=keep.top_p,
        reference=reference.top_p,
        precut="M",
    ),
    Operator(
        "min_p",
        "keep",
        (P,),
        "codes with at least p times the best one's probability",
        torch=keep.min_p,
        reference=reference.min_p,
        precut="M",
    ),
    Operator(
        "epsilon",
        "keep",
        (P,),
        "codes with probability p or more",
        torch=keep.epsilon,
        reference=reference.epsilon,
        precut="M",
    ),
    Operator(
        "eta",
        "keep",
        (P,),
        "epsilon with a threshold that follows the row's entropy",
        torch=keep.eta,
        reference=reference.eta,
        precut="M*",
    ),
    Operator(
        "typical",
        "keep",
        (Arg("mass", "number", 0, 1, 0.9, param=True),),
        "the codes nearest to the row's entropy, until their mass is reached; the best one may go",
        torch=keep.typical,
        reference=reference.typical,
        precut="E",
    ),
    Operator(
        "within",
        "prune",
        (DELTA,),
        "candidates at most delta behind the request's best",
        torch=choose.within,
        reference=reference.within,
        precut="M",
    ),
    Operator(
        "above",
        "prune",
        (Arg("score", "number", -1e4, 0, param=True),),
        "candidates with at least this rank",
        torch=choose.above,
        reference=reference.above,
        precut="M",
    ),
    Operator(
        "within_parent",
        "prune",
        (DELTA,),
        "candidates at most delta behind their row's best",
        torch=choose.within_parent,
        reference=reference.within_parent,
        precut="M",
    ),
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

BUILT_IN = Operators({one.name: one for one in _OPERATORS})
"""The operators of Widebeam alone."""
