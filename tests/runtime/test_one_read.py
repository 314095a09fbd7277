"""Plans that follow the logits may select from them directly, as a GPU does: the survivors are those of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from app.runtime import selection
from tests import support

SIZES = (4, 5, 6)
HEAD = "widebeam: 1\nwidths: [4, 9, 14]\nsteps:\n  all:\n"
FOLLOW = {
    "full": "    normalize: full\n",
    "step": "    normalize: step\n    mask: trie and not seen\n",
    "valid": "    normalize: valid\n    mask: trie and not seen\n",
    "none": "    normalize: none\n    score: logp + parent\n",
    "trie": "    normalize: step\n    mask: trie\n",
    "anything": "    normalize: step\n    mask: none\n",
    "all codes": "    normalize: step\n    mask: not seen\n",
}
OTHER = {
    "temperature": "    normalize: step\n    logits: logit / 0.5\n",
    "ranked": "    rank: score - 0.4 * sibling\n",
    "cut": "    keep:\n      - top_k(3)\n",
    "capped": "    quota:\n      - cap(parent, max=2)\n",
}
HISTORIES = ((), ("i1",), ("i3", "i9", "i11"))


@pytest.fixture(scope="module")
def world():
    deployment = support.deployment_of(SIZES)
    vocab = support.catalogue(support.random_sids(SIZES, 40), SIZES)
    policies = {name.replace(" ", "_"): HEAD + text for name, text in (FOLLOW | OTHER).items()}
    engine = support.onerec_engine(SIZES, deployment.limits)
    return deployment, support.snapshot_of(engine, vocab, deployment, policies)


def jobs(world, names, histories=HISTORIES, exclude=("i4", "i5")):
    deployment, snapshot = world
    return [
        support.job_of(snapshot, deployment, history, policy=name.replace(" ", "_"), exclude=exclude, k=30)
        for name in names
        for history in histories
    ]


def both(world, names, monkeypatch, histories=HISTORIES):
    ranked = support.run_batch(jobs(world, names, histories))
    called = []

    def counted(*given, **named):
        called.append(named["normalize"])
        return original(*given, **named)

    original = selection.select_logits
    with monkeypatch.context() as patch:
        patch.setattr(selection, "one_read", lambda *_: True)
        patch.setattr(selection, "select_logits", counted)
        direct = support.run_batch(jobs(world, names, histories))
    for one, other in zip(ranked, direct, strict=True):
        assert one.items.tolist() == other.items.tolist()
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-5)
    return called


@pytest.mark.parametrize("name", FOLLOW)
def test_a_plan_that_follows_the_logits_selects_from_them(world, name, monkeypatch):
    assert len(both(world, [name], monkeypatch)) == len(SIZES)


@pytest.mark.parametrize("name", ["trie", "anything"])
def test_a_mask_of_children_alone_lists_none(world, name, monkeypatch):
    monkeypatch.setattr(selection, "one_read", lambda *_: True)
    monkeypatch.setattr(selection.Selection, "_inputs", None)
    assert all(len(ranked.items) for ranked in support.run_batch(jobs(world, [name], exclude=())))


@pytest.mark.parametrize("name", OTHER)
def test_another_plan_does_not(world, name, monkeypatch):
    assert not both(world, [name], monkeypatch)


def test_both_kinds_share_a_batch(world, monkeypatch):
    assert len(both(world, [*FOLLOW, *OTHER], monkeypatch, HISTORIES[2:])) == len(SIZES) * len(FOLLOW)


def test_a_cpu_selects_by_ranks(world, monkeypatch):
    monkeypatch.setattr(selection, "select_logits", None)
    assert all(len(ranked.items) for ranked in support.run_batch(jobs(world, ["step"])))
