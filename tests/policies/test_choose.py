"""Every operator of selection against sequential scans, on thousands of small steps full of ties."""

from __future__ import annotations

import os

import numpy as np
import pytest

from app.policies import choose
from tests.policies.batches import CATALOGUE, Case, case, expected, run_batch, with_groups, with_gumbels
from tests.policies.contracts import contract, plan_of

TRIALS = int(os.environ.get("SOAK_TRIALS", "40"))
"""Batches of one to three requests for each operator; `make soak` takes more."""
ON = contract((7, 7, 7), (8, 8, 8))
PARAMS = {"d": 1.5, "g": 0.5, "p": 0.4}
HEAD = (
    "widebeam: 1\nwidths: [8, 8, 8]\nparams:\n  d: {value: 1.5, range: [0, 9]}\n  g: {value: 0.5, range: [0, 2]}\n"
    "  p: {value: 0.4, range: [0.1, 1]}\nsteps:\n  all:\n"
)


def policy(*lines: str, mask: str = "trie", tail: str = "", normalize: str = "none"):
    # raw logits: sums over a row may differ in the last bit between libraries, and would move ties
    return plan_of(
        HEAD + f"    mask: {mask}\n    normalize: {normalize}\n" + "".join(f"    {one}\n" for one in lines) + tail,
        ON,
        CATALOGUE,
    )


POLICIES = {
    "plain": ["select: top()"],
    "within": ["prune:", "  - within(param.d)"],
    "above": ["prune:", "  - above(-3)"],
    "within_parent": ["prune:", "  - within_parent(1)"],
    "prunes": ["prune:", "  - within_parent(2)", "  - within(param.d)", "  - above(-9)"],
    "cap parent": ["quota:", "  - cap(parent, 2)"],
    "cap token": ["quota:", "  - cap(token[1], max=3)"],
    "cap prefix": ["quota:", "  - cap(prefix[1], max=3)", "  - cap(parent, max=2)"],
    "cap genre": ["quota:", "  - cap(attr.genre, max=2)"],
    "cap flag": ["quota:", "  - cap(attr.cold, max=1)"],
    "cap label": ['quota:', '  - cap(attr.genre == "drama", max=1)'],
    "cap studio": ["quota:", "  - cap(attr.studio, max=3)", "  - cap(parent, max=1)"],
    "floor cold": ["quota:", "  - floor(attr.cold, min=2)"],
    "floors": ["quota:", "  - floor(attr.cold, min=2)", '  - floor(attr.genre == "crime", min=2)'],
    "floor genre": ["quota:", "  - floor(attr.genre, min=1)"],
    "floor and cap": ["quota:", "  - floor(attr.cold, min=3)", "  - cap(parent, max=2)"],
    "floor and caps": ["quota:", "  - cap(token[1], max=4)", "  - floor(attr.cold, min=3)", "  - cap(parent, max=2)"],
    "floor genre cap parent": ["quota:", "  - floor(parent, min=1)", "  - cap(parent, max=3)"],
    "prune and quota": ["prune:", "  - within(param.d)", "quota:", "  - cap(parent, max=2)"],
    "sibling": ["rank: score - param.g * sibling"],
    "sibling cap": ["rank: score - 0.3 * sibling", "quota:", "  - cap(token[1], max=3)"],
    "gumbel": ["rank: score + 0.5 * gumbel"],
    "uniform": ["rank: score + uniform"],
    "columns": ["rank: score - 0.1 * prior.popularity + where(boosted.campaign, param.g, 0) + user.age / 100"],
    "explore": ["select: explore(share=0.4)"],
    "explore rank": ["rank: score - 0.25 * attr.age", "select: explore(share=0.5)"],
    "top_k": ["keep:", "  - top_k(2)"],
    "top_p": ["keep:", "  - top_p(param.p)"],
    "min_p": ["keep:", "  - min_p(0.3)"],
    "epsilon": ["keep:", "  - epsilon(0.2)"],
    "eta": ["keep:", "  - eta(0.5)"],
    "keeps": ["keep:", "  - top_k(4)", "  - top_p(0.8)", "  - min_p(0.1)", "quota:", "  - cap(parent, max=2)"],
    "temperature": ["logits: logit / param.p"],
}  # fmt: skip
PLANS = {name: policy(*lines) for name, lines in POLICIES.items()}
PLANS |= {
    "cap code": policy("quota:", "  - cap(token[2], max=1)", tail="  1: {quota: none}\n"),
    "cap genre, all codes": policy("quota:", "  - cap(attr.genre, max=2)", mask="not seen and not blocked.ads"),
    "label mask": policy(mask='trie and attr.genre == "drama" or attr.genre in ["crime"]'),
}


def cases(rng: np.random.Generator, name: str, t: int) -> list[Case]:
    c = int(rng.integers(2, 8))
    f = int(rng.integers(1, c + 1))
    return [case(rng, PLANS[name], t, c, f, PARAMS) for _ in range(int(rng.integers(1, 4)))]


@pytest.mark.parametrize("name", PLANS)
def test_survivors_are_those_of_the_sequential_scan(name):
    rng = np.random.default_rng(sum(map(ord, name)))
    for trial in range(TRIALS):
        t = 2 + trial % 2
        given = cases(rng, name, t)
        got, want = run_batch(PLANS[name], t, given), expected(PLANS[name], t, given)
        for one, other in zip(got, want, strict=True):
            assert one.survivors == other.survivors, (name, trial)
            if PLANS[name].structure.steps[t - 1].carries:
                assert one.carry == other.carry


@pytest.mark.parametrize("name", [name for name in PLANS if any(word in name for word in ("cap", "floor", "explore"))])
def test_candidates_that_are_out_may_stay_in_the_line_as_they_do_on_a_gpu(name, monkeypatch):
    monkeypatch.setattr(choose, "waiting_is_free", lambda _: False)
    rng = np.random.default_rng(len(name))
    for trial in range(12):
        given = cases(rng, name, 2 + trial % 2)
        got, want = run_batch(PLANS[name], 2 + trial % 2, given), expected(PLANS[name], 2 + trial % 2, given)
        assert [one.survivors for one in got] == [one.survivors for one in want], (name, trial)


DIVERSE = policy("select: diverse(groups=2, penalty=param.d)")
STOCHASTIC = policy("select: stochastic()", normalize="valid")


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("t", [1, 2, 3])
def test_diverse_groups_are_those_of_the_sequential_scan(t, free, monkeypatch):
    monkeypatch.setattr(choose, "waiting_is_free", lambda _: free)
    rng = np.random.default_rng(t)
    for _ in range(TRIALS):
        c = int(rng.integers(2, 8))
        given = [with_groups(case(rng, DIVERSE, t, c, c, PARAMS), rng, 2) for _ in range(int(rng.integers(1, 4)))]
        for one, other in zip(run_batch(DIVERSE, t, given), expected(DIVERSE, t, given), strict=True):
            assert one == other


@pytest.mark.parametrize("t", [1, 2, 3])
def test_stochastic_beams_are_those_of_the_published_formula(t):
    rng = np.random.default_rng(t)
    for _ in range(TRIALS):
        c = int(rng.integers(2, 8))
        given = [with_gumbels(case(rng, STOCHASTIC, t, c, c, PARAMS), rng) for _ in range(int(rng.integers(1, 4)))]
        for one, other in zip(run_batch(STOCHASTIC, t, given), expected(STOCHASTIC, t, given), strict=True):
            assert one.survivors == other.survivors
            assert np.allclose(one.carry, other.carry, rtol=1e-4, atol=1e-4)
