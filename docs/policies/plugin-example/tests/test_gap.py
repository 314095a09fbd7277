"""What the declaration promises, by Widebeam's own property tests, and what no property says: the point of it."""

from __future__ import annotations

import torch
from widebeam_gap import GAP, stays

from app.policies.testing_operators import check_operator


def test_gap_keeps_what_its_declaration_promises():
    check_operator(GAP)


def test_a_row_ends_where_the_model_draws_the_line():
    logp = torch.tensor([[-0.4, -9.0, -1.3, -4.0, -4.2]])
    kept = stays(logp, torch.ones_like(logp, dtype=torch.bool), torch.tensor([[2.0]]))
    assert kept.tolist() == [[True, False, True, False, False]]
