"""How candidate state follows the survivors of a step, in torch on any device."""

from __future__ import annotations

import torch
from torch import Tensor


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
