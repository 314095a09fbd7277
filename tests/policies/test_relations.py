"""What must not change a selection, what an operator without effect gives, and how often a sample is drawn."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch

from app.policies import choose
from tests.policies.batches import CATALOGUE, Case, case, run_batch, with_groups
from tests.policies.contracts import contract, plan_of

ON = contract((7, 7, 7), (8, 8, 8))
PARAMS = {"d": 1.5, "g": 0.5, "p": 0.4}
HEAD = (
    "widebeam: 1\nwidths: [8, 8, 8]\nparams:\n  d: {value: 1.5, range: [0, 9]}\n  g: {value: 0.5, range: [0, 2]}\n"
    "  p: {value: 0.4, range: [0.1, 1]}\nsteps:\n  all:\n    mask: trie\n    normalize: none\n"
)


def policy(text: str = "", normalize: str = "none"):
    """A policy that adds a line to all steps."""
    return plan_of(HEAD.replace("none", normalize) + (f"    {text}\n" if text else ""), ON, CATALOGUE)


PLAIN = policy()


def cases(seed: int, trials: int) -> list[Case]:
    rng = np.random.default_rng(seed)
    return [case(rng, PLAIN, 2 + at % 2, 7, 7, PARAMS) for at in range(trials)]


def survivors(plan, one: Case) -> list[tuple[int, int]]:
    [chosen] = run_batch(plan, one.grid.step, [one])
    return chosen.survivors


# ---- operators without effect --------------------------------------------------------------------------------------

NOTHING = {
    "logits": ("logits: logit / 1", "none"),
    "top_k": ("keep: ['top_k(7)']", "none"),
    "top_p": ("keep: ['top_p(1)']", "valid"),
    "min_p": ("keep: ['min_p(0)']", "none"),
    "epsilon": ("keep: ['epsilon(1e-30)']", "valid"),
    "within": ("prune: ['within(100)']", "none"),
    "above": ("prune: ['above(-10000)']", "none"),
    "within_parent": ("prune: ['within_parent(100)']", "none"),
    "cap": ("quota: ['cap(parent, 8)', 'cap(token[1], 8)']", "none"),
    "floor": ("quota: ['floor(attr.cold, 0)']", "none"),
    "explore": ("select: explore(share=0)", "none"),
    "weight": ("score: parent + 1 * logp", "none"),
    "sibling": ("rank: score - 0 * sibling", "none"),
    "noise": ("rank: score + 0 * gumbel", "none"),
    "depop": ("rank: score - 0 * prior.popularity", "none"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_an_operator_at_its_identity_is_plain_beam_search(name):
    text, normalize = NOTHING[name]
    plan, plain = policy(text, normalize), policy(normalize=normalize)
    for one in cases(1, 60):
        assert survivors(plan, one) == survivors(plain, one)


def test_groups_that_cost_nothing_are_beams_of_their_own():
    """V27 with a penalty of zero is G independent beams, not one of G times the width."""
    rng, plan = np.random.default_rng(2), policy("select: diverse(groups=2, penalty=0)")
    for given in cases(3, 60):
        one = with_groups(given, rng, 2)
        want = []
        for group in range(2):
            logits = np.where(one.grid.carry[:, None] == group, one.grid.logits, -np.inf).astype(np.float32)
            half = replace(one, grid=replace(one.grid, logits=logits, carry=None, width=one.grid.width // 2))
            want += survivors(PLAIN, half)
        assert survivors(plan, one) == want


# ---- relations -----------------------------------------------------------------------------------------------------

SHAPED = {
    "plain": "",
    "cut": "keep: ['top_k(3)']",
    "near": "prune: ['within_parent(1)']",
    "siblings": "rank: score - 0.3 * sibling",
    "caps": "quota: ['cap(parent, 2)', 'cap(token[1], 3)']",
    "explore": "select: explore(share=0.4)",
}


def distinct(rng: np.random.Generator, one: Case) -> Case:
    """The same request with logits that never tie."""
    return replace(one, grid=replace(one.grid, logits=rng.normal(size=one.grid.logits.shape).astype(np.float32)))


@pytest.mark.parametrize("name", sorted(set(SHAPED) - {"explore"}))  # whose noise belongs to the code
def test_where_nothing_ties_the_numbering_of_codes_changes_nothing(name):
    rng, plan = np.random.default_rng(4), policy(SHAPED[name])
    for given in cases(5, 60):
        one = distinct(rng, given)
        new = rng.permutation(7)  # code c becomes new[c]; the candidate lists stay in the order of the codes
        back = np.argsort(new)
        grid = one.grid
        moved = {key: getattr(grid, key)[:, back] for key in ("logits", "legal", "trie", "seen", "excluded")}
        extra = {key: column[:, back] for key, column in grid.extra.items()}
        other = replace(one, grid=replace(grid, **moved, extra=extra))
        assert survivors(plan, other) == [(row, int(new[code])) for row, code in survivors(plan, one)]


@pytest.mark.parametrize("name", SHAPED)
def test_what_all_beams_carry_more_changes_nothing(name):
    rng, plan = np.random.default_rng(6), policy(SHAPED[name])
    for given in cases(7, 60):
        one = distinct(rng, given)
        further = replace(one, grid=replace(one.grid, parent=one.grid.parent - np.float32(8)))
        assert set(survivors(plan, further)) == set(survivors(plan, one))


def test_a_constant_on_a_row_never_changes_who_is_before_whom_in_it():
    rng = np.random.default_rng(8)
    for given in cases(9, 60):
        one = distinct(rng, given)
        wide = replace(one, grid=replace(one.grid, width=99))
        shift = rng.normal(size=len(one.grid.parent)).astype(np.float32) * 3
        moved = replace(wide, grid=replace(wide.grid, parent=wide.grid.parent + shift))
        for row in range(len(shift)):
            before, after = ([code for r, code in survivors(PLAIN, each) if r == row] for each in (wide, moved))
            assert before == after


# ---- samples -------------------------------------------------------------------------------------------------------


def test_stochastic_beams_are_drawn_without_replacement_in_proportion_to_their_probability():
    """V37 on a tree of 3 x 3: ordered pairs of leaves come as often as Plackett and Luce say, within a total variation
    of 0.03 (sampling alone gives about 0.02 over 20,000 draws); fresh noise at each step (V38) is off by 0.14."""
    draws, rng = 20_000, np.random.default_rng(10)
    first = np.log(np.array([0.5, 0.3, 0.2]))
    second = np.log(np.array([[0.7, 0.2, 0.1], [0.4, 0.4, 0.2], [0.1, 0.3, 0.6]]))
    leaf = np.exp(first[:, None] + second).ravel()

    def frequencies(*, conditioned: bool) -> np.ndarray:
        root = torch.from_numpy(np.tile(first, (draws, 1))).float()
        noise = torch.from_numpy(rng.gumbel(size=(draws, 3))).float()
        g = choose.stochastic(root, noise, torch.zeros(draws, 1))
        best, chosen = g.topk(2, dim=1)
        score = torch.gather(root, 1, chosen)[:, :, None] + torch.from_numpy(second).float()[chosen]
        noise = torch.from_numpy(rng.gumbel(size=(draws * 2, 3))).float()
        flat = score.reshape(-1, 3)
        below = choose.stochastic(flat, noise, best.reshape(-1, 1)) if conditioned else flat + noise
        two = below.reshape(draws, 6).topk(2, dim=1)[1]
        leaves = torch.gather(chosen, 1, two // 3) * 3 + two % 3
        return np.bincount((leaves[:, 0] * 9 + leaves[:, 1]).numpy(), minlength=81) / draws

    want = np.zeros(81)
    for a, b in permutations(range(9), 2):
        want[a * 9 + b] = leaf[a] * leaf[b] / (1 - leaf[a])
    assert abs(want.sum() - 1) < 1e-9
    far = np.abs(frequencies(conditioned=False) - want).sum() / 2
    near = np.abs(frequencies(conditioned=True) - want).sum() / 2
    assert near < 0.03 < far
