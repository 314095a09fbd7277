from __future__ import annotations

import pytest
import torch

from app.policies import choose, keep, program
from app.policies.facts import facts_of
from app.policies.selfcheck import KINDS, self_check
from tests.policies.batches import CATALOGUE
from tests.policies.contracts import compiled, contract
from tests.policies.test_choose import DIVERSE, ON, PLANS, STOCHASTIC


@pytest.mark.parametrize("name", [*PLANS, "diverse", "stochastic"])
def test_every_kind_of_plan_proves_itself(name):
    plan = {**PLANS, "diverse": DIVERSE, "stochastic": STOCHASTIC}[name]
    assert self_check(plan, ON.sizes, facts_of(ON, CATALOGUE)) is None


def test_a_proof_is_made_in_pieces_of_one_probe():
    pieces = []
    assert self_check(DIVERSE, ON.sizes, facts_of(ON, CATALOGUE), lambda: pieces.append(1)) is None
    assert len(pieces) >= 2 * len(KINDS) * 2, "step 1 and a later one, made and compared"


def text(*lines: str) -> str:
    return "widebeam: 1\nsteps:\n  all:\n    normalize: valid\n" + "".join(f"    {one}\n" for one in lines)


def broken_finish(score, rank, valid, broken):
    return program.Scored(score, torch.where(valid, rank, -torch.inf), valid.sum(dim=1) * 0)


BUGS = [
    (program, "_finish", broken_finish, text()),
    (program, "_valid", lambda parts, inputs, frame, logit: inputs.legal, text("mask: trie and not seen")),
    (program, "_norm", lambda *args, **named: None, text()),
    (keep, "ordered", lambda values, valid: keep.Row(values, valid.long() * 0), text("keep:", "  - top_k(2)")),
    (choose, "request_best", lambda rank, field: rank.amax(dim=1) - 9, text("prune:", "  - within(1)")),
    (choose, "place_in", lambda group, member: member.long() * 0, text("quota:", "  - cap(parent, max=2)")),
    (choose, "diverse", lambda rank, *rest: (rank, rank * 0), text("select: diverse(groups=2, penalty=9)")),
    (choose, "stochastic", lambda score, noise, parent: score, text("select: stochastic()")),
    (choose, "explore", lambda rank, field, noise, share: (rank, rank * 0), text("select: explore(share=0.5)")),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name", "bug", "policy"), BUGS, ids=[name for _, name, _, _ in BUGS])
def test_a_plan_with_a_bug_is_refused(module, name, bug, policy, monkeypatch):
    assert compiled(policy, contract())[0] is not None
    monkeypatch.setattr(module, name, bug)
    plan, found = compiled(policy, contract())
    assert plan is None
    assert [one.rule.code for one in found.errors] == ["C101"]
    assert found.errors[0].message.startswith("the plan differs from the reference: step ")
