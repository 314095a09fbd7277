"""Projection replay (OneLA 3.2): a decode step of all beams without a state of any of them.

A beam's state is its request's S_ctx and the records (alpha_j, delta_j, k_j) of its ancestors. A step needs it in two
projections only, which the records change by a dot product each:

    u_q = S_ctx q,  u_k = S_ctx k;   for every ancestor j, oldest first:   u = alpha_j u + delta_j (k_j . q | k)
    delta = beta (v - alpha u_k)          o = alpha u_q + delta (k . q)

Letters: R requests, N rows, HK key heads, HV value heads (G = HV / HK neighbours share a key head), K and V head dims.
No tensor here has N * HV * K * V elements: S_ctx is read once for many beams of a request (`projection.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from app.ops.gdn.projection import shared_projection


class Records(NamedTuple):
    """The slots of the transition records: slot (j, n) holds what row n of step j + 1 wrote, once.

    alpha  [steps, rows, HV] float32
    delta  [steps, rows, HV, V] float
    k      [steps, rows, HK, K] float: keys as the convolution gives them
    norm   [steps, rows, HK] float32: 1 / |k|. The rule's key is k * norm, so 16 bit round no key
    """

    alpha: Tensor
    delta: Tensor
    k: Tensor
    norm: Tensor

    def put(self, j: int, record: Record) -> None:
        """Write slots (j, 0..N-1)."""
        n = record.alpha.shape[0]
        self.alpha[j, :n] = record.alpha
        self.delta[j, :n] = stored_delta(record.delta, self.delta.dtype)
        self.k[j, :n] = record.k
        self.norm[j, :n] = record.norm


class Record(NamedTuple):
    """The transition of N rows: alpha [N, HV], delta [N, HV, V] float32, k [N, HK, K] float, norm [N, HK] float32."""

    alpha: Tensor
    delta: Tensor
    k: Tensor
    norm: Tensor


def replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    s_ctx: Tensor,
    records: Records,
    *,
    row_start: Tensor,
    ancestry: Tensor,
    first: int = 0,
    compact: bool = False,
) -> tuple[Tensor, Tensor]:
    """One decode step of every row.

    q, k         [N, HK, K] float32 as the rule takes them: unit length, q scaled
    v            [N, HV, V] float
    alpha, beta  [N, HV] float32
    s_ctx        [R, HV, K, V] float32
    row_start    [R + 1] int; request r has the rows row_start[r]:row_start[r + 1], in request order
    ancestry     [N, t - 1] int: column j is the slot of step j + 1 that belongs to the row; columns first..t-2 are
                 read; entries of tombstones may be anything
    compact      the ancestry is the identity: slots 0..N-1 are read in place, without a gather
    Returns o and delta [N, HV, V] float32; delta belongs into the rows' own record.
    """
    n, hk, hv = q.shape[0], k.shape[1], v.shape[1]
    if hv % hk:
        raise ValueError(f"v: {hv} value heads are not a multiple of the {hk} key heads")
    both = torch.stack([q, k], 1)  # [N, 2, HK, K]
    u = shared_projection(both, s_ctx, row_start)  # [N, 2, HK, G, V]
    if not compact:
        slot = ancestry.clamp(0, records.k.shape[1] - 1)
    for j in range(first, ancestry.shape[1]):
        past = (x[j, :n] if compact else x[j].index_select(0, slot[:, j]) for x in records)
        decay, delta, key, norm = past
        dots = (both * key.float().unsqueeze(1)).sum(3) * norm.unsqueeze(1)
        u.mul_(decay.view(n, 1, hk, -1, 1))
        u.addcmul_(delta.float().view(n, 1, hk, hv // hk, -1), dots[:, :, :, None, None])
    u_q, u_k = (x.reshape(n, hv, -1) for x in u.unbind(1))
    decay, gate = alpha.unsqueeze(2), beta.unsqueeze(2)
    delta = torch.addcmul(v.float(), decay, u_k, value=-1).mul_(gate)
    dot = (q * k).sum(2).repeat_interleave(hv // hk, 1).unsqueeze(2)
    return torch.addcmul(decay * u_q, delta, dot), delta


def stored_delta(delta: Tensor, dtype: torch.dtype) -> Tensor:
    """delta as a slot holds it: in 16 bit, values beyond the largest finite one are held there."""
    limit = torch.finfo(dtype).max
    return delta.clamp(-limit, limit).to(dtype) if dtype != delta.dtype else delta
