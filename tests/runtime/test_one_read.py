"""Plans that follow the logits may select from them directly, as a GPU does: the survivors are those of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.ops.selection import Chosen, sanitise, select_top
from app.runtime import selection
from tests import support
from tests.policies.c_expressions import compute, definitions, noise, rank_of, stays

SIZES = (4, 5, 6)
HEAD = "widebeam: 1\nwidths: [4, 9, 14]\nsteps:\n  all:\n"
FOLLOW = {
    "full": "    normalize: full\n",
    "step": "    normalize: step\n    mask: trie and not seen\n",
    "valid": "    normalize: valid\n    mask: trie and not seen\n",
    "none": "    normalize: none\n    score: logp + parent\n",
    "trie": "    normalize: step\n    mask: trie\n",
    "pruned": "    normalize: step\n    prune:\n      - within(1.1)\n      - above(-30)\n",
    "far behind": "    normalize: valid\n    mask: not seen\n    prune:\n      - above(-2)\n",
    "anything": "    normalize: step\n    mask: none\n",
    "all codes": "    normalize: step\n    mask: not seen\n",
}
OTHER = {
    "temperature": "    normalize: step\n    logits: logit / 0.5\n",
    "ranked": "    rank: score - 0.4 * sibling\n",
    "cut": "    keep:\n      - top_k(3)\n",
    "capped": "    quota:\n      - cap(parent, max=2)\n",
}
EXPRESSIONS = {
    "temperature": OTHER["temperature"],
    "weighted": "    normalize: full\n    score: parent + 0.7 * logp\n",
    "unseen first": "    normalize: step\n    rank: score - where(seen, 5, 0)\n",
    "likely": "    normalize: valid\n    mask: trie and not seen\n    rank: score + 3 * prob - width / 9\n",
    "likely enough": "    normalize: step\n    keep:\n      - min_p(0.4)\n      - epsilon(0.05)\n",
    "three of a row": "    normalize: full\n    keep:\n      - top_k(3)\n",
    "near": "    normalize: full\n    score: parent + 0.7 * logp\n    prune:\n      - within(0.8)\n",
    "any code": "    normalize: none\n    mask: not seen\n    rank: where(logp > 0, score, 2 * score) - width\n",
    "noisy": "    normalize: full\n    rank: score + 0.7 * gumbel - uniform\n",
    "drawn": "    normalize: valid\n    mask: trie and not seen\n    select: stochastic()\n",
    "drawn of few": "    normalize: valid\n    keep:\n      - min_p(0.3)\n    select: stochastic()\n",
}
HISTORIES = ((), ("i1",), ("i3", "i9", "i11"))


@pytest.fixture(scope="module")
def world():
    deployment = support.deployment_of(SIZES)
    vocab = support.catalogue(support.random_sids(SIZES, 40), SIZES)
    policies = {name.replace(" ", "_"): HEAD + text for name, text in (FOLLOW | OTHER | EXPRESSIONS).items()}
    engine = support.onerec_engine(SIZES, deployment.limits)
    return deployment, support.snapshot_of(engine, vocab, deployment, policies)


def jobs(world, names, histories=HISTORIES, exclude=("i4", "i5")):
    deployment, snapshot = world
    return [
        support.job_of(snapshot, deployment, history, policy=name.replace(" ", "_"), exclude=exclude, k=30)
        for name in names
        for history in histories
    ]


def as_the_kernels(logits, parent, order, row_start, keep, *, normalize, ranked, mask=None, norm=None):
    """`select_ranked` in NumPy, from the text that the kernels are compiled with."""
    lines, (sane, _), size = definitions(ranked.definitions), sanitise(logits), logits.shape[1]
    legal = np.ones(sane.shape, bool)
    if mask is not None:
        legal = np.unpackbits(mask.numpy(), axis=1, bitorder="little")[:, :size].astype(bool)
    values, columns = (
        [one[:, None] for one in ranked.values.numpy().T],
        [one.numpy()[:, :size] for one in ranked.columns],
    )
    names = {"logit": sane.numpy(), "parent": parent.numpy()[:, None]}
    logit = torch.from_numpy(compute(lines.get("RANK_LOGIT", "logit"), names, values, columns))
    if normalize != "given":
        over = torch.where(torch.from_numpy(legal), logit, -torch.inf) if normalize == "valid" else logit
        norm = torch.logsumexp(over, 1)
    assert int(lines["RANK_NORMED"]) == (normalize != "none")
    names["logp"] = (logit - norm[:, None] if normalize != "none" else logit).numpy()
    code = torch.arange(size).expand(sane.shape)
    if ranked.noise is not None:
        names |= noise(lines, ranked.noise.numpy(), code.numpy())
    names["score"] = np.broadcast_to(compute(lines["RANK_SCORE"], names, values, columns), sane.shape)
    good = stays(lines, names, values, legal & (parent > -torch.inf).numpy()[:, None]) & np.isfinite(names["score"])
    rank = rank_of(lines, names, values, columns, good)
    rank = torch.from_numpy(np.where(good & np.isfinite(rank), rank, -np.inf).astype(np.float32)) + 0.0
    best = select_top(rank, code, order, size, row_start, keep)
    at, column = best.parent.clamp(min=0), best.column.clamp(min=0)
    score = torch.from_numpy(names["score"].astype(np.float32))[at, column].masked_fill(best.parent < 0, -torch.inf)
    none = torch.zeros(len(logits), dtype=torch.int32)
    slots = torch.empty(len(score), 0, dtype=torch.int32)
    carried = rank[at, column].masked_fill(best.parent < 0, -torch.inf) if ranked.wanted else rank.new_empty(0)
    return Chosen(best.parent, best.column, best.order, score, best.n_valid, none, slots), none, carried


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_plan_whose_expressions_the_kernels_compute_selects_the_same(world, name, monkeypatch):
    ranked, called = support.run_batch(jobs(world, [name])), []

    def counted(*given, **named):
        called.append(named["normalize"])
        return as_the_kernels(*given, **named)

    monkeypatch.setattr(selection, "ranked_ready", lambda *_, **__: True)
    monkeypatch.setattr(selection, "select_ranked", counted)
    direct = support.run_batch(jobs(world, [name]))
    assert len(called) == len(SIZES)
    for one, other in zip(ranked, direct, strict=True):
        assert one.items.tolist() == other.items.tolist()
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-5)


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
