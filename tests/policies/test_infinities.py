"""What is said of a rank's infinities is so, for numbers of every kind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.policies.compile import compile_policy
from app.policies.generated import Generated
from tests.policies.batches import CATALOGUE
from tests.policies.c_expressions import compute, definitions
from tests.policies.contracts import contract, sources
from tests.policies.test_choose import policy

ON = contract((7, 7, 7), (8, 8, 8))
HEAD = "widebeam: 1\nparams:\n  g: {value: 0.5, range: [-9, 9]}\n  p: {value: 0.4, range: [0.1, 1]}\nsteps:\n  all:\n"
INF = float("inf")
FINITE = [0.0, -0.0, 1e-45, -1e-45, 1.2e-38, -1.2e-38, 1, -1, -0.5, 2.5, -9, 88, -104, 200, 3e38, -3e38]
NUMBERS = [*FINITE, INF, -INF, float("nan")]


def numbers(names: str) -> st.SearchStrategy[str]:
    return st.recursive(
        st.sampled_from([*names.split(), "0.5", "2", "0", "-3", "param.g", "param.p", "user.age", "width"]),
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
            st.tuples(inner, st.sampled_from(["<=", ">=", "<", ">", "==", "!="]), inner, inner, inner).map(
                lambda p: f"where({p[0]} {p[1]} {p[2]}, {p[3]}, {p[4]})"
            ),
            st.tuples(inner, inner).map(lambda p: f"where(seen and not attr.cold or {p[0]} > 1, {p[0]}, {p[1]})"),
            st.tuples(st.sampled_from(["max", "min"]), inner, inner).map(lambda p: f"{p[0]}({p[1]}, {p[2]})"),
            st.tuples(st.sampled_from(["abs", "exp", "log", "sqrt", "sigmoid", "-"]), inner).map(
                lambda p: f"{p[0]}({p[1]})"
            ),
            st.tuples(inner, st.sampled_from(["2", "3", "-1", "0.5", "0.3"])).map(lambda p: f"({p[0]}) ** {p[1]}"),
            inner.map(lambda one: f"clip({one}, -3, 2)"),
        ),
        max_leaves=6,
    )


LOGITS = st.sampled_from(["", "", "    logits: logit / param.p\n", "    logits: log(logit) - param.g\n"])
SCORES = st.one_of(st.just("parent + logp"), numbers("parent logp prob").map(lambda one: f"parent + {one}"))
RANKS = st.one_of(st.just(""), numbers("score logp attr.age").map(lambda one: f"    rank: score + {one}\n"),
                  numbers("score score logp parent attr.age").map(lambda one: f"    rank: {one}\n"))  # fmt: skip


def assert_told(made: Generated, seed: int) -> None:
    """The facts of ranked.cuh, looked at for random combinations of numbers of every kind."""
    lines, rng = definitions(made.definitions), np.random.default_rng(seed)
    tells, masked = "RANK_TELLS" in lines, "RANK_MASKED" in lines
    assert tells or not masked
    if not tells:
        return
    some, every = np.array(FINITE, np.float32), np.array(NUMBERS, np.float32)
    for kinds in (some, every, every):  # of what the row has
        norm, logit = rng.choice(kinds, 2000), rng.choice(every, 2000)
        parent = rng.choice(kinds[kinds > -INF], 2000)
        values = [rng.choice(kinds, 2000) for _ in made.values]
        columns = [rng.choice(every, 2000) for _ in made.columns]
        names = {"parent": parent, "logit": logit}
        with np.errstate(all="ignore"):
            y = logit
            if "RANK_LOGIT" in lines:
                y = np.where(logit > -INF, compute(lines["RANK_LOGIT"], names, values, columns), np.float32(-INF))
            names["logp"] = y - norm if lines["RANK_NORMED"] == "1" else y
            names["score"] = score = compute(lines["RANK_SCORE"], names, values, columns) + 0 * parent.astype(bool)
            rank = compute(lines.get("RANK", "score"), names, values, columns) + np.zeros_like(parent)
        refused = np.isnan(rank) | (rank == INF)
        read = np.isfinite(logit)
        wrong = np.isnan(y) | (y == INF) | np.isnan(score) | (score == INF)
        assert refused[read & wrong].all()
        assert not np.isfinite(rank[read & (score == -INF)]).any()
        if not masked:
            continue
        out = logit == -INF
        assert not np.isfinite(rank[out]).any()
        assert (rank[out] == -INF).all() or kinds is every
        if "RANK_LOGIT" not in lines:  # read again, bad logits are not looked at
            assert refused[np.isnan(logit) | (logit == INF)].all()


@settings(max_examples=150, deadline=None)
@given(LOGITS, SCORES, RANKS, st.sampled_from(["none", "step"]), st.integers(0, 2**32 - 1))
def test_what_is_told_of_random_expressions_is_so(logits, score, rank, normalize, seed):
    text = f"{HEAD}    normalize: {normalize}\n    mask: trie\n{logits}    score: {score}\n{rank}"
    plan, _ = compile_policy("feed", sources(text), ON, CATALOGUE)
    made = None if plan is None else plan.structure.steps[1].generated
    if made is not None:
        assert_told(made, seed)


TOLD = {
    "rank: score - 0.3 * prob": (True, True),
    "rank: where(logp > -9, score, 2 * score) - param.g * prob": (True, True),
    "rank: score / step ** 2 - user.age": (True, True),
    "rank: score - where(seen, 1000, 0)": (True, True),
    "score: parent + 0.8 * logp": (True, True),
    "logits: logit / param.p": (True, True),
    "rank: score - param.d * prior.popularity": (True, False),  # arbitrary where nobody may be selected
    "rank: score + exp(logp / 2)": (True, True),
    "rank: min(score, -1)": (False, False),  # a score of +inf is not seen
    "rank: max(score, -1)": (False, False),
    "rank: 0 - score": (False, False),  # +inf would look like who may not be selected
    "rank: 0 - prob": (False, False),
    "rank: where(logp > -9, score, param.g * score)": (False, False),
    "score: parent + prob": (True, False),
    "rank: clip(score, -2, 3)": (False, False),
    "rank: score + gumbel": (False, False),
}


@pytest.mark.parametrize("line", TOLD)
def test_what_is_told(line):
    made = policy(line, normalize="step").structure.steps[1].generated
    assert made is not None
    lines = definitions(made.definitions)
    assert ("RANK_TELLS" in lines, "RANK_MASKED" in lines) == TOLD[line]
    assert_told(made, 0)
