"""SIDs to items against the definition written as loops."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.policies.reference_final import expand as reference
from app.runtime.final import expand, rank_items
from app.runtime.snapshot import DeadNodes
from app.runtime.state import Finalists
from app.vocab.aggregates import NOTHING
from app.vocab.items import Numbers, Strings, Table
from app.vocab.vocab import Vocab, arrange, make_vocab


def vocab_of(sids: list[int], quality: list[float | None]) -> Vocab:
    """Items in the order of their SIDs, of one code."""
    values = np.array([0 if one is None else one for one in quality], np.float32)
    column = Numbers(values, np.array([one is not None for one in quality], bool))
    names = Strings.of([f"i{at}".encode() for at in range(len(sids))])
    table = Table(names, np.array(sids, np.int32).reshape(-1, 1), {"quality": column})
    return make_vocab(arrange(table, (8,)), (8,))


@settings(max_examples=200)
@given(st.data())
def test_each_sid_gives_its_first_items_or_its_best_ones(data):
    sids = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=20))
    quality = [data.draw(st.none() | st.sampled_from([0.0, -0.0, -2.5, 1.0, 3.0])) for _ in sids]
    vocab = vocab_of(sids, quality)
    column = vocab.attributes["quality"]
    leaves = data.draw(st.lists(st.sampled_from(range(len(set(sids)))), unique=True))
    excluded = data.draw(st.sets(st.integers(0, len(sids) - 1)))
    by, most = data.draw(st.sampled_from(["", "item.quality"])), data.draw(st.integers(1, 4))
    dead = DeadNodes.of(vocab, np.array(sorted(excluded), np.int64)) if excluded else None
    snapshot = SimpleNamespace(vocab=vocab, side=NOTHING)
    job = SimpleNamespace(plan=SimpleNamespace(by=by, per_sid=most), snapshot=snapshot, excluded=dead)
    low, high = vocab.leaf_range(leaves)
    numbers = {n: float(column.values[n]) if column.present[n] else float("nan") for n in range(len(sids))}
    ranges = [range(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
    want = reference(ranges, most, excluded, numbers if by else None)
    owner, items = expand(job, low, high)
    assert list(zip(owner.tolist(), items.tolist(), strict=True)) == want


@settings(max_examples=200)
@given(st.data())
def test_requests_of_a_batch_get_what_each_alone_would_in_whatever_order_their_rows_lie(data):
    sids = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=20))
    quality = [data.draw(st.none() | st.sampled_from([0.0, -2.5, 1.0])) for _ in sids]
    vocab = vocab_of(sids, quality)
    column = vocab.attributes["quality"]
    numbers = {n: float(column.values[n]) if column.present[n] else float("nan") for n in range(len(sids))}
    leaves, first = len(set(sids)), int(vocab.trie.level_start[1])
    snapshot = SimpleNamespace(vocab=vocab, side=NOTHING)
    jobs, rows, start, want = [], [], [0], []
    for _ in range(data.draw(st.integers(1, 4))):
        by, most = data.draw(st.sampled_from(["", "item.quality"])), data.draw(st.integers(1, 3))
        k, limit = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
        excluded = data.draw(st.sets(st.integers(0, len(sids) - 1), max_size=4))
        dead = DeadNodes.of(vocab, np.array(sorted(excluded), np.int64))
        plan = SimpleNamespace(by=by, per_sid=most, limit=limit, final=None)
        jobs.append(SimpleNamespace(plan=plan, request=SimpleNamespace(k=k), snapshot=snapshot, excluded=dead))
        beams = data.draw(st.lists(st.sampled_from(range(leaves)), unique=True))
        scores = st.sampled_from([-1.0, -2.0, -2.5, -np.inf])
        own = [(at, data.draw(st.sampled_from([leaf, None])), data.draw(scores)) for at, leaf in enumerate(beams)]
        rows += data.draw(st.permutations(own))
        start.append(len(rows))
        live = [(leaf, score) for _, leaf, score in own if leaf is not None and score > -np.inf]
        low, high = vocab.leaf_range([leaf for leaf, _ in live])
        ranges = [range(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
        pairs = reference(ranges, most, excluded, numbers if by else None)
        best = sorted(((item, live[of][1]) for of, item in pairs), key=lambda one: -one[1])
        want.append(best[: min(k, limit)])
    order = torch.tensor([at for at, _, _ in rows], dtype=torch.int64)
    node = torch.tensor([-1 if leaf is None else first + leaf for _, leaf, _ in rows], dtype=torch.int64)
    score = torch.tensor([score for _, _, score in rows], dtype=torch.float32)
    names = [-1 if leaf is None else sorted(set(sids))[leaf] for _, leaf, _ in rows]
    found = Finalists(start, order, node, score, torch.tensor(names, dtype=torch.int64).reshape(-1, 1))
    ranked = rank_items(jobs, found, vocab, 1)
    for one, expected in zip(ranked, want, strict=True):
        assert list(zip(one.items.tolist(), one.scores.tolist(), strict=True)) == expected
        assert one.sids.tolist() == vocab.sids(one.items).tolist()
        assert (one.items.dtype, one.scores.dtype, one.sids.dtype) == (np.int64, np.float32, np.int32)
