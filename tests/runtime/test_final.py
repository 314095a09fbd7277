"""SIDs to items against the definition written as loops."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from app.policies.reference_final import expand as reference
from app.runtime.final import expand
from app.runtime.snapshot import DeadNodes
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
