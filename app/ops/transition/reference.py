"""How candidate state follows the survivors of a step, in torch on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Written(NamedTuple):
    """What the rows of step t + 1 have written, and where it lies.

    sids      [N, t] int64     the codes of steps 1..t
    codes     [N] int32        the last of them
    ancestry  [N, t] int32     `extend_ancestry`; None where none was given
    """

    sids: Tensor
    codes: Tensor
    ancestry: Tensor | None


def advance(parent: Tensor, code: Tensor, sids: Tensor, ancestry: Tensor | None) -> Written:
    """The survivors of step t become rows: each has what its parent had, and its own code.

    parent, code [N'] int64: row of step t and code; below 0: a tombstone, which is row 0's child by code 0 ·
    sids [N, t - 1] int64 · ancestry [N, t - 1] int32, or None where no index is kept
    """
    at, last = parent.clamp(min=0), code.clamp(min=0)
    sids = torch.cat((sids.index_select(0, at), last.unsqueeze(1)), dim=1)
    return Written(sids, last.to(torch.int32), None if ancestry is None else extend_ancestry(ancestry, at))


def extend_ancestry(ancestry: Tensor, parent: Tensor) -> Tensor:
    """h_t(b, j) = h_{t-1}(parent(b), j) for earlier steps, parent(b) for the last one (OneLA 3.3).

    ancestry [N, t - 1] int32 · parent [N'] int64, a row of step t (tombstones: any row). Returns [N', t] int32.
    A survivor costs one index row: no state is read or moved.
    """
    return torch.cat((ancestry.index_select(0, parent), parent.to(ancestry.dtype).unsqueeze(1)), dim=1)


def compact(active: Tensor, standby: Tensor, parent: Tensor, steps: int) -> None:
    """Gather the survivors' slots of steps 1..steps from the active buffer into the standby one (RecoGEM 3.2).

    active, standby [L - 1, rows, *shape], different memory · parent [N'] int64. Writes standby[:steps, :N'].
    """
    for step in range(steps):
        torch.index_select(active[step], 0, parent, out=standby[step, : len(parent)])
