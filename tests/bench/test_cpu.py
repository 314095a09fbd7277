"""Parts of the CPU bench; the whole of it runs at toy size in tests/oracles/test_bench_cpu.py."""

import numpy as np
import pytest
import torch

from bench._peers import Catalogue, CsrMask
from bench._setting import TOY, make_catalogue, make_histories, make_prompts
from bench.cpu import compare

ONE = [[((0, 1), -1.0), ((2, 3), -1.5), ((4, 5), -2.0)]]


def test_equal_answers_and_near_ties_are_equal():
    assert compare(ONE, ONE, "x") == 0
    tied = [[((0, 1), -1.0), ((4, 5), -1.5), ((2, 3), -1.50005)]]
    assert compare([[((0, 1), -1.0), ((2, 3), -1.5), ((4, 5), -1.50005)]], tied, "x") == 2
    assert compare(ONE, [[*ONE[0][:2], ((6, 7), -2.0)]], "x") == 1, "a tie at the cut"


@pytest.mark.parametrize(
    "other",
    [
        ONE[0][:2],
        [ONE[0][0], ONE[0][1], ((4, 5), -2.001)],
        [ONE[0][0], ((6, 7), -1.5), ONE[0][2]],
        [ONE[0][0], ONE[0][0], ONE[0][2]],
    ],
    ids=["short", "score", "another item", "twice"],
)
def test_other_answers_are_refused(other):
    with pytest.raises(RuntimeError, match="x: "):
        compare(ONE, [other], "x")


def test_the_mask_leaves_exactly_the_legal_children():
    sids = make_catalogue(TOY)
    mask = CsrMask(Catalogue(sids, TOY.sizes, TOY.token_base), TOY.prompt)
    prompt = make_prompts(TOY, sids, make_histories(TOY, 1))[0]
    for t in range(3):
        for prefix in (sids[0, :t], sids[77, :t]):
            written = torch.from_numpy(prefix) + torch.tensor(TOY.token_base[:t])
            ids = torch.cat([prompt, written.long()]).unsqueeze(0)
            left = mask(ids, torch.randn(1, TOY.vocabulary))[0]
            legal = np.unique(sids[(sids[:, :t] == prefix).all(1), t]) + TOY.token_base[t]
            assert torch.isfinite(left).nonzero().flatten().tolist() == legal.tolist()
