from importlib import import_module

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from app.ops.gdn import projection, replay
from app.ops.gdn.projection import ROWS, by_piece, by_width, shared_projection
from tests.no_wait import NoWait
from tests.ops.gdn.cases import Shape, new_records, tokens

PARTS, HK, GROUP, DIM, WIDTH = 2, 2, 3, 5, 4
WAYS = (by_width, by_piece)


def operands(widths, pads=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(widths) + pads, PARTS, HK, DIM, generator=generator)
    s_ctx = torch.randn(len(widths), HK * GROUP, DIM, WIDTH, generator=generator)
    return x, s_ctx, torch.tensor([0, *widths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def row_by_row(x, s_ctx, row_start):
    """The definition, in float64; rows of nobody are left out."""
    request = torch.repeat_interleave(torch.arange(len(s_ctx)), row_start.diff())
    own = s_ctx.double().view(-1, HK, GROUP, DIM, WIDTH)[request]
    return torch.einsum("nphk,nhgkv->nphgv", x[: len(request)].double(), own)


@pytest.mark.parametrize("way", WAYS)
@given(
    widths=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=9),
    pads=st.integers(0, 9),
    rows=st.integers(1, 20),
    copied=st.sampled_from([1, 4 * HK * GROUP * DIM * WIDTH, 1 << 20]),
)
def test_every_row_meets_the_state_of_its_own_request(way, widths, pads, rows, copied):
    x, s_ctx, start = operands(widths, pads, rows)
    with pytest.MonkeyPatch.context() as patch, NoWait(on=way is by_piece):
        patch.setattr(projection, "ROWS", rows)
        patch.setattr(projection, "COPIED", copied)
        found = way(x, s_ctx, start)
    event(f"{sum(width > rows for width in widths)} requests of several pieces")
    torch.testing.assert_close(found[: sum(widths)].double(), row_by_row(x, s_ctx, start), atol=1e-5, rtol=1e-5)
    assert found.shape == (sum(widths) + pads, PARTS, HK, GROUP, WIDTH)
    assert found.isfinite().all(), "rows of nobody are numbers, too"


@pytest.mark.parametrize("widths", [[1] * 5 + [ROWS] * 4, [ROWS + 1] * 3, [0, 0, 3 * ROWS + 1], [1, 1, 1], [2 * ROWS]])
def test_there_are_as_many_pieces_as_any_such_rows_need(widths):
    x, s_ctx, start = operands(widths)
    torch.testing.assert_close(by_piece(x, s_ctx, start).double(), row_by_row(x, s_ctx, start), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_row_holds_stays_with_it(way):
    x, s_ctx, start = operands([70, 3, 0, 9])
    clean = way(x, s_ctx, start)
    dead = [0, 63, 64, 69, 70, 81]
    x[dead] = torch.nan
    live = [n for n in range(82) if n not in dead]
    assert torch.equal(way(x, s_ctx, start)[live], clean[live])
    s_ctx[1] = torch.inf
    live = [n for n in live if not 70 <= n < 73]
    assert torch.equal(way(x, s_ctx, start)[live], clean[live])


@pytest.mark.parametrize("way", WAYS)
def test_no_rows_are_no_rows(way):
    x, s_ctx, start = operands([0, 0])
    assert way(x, s_ctx, start).shape == (0, PARTS, HK, GROUP, WIDTH)


def test_only_a_cpu_is_asked_for_widths(monkeypatch):
    asked = []
    monkeypatch.setattr(projection, "by_width", lambda *_: asked.append("width"))
    monkeypatch.setattr(projection, "by_piece", lambda *_: asked.append("piece"))
    shared_projection(*operands([3]))
    shared_projection(*(one.to("meta") for one in operands([3])))
    assert asked == ["width", "piece"]


def test_a_replay_by_pieces_is_one_by_widths(monkeypatch):
    shape, n = Shape(HK, HK * GROUP, 16, 12), 150
    x, s_ctx = tokens(n, shape, 1), torch.randn(3, shape.hv, shape.k, shape.v) / 4
    how = {"row_start": torch.tensor([0, 100, 100, n]), "ancestry": torch.empty(n, 0, dtype=torch.int64)}
    found = []
    for way in WAYS:
        monkeypatch.setattr(import_module("app.ops.gdn.replay"), "shared_projection", way)
        found.append(replay(*x[:3], x.alpha, x.beta, s_ctx, new_records(1, n, shape), **how))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
