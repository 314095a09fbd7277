"""Policies of every kind in one batch, end to end, against a sequential search over the model's own definition."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from app.engine.families.onerec_config import parse
from app.engine.families.onerec_reference import OneRecReference, pad_history
from app.policies import noise
from app.policies.reference import Grid, score_step
from app.policies.reference_final import Listed, final_list
from app.policies.reference_select import select_step
from app.runtime.job import seed_of
from app.runtime.state import TRANSITIONS
from tests import support

SIZES = (4, 5, 6)
EPS = 1e-4
HISTORY = ("i3", "i9", "i11")
HEAD = "widebeam: 1\nwidths: [4, 8, 12]\nsteps:\n  all:\n    normalize: valid\n    mask: trie and not seen\n"
POLICIES = {
    "plain": "",
    "temperature": "    logits: logit / 0.5\n",
    "cut": "    keep:\n      - top_k(3)\n      - top_p(0.9)\n",
    "near": "    prune:\n      - within(2.5)\n",
    "sibling": "    rank: score - 0.4 * sibling\n",
    "caps": "    quota:\n      - cap(parent, max=2)\n",
    "first code": "  3:\n    quota:\n      - cap(token[1], max=3)\n      - cap(parent, max=2)\n",
    "floor": "    quota:\n      - floor(parent, min=1)\n",
    "diverse": "    select: diverse(groups=2, penalty=0.7)\n",
    "stochastic": "    select: stochastic()\n",
    "explore": "    select: explore(share=0.5)\n",
    "late exploration": "  2:\n    select: explore(share=0.5)\n",
    "early exploration": "  1:\n    select: explore(share=0.5)\n",
    "exploration but once": "    select: explore(share=0.5)\n  2:\n    select: top()\n",
    "noisy": "    rank: score + 0.5 * gumbel + 0.1 * uniform\n",
    "list": "final:\n  score: score - 0.3 * position\n  rerank: mmr(weight=0.6, pool=8)\n  limit: 6\n",
    "all codes": "    mask: not seen\n",
}


def policy(text: str) -> str:
    head = HEAD.replace("    mask: trie and not seen\n", "") if "mask" in text else HEAD
    return head + text


class Oracle:
    """The search of one request, one step after the other, with the model's logits for each prefix."""

    def __init__(self, vocab, job) -> None:
        raw = support.onerec_config(SIZES)
        self.config = parse(raw)
        self.model = OneRecReference(self.config).eval()
        self.model.load_state_dict(support.onerec_weights(raw))
        self.vocab, self.job = vocab, job
        self.seen = {tuple(sid) for sid in vocab.sids(vocab.find(HISTORY)).tolist()}
        self.sids = [tuple(sid) for sid in vocab.codes.tolist()]

    def logits(self, prefixes: np.ndarray, t: int) -> np.ndarray:
        history = torch.from_numpy(self.vocab.sids(self.vocab.find(HISTORY))).long().reshape(-1, len(SIZES))
        padded = np.zeros((len(prefixes), len(SIZES) - 1), np.int64)
        padded[:, : t - 1] = prefixes
        with torch.no_grad():
            steps = self.model(pad_history([history], self.config.history), torch.from_numpy(padded)[None])
        return steps[t - 1][0].float().numpy()

    def grid(self, t: int, prefixes, parent, carry) -> Grid:
        c = SIZES[t - 1]
        below = [
            [[sid for sid in self.sids if sid[:t] == (*row, code)] for code in range(c)] for row in prefixes.tolist()
        ]
        trie = np.array([[bool(items) for items in row] for row in below]).reshape(len(prefixes), c)
        seen = np.array([[bool(items) and set(items) <= self.seen for items in row] for row in below]).reshape(
            trie.shape
        )
        code = np.tile(np.arange(c), (len(prefixes), 1))
        seeds = torch.full((len(prefixes),), seed_of(self.job.request))
        rows, codes = torch.from_numpy(prefixes), torch.from_numpy(code)
        drawn = {
            "gumbel": noise.gumbel(seeds, rows, codes, t).numpy(),
            "uniform": noise.uniform(seeds, rows, codes, t).numpy(),
            "explore": noise.gumbel(seeds, rows, codes, t, noise.EXPLORE).numpy(),
        }
        legal = trie if self.job.plan.structure.steps[t - 1].children else np.ones_like(trie)
        return Grid(
            self.logits(prefixes, t), code, legal, trie, seen, np.zeros_like(trie), parent, None, {}, t,
            self.job.plan.widths[t - 1], np.arange(len(prefixes)), prefixes, carry, drawn,
        )  # fmt: skip

    def search(self) -> list[tuple[tuple[int, ...], float]]:
        prefixes, parent, carry = np.zeros((1, 0), np.int64), np.zeros(1, np.float32), None
        for t, phases in enumerate(self.job.plan.resolved["steps"], 1):
            grid = self.grid(t, prefixes, parent, carry)
            score = score_step(phases, grid, self.job.plan.operators).score
            chosen = select_step(phases, grid, self.job.plan.operators)
            prefixes = np.array([[*prefixes[r], c] for r, c in chosen.survivors], np.int64).reshape(-1, t)
            parent = np.array([score[at] for at in chosen.survivors], np.float32)
            carry = np.array(chosen.carry, np.float32) if phases["select"] != "top()" else None
        items = [(tuple(row), float(value)) for row, value in zip(prefixes.tolist(), parent, strict=True)]
        items = [one for one in items if one[0] in self.sids]
        sid = np.array([one[0] for one in items], np.int32).reshape(-1, len(SIZES))
        listed = Listed(
            np.array([one[1] for one in items], np.float32), np.arange(len(items)), sid, np.zeros(len(items), bool)
        )
        ranked = final_list(self.job.plan.resolved["final"], listed, self.job.plan.limit)
        return [(items[at][0], score) for at, score in ranked][: self.job.request.k]


