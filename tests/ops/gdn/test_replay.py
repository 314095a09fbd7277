import pytest
import torch

from app.ops.gdn import Record, replay, stored_delta
from tests.ops.gdn import cases
from tests.ops.gdn.cases import Shape

SMALL = [Shape(2, 2, 8, 8), Shape(2, 6, 8, 12), Shape(1, 4, 16, 4)]
WIDTHS = [[3, 1, 7], [3, 1, 7], [5, 0, 7], [6, 0, 4], [6, 0, 4]]


@pytest.mark.parametrize("compact", [False, True], ids=["ancestry", "compaction"])
@pytest.mark.parametrize("shape", SMALL, ids=lambda s: "x".join(map(str, s)))
def test_replay_gives_what_a_state_for_every_beam_gives(shape, compact):
    for seed in range(0, 50, 10):
        run = cases.decode(shape, WIDTHS, seed, compact=compact, exact=torch.float64)
        for ours, exact in zip(run.ours, run.exact, strict=True):
            torch.testing.assert_close(ours.double(), exact, atol=2e-6, rtol=1e-5)


def test_records_in_float16_stay_close():
    """The models' own geometry; float16 rounds a record by 2^-12, o is small."""
    shape, widths = Shape(4, 4, 128, 128), [[32, 16]] * 6
    run = cases.decode(shape, widths, 7, records=torch.float16)
    worst = max(float((a - b).abs().max()) for a, b in zip(run.ours, run.exact, strict=True))
    assert 1e-7 < worst < 1e-4


def test_a_delta_beyond_float16_is_held_at_its_largest():
    delta = torch.tensor([1e6, -1e6, 1.0])
    assert stored_delta(delta, torch.float16).tolist() == [65504.0, -65504.0, 1.0]
    assert stored_delta(delta, torch.float32) is delta


def test_what_tombstones_hold_stays_with_them():
    shape, rows = SMALL[1], 6
    x = cases.tokens(rows, shape, 0)
    s_ctx = torch.randn(2, shape.hv, shape.k, shape.v)
    slots = cases.new_records(2, 8, shape)
    slots.put(0, Record(x.alpha, x.v, x.k, torch.ones(rows, shape.hk)))
    start, ancestry = torch.tensor([0, 4, 6]), torch.tensor([[0], [1], [2], [3], [4], [5]])
    clean, _ = replay(*x[:3], x.alpha, x.beta, s_ctx, slots, row_start=start, ancestry=ancestry)
    for tensor in x:
        tensor[[1, 5]] = torch.nan
    ancestry[[1, 5]] = torch.tensor([[2**30], [-7]])
    dirty, _ = replay(*x[:3], x.alpha, x.beta, s_ctx, slots, row_start=start, ancestry=ancestry)
    live = [0, 2, 3, 4]
    assert torch.equal(dirty[live], clean[live])
    assert torch.isfinite(clean).all()


def test_heads_that_do_not_divide_are_refused():
    x = cases.tokens(2, Shape(2, 3, 4, 4), 0)
    with pytest.raises(ValueError, match="3 value heads are not a multiple of the 2 key heads"):
        replay(
            *x[:3], x.alpha, x.beta, torch.zeros(1, 3, 4, 4), cases.new_records(1, 2, Shape(2, 3, 4, 4)),
            row_start=torch.tensor([0, 2]), ancestry=torch.empty(2, 0, dtype=torch.int64),
        )  # fmt: skip
