"""What every cut of a row promises; tests/oracles holds them against the library classes that the catalogue names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.policies.builtin import BUILT_IN
from app.policies.keep import ordered

TAILS = {one.name for one in BUILT_IN.of("keep") if one.precut != "E"}
KEEP = {one.name: one.torch for one in BUILT_IN.of("keep")}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(TAILS)), st.integers(0, 2**31), st.floats(0.001, 1))
def test_the_best_of_a_row_stays_masked_ones_never_come_back_and_cuts_are_tails(name, seed, argument):
    rng = np.random.default_rng(seed)
    logp = torch.from_numpy(rng.choice(np.array([-0.1, -1, -1, -2, -9], np.float32), (5, 8)))
    valid = torch.from_numpy(rng.random((5, 8)) < 0.7)
    kept = KEEP[name](logp, valid, torch.tensor([[argument if name != "top_k" else 1 + argument * 6]]))
    assert not (kept & ~valid).any()
    assert torch.equal(kept.any(dim=1), valid.any(dim=1))
    for row, stays, was in zip(logp, kept, valid, strict=True):
        dropped = row[was & ~stays]
        assert not len(dropped) or dropped.max() <= row[stays].min()


@pytest.mark.parametrize(
    ("name", "argument"),
    [("top_k", 8), ("top_p", 1.0), ("min_p", 0.0), ("epsilon", 0.0), ("eta", 0.0), ("typical", 1.0)],
)
def test_the_argument_without_effect_keeps_everything(name, argument):
    logp = torch.log_softmax(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    valid = torch.ones(4, 8, dtype=torch.bool)
    assert torch.equal(KEEP[name](logp, valid, torch.tensor([[argument]])), valid)


def test_places_break_ties_by_code():
    row = ordered(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), torch.tensor([[True, True, True, False]]))
    assert row.place.tolist() == [[2, 0, 1, 3]]