def world():
    deployment = support.deployment_of(SIZES, batch=40)
    engine = support.onerec_engine(SIZES, deployment.limits)
    vocab = support.catalogue(support.random_sids(SIZES, 40), SIZES)
    texts = {name.replace(" ", "_"): policy(text) for name, text in POLICIES.items()}
    return deployment, vocab, support.snapshot_of(engine, vocab, deployment, texts), texts


def assert_same(ranked, want, name: str) -> None:
    """The same list; neighbours may change places where their scores lie within EPS."""
    got = [tuple(sid) for sid in ranked.sids.tolist()]
    assert len(got) == len(want), name
    np.testing.assert_allclose(ranked.scores, [score for _, score in want], atol=EPS, err_msg=name)
    assert sorted(got) == sorted(sid for sid, _ in want), name
    gaps = [abs(a - b) > EPS for (_, a), (_, b) in pairwise(want)]
    if all(gaps):
        assert got == [sid for sid, _ in want], name


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_every_kind_of_policy_in_one_batch_answers_as_the_sequential_search(transition):
    deployment, vocab, snapshot, texts = world()
    jobs = [
        support.job_of(snapshot, deployment, HISTORY, policy=name, k=12, request_id=f"{name}-{at}")
        for at in range(2)
        for name in texts
    ]
    for job, ranked in zip(jobs, support.run_batch(jobs, transition), strict=True):
        assert_same(ranked, Oracle(vocab, job).search(), job.request.policy)


def test_noise_and_groups_do_not_depend_on_the_batch():
    deployment, _, snapshot, texts = world()
    jobs = [support.job_of(snapshot, deployment, HISTORY, policy=name, k=12, request_id=name) for name in texts]
    together = support.run_batch(jobs)
    for job, ranked in zip(jobs, together, strict=True):
        (alone,) = support.run_batch([job])
        assert alone.items.tolist() == ranked.items.tolist(), job.request.policy
