"""Cuts of a row against the logits warpers of transformers (policy-language V08-V12)."""

from __future__ import annotations

import pytest
import torch
import transformers

from app.policies.builtin import BUILT_IN

WARPERS = {
    "top_k": lambda n: transformers.TopKLogitsWarper(int(n)),
    "top_p": transformers.TopPLogitsWarper,
    "min_p": transformers.MinPLogitsWarper,
    "epsilon": transformers.EpsilonLogitsWarper,
    "eta": transformers.EtaLogitsWarper,
    "typical": transformers.TypicalLogitsWarper,
}
ARGUMENTS = {
    "top_k": [1, 3, 7],
    "top_p": [0.1, 0.5, 0.9],
    "min_p": [0.05, 0.3, 0.9],
    "epsilon": [0.01, 0.1],
    "eta": [0.01, 0.3],
    "typical": [0.05, 0.4, 0.9],
}


@pytest.mark.parametrize("name", WARPERS)
def test_rows_are_cut_as_transformers_cuts_them(name):
    generator = torch.Generator().manual_seed(3)
    for trial in range(300):
        logits = torch.randn(4, 12, generator=generator) * (0.3 + trial % 5)
        for argument in ARGUMENTS[name]:
            logp = torch.log_softmax(logits, dim=1)
            theirs = WARPERS[name](argument)(None, logits.clone()) > -torch.inf
            ours = BUILT_IN[name].torch(logp, torch.ones_like(theirs), torch.tensor([[float(argument)]]))
            assert torch.equal(ours, theirs), (name, argument, trial)
