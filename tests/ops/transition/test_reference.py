"""The ancestry index and the compaction describe the same prefixes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from app.ops.transition import advance, compact, extend_ancestry


def test_ancestry_is_the_papers_recurrence():
    h3 = torch.tensor([[0, 1], [0, 0], [1, 2]], dtype=torch.int32)
    parent = torch.tensor([2, 2, 0, 1])
    h4 = extend_ancestry(h3, parent)
    assert h4.tolist() == [[1, 2, 2], [1, 2, 2], [0, 1, 0], [0, 0, 1]]
    assert h4.dtype == torch.int32


def test_compaction_moves_what_the_ancestry_points_at():
    generator = torch.Generator().manual_seed(3)
    slots = torch.randn(3, 8, 2, 4, generator=generator)
    buffers = [slots.clone(), torch.full_like(slots, torch.nan)]
    index = torch.empty(2, 0, dtype=torch.int32)
    for t, parent in enumerate(([0, 1, 1], [2, 0, 0, 1], [3, 3, 1]), 1):
        rows = torch.tensor(parent)
        index = extend_ancestry(index, rows)
        compact(buffers[0], buffers[1], rows, t)
        buffers.reverse()
        for step in range(t):
            # an untouched slot of a later step is what the engine would write there next
            assert torch.equal(buffers[0][step, : len(rows)], slots[step][index[:, step].long()])
        for step in range(t, 3):
            buffers[0][step] = slots[step]


@given(st.data(), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40))
def test_survivors_have_what_their_parents_wrote_and_their_own_code(data, depth, rows, survivors):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    sids = torch.randint(0, 9000, (rows, depth - 1), generator=generator)
    index = torch.randint(0, 900, (rows, depth - 1), generator=generator, dtype=torch.int32)
    parent = torch.randint(-1, rows, (survivors,), generator=generator)
    code = torch.randint(0, 9000, (survivors,), generator=generator).masked_fill(parent < 0, -1)
    given_ = [one.clone() for one in (parent, code, sids, index)]
    written = advance(parent, code, sids, index)
    for at, (row, own) in enumerate(zip(parent.tolist(), code.tolist(), strict=True)):
        before = max(row, 0)  # a tombstone is row 0's child by code 0
        assert written.sids[at].tolist() == [*sids[before].tolist(), max(own, 0)]
        assert written.ancestry[at].tolist() == [*index[before].tolist(), before]
    assert torch.equal(written.codes.long(), written.sids[:, -1])
    assert [one.dtype for one in written] == [torch.int64, torch.int32, torch.int32]
    without = advance(parent, code, sids, None)
    assert without.ancestry is None
    assert torch.equal(without.sids, written.sids)
    assert all(torch.equal(one, two) for one, two in zip(given_, (parent, code, sids, index), strict=True))
