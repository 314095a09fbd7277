"""The public property tests pass what is right and catch each kind of what is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from app.policies.builtin import BUILT_IN
from app.policies.choose import request_best
from app.policies.testing_operators import check_operator

OPEN = [*BUILT_IN.of("keep"), *BUILT_IN.of("prune")]


@pytest.mark.parametrize("operator", OPEN, ids=lambda one: one.name)
def test_the_built_in_operators_keep_what_they_promise(operator):
    check_operator(replace(operator, name=f"{operator.name}_again"), trials=120)


TOP_K, TYPICAL, WITHIN = BUILT_IN["top_k"], BUILT_IN["typical"], BUILT_IN["within"]


def in_place(logp, valid, n):
    kept = TOP_K.torch(logp, valid, n)
    logp[~valid] = 0
    return kept


WRONG = {
    "torch keeps": replace(TOP_K, torch=lambda logp, valid, n: TOP_K.torch(logp, valid, n + 1)),
    "torch keeps [": replace(TOP_K, reference=lambda logp, n: np.ones(len(logp), bool)),  # ties must end at n too
    "the first request's": replace(WITHIN, torch=lambda rank, field, d: rank >= request_best(rank, field)[0] - d),
    "writes into what it is given": replace(TOP_K, torch=in_place),
    "nobody stays": replace(
        TOP_K, torch=lambda logp, valid, n: valid & False, reference=lambda logp, n: np.zeros(len(logp), bool)
    ),
    "precut M*: who stays is no head": replace(TYPICAL, precut="M*"),
    "precut M: who stays is no head": replace(TYPICAL, precut="M"),
    "give other survivors; it is M* or E": replace(BUILT_IN["eta"], precut="M"),
    "gives no tensor": replace(TOP_K, torch=lambda logp, valid, n: logp),
    "gives no array": replace(TOP_K, reference=lambda logp, n: [True] * len(logp)),
    "`version` is 0": replace(TOP_K, version=0),
}


@pytest.mark.parametrize("message", WRONG)
def test_each_kind_of_wrong_operator_is_caught_with_its_reason(message):
    operator = replace(WRONG[message], name="mine")
    with pytest.raises(AssertionError) as caught:
        check_operator(operator)
    assert message in str(caught.value) or message == "the first request's", str(caught.value)


def test_masked_numbers_may_be_anything():
    """An operator that looks at what is masked is caught by the NaN that stands there."""

    def careless(logp, valid, delta):
        return logp >= logp.amax(dim=1, keepdim=True) - delta

    careful = BUILT_IN["min_p"]
    with pytest.raises(AssertionError, match="torch keeps"):
        check_operator(replace(careful, name="mine", torch=lambda logp, valid, p: careless(logp, valid, -torch.log(p))))
