"""The radix pair of `radix.cu` on torch's current stream (RecoGEM 4.3). Needs CuPy and a GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from app.ops import cuda
from app.ops.selection.geometry import Requests
from app.ops.selection.launch import limits
from app.ops.selection.reference import CUT

SOURCE = Path(__file__).with_name("radix.cu")
THREADS = 256
SHIFTS = (53, 42, 31, 20, 9, -2)
"""Where the digits of a key lie that `narrow` finds, one a launch."""
PARTS = 32
"""Blocks that share a request in `narrow` and `collect`."""


def select(rank: Tensor, order: Tensor, of: Requests) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row, column, order [M] and n_valid [R] of the best keep[r] ranks of each request under T0.

    rank [n, F] float32, never NaN or +inf, -inf = invalid · order [n] int64, a permutation of 0 .. W - 1 in a request.
    Raises ValueError where a request's survivors or rows do not fit a block's memory.
    """
    device, (n, columns) = rank.device, rank.shape
    shared = limits(device.index or 0)[1]
    rank, order = rank.contiguous(), order.contiguous()
    keys = 1 << max(1, (of.most - 1).bit_length())
    final = 8 * keys + 2 * of.widest
    if final + 1024 > shared:
        raise ValueError(f"select_top: {of.most} survivors of {of.widest} rows do not fit a block's memory")
    count, total = len(of.keep), of.total
    row, column, place = (torch.empty(total, dtype=torch.int64, device=device) for _ in range(3))
    n_valid = torch.empty(count, dtype=torch.int64, device=device)
    chosen = torch.empty(total, dtype=torch.int64, device=device)
    prefix = torch.empty(count, dtype=torch.int64, device=device)
    work = torch.zeros(count, 2048 + 3, dtype=torch.int32, device=device)  # need, ticket, taken, then digits
    need, ticket, taken = (work.view(-1)[at * count : (at + 1) * count] for at in range(3))
    hist = work.view(-1)[3 * count :]
    line = 4 * (-(-columns // 4) * 4)
    own = line + 8 * 1024 + 256  # of a row, with its digits
    is_cut = columns > CUT * of.most > 0 and n > 0 and own <= shared
    cut = torch.empty((n, of.most) if is_cut else (0,), dtype=torch.int64, device=device)
    starts = [of.row_start.data_ptr(), of.keep.data_ptr()]
    if is_cut:
        first = cuda.load(SOURCE, "precut", device, memory=line, CUT=1)
        ends = [cut.data_ptr(), columns, count, of.most]
        first.launch(n, THREADS, rank.data_ptr(), order.data_ptr(), *starts, *ends)
    source = [rank.data_ptr(), order.data_ptr(), cut.data_ptr(), *starts]
    narrow = cuda.load(SOURCE, "narrow", device, CUT=int(is_cut))
    state = [prefix.data_ptr(), need.data_ptr(), hist.data_ptr(), ticket.data_ptr()]
    for shift in SHIFTS:
        narrow.launch(count * PARTS, THREADS, *source, *state, columns, of.most, PARTS, shift)
    collect = cuda.load(SOURCE, "collect", device, memory=final, CUT=int(is_cut))
    outputs = [one.data_ptr() for one in (chosen, taken, ticket, row, column, place, n_valid)]
    collect.launch(
        count * PARTS, THREADS, *source, of.out_start.data_ptr(), prefix.data_ptr(), *outputs, columns, of.most, PARTS,
        keys,
    )  # fmt: skip
    return row, column, place, n_valid
