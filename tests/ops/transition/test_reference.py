"""The ancestry index and the compaction describe the same prefixes."""

import torch

from app.ops.transition import compact, extend_ancestry


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
