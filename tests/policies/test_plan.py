from __future__ import annotations

import pytest

from tests.policies.contracts import plan_of


@pytest.mark.parametrize(("mask", "trie"), [("trie and not seen", True), ("not seen", False), ("none", False)])
def test_a_plan_knows_whether_every_step_is_confined_to_the_catalogue(mask, trie):
    assert plan_of(f"widebeam: 1\nsteps: {{2: {{mask: {mask}}}}}\n").trie == trie
