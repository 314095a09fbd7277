"""The gated delta rule over whole prompts, chunk by chunk: dense products inside a chunk, one state between chunks.

With gamma_i the product of the alphas of a chunk up to position i, D_ij = gamma_i / gamma_j and S the state before it:

    A_ij = beta_i (k_i . k_j) D_ij  for j < i                      T = (I + A)^-1
    delta = T (beta v) - T (beta gamma k) S                        the rows of v that the recurrence writes
    o = gamma q S + (q k^T * D, j <= i) delta                      S' = gamma_C S + (gamma_C / gamma_j k_j)^T delta
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from app.ops.graph import as_node

CHUNK = 64
"""Positions of a chunk: the work inside grows with it, the number of states in a row shrinks."""


class Chunks(NamedTuple):
    """How ragged prompts are cut; made once for all layers. B chunks in all, a prompt's own in a row.

    token     [B, C] int64   the token at each place; behind a prompt's end its last token again
    real      [B, C] bool    places that are no padding
    place     [T] int64      where each token went, as b * C + c
    active    one entry for each round of the scan: (requests that still have a chunk, that chunk), int64 both
    requests  R
    start     what was cut
    """

    token: Tensor
    real: Tensor
    place: Tensor
    active: tuple[tuple[Tensor, Tensor], ...]
    requests: int
    start: Tensor


def plan_chunks(start: Tensor, size: int = CHUNK) -> Chunks:
    """start [R + 1] int: request r owns the tokens start[r]:start[r + 1] (none is allowed)."""
    if torch.compiler.is_exporting():  # a graph has the cutting inside its node
        nothing = start.new_empty(0)
        return Chunks(nothing, nothing, nothing, (), start.shape[0] - 1, start)
    device, begin = start.device, start.long()
    length = begin.diff()
    count = (length + size - 1) // size
    first = count.cumsum(0) - count
    counts = count.tolist()
    total = sum(counts)
    requests = torch.arange(len(length), device=device)
    owner = torch.repeat_interleave(requests, count, output_size=total)
    offset = (torch.arange(total, device=device) - first[owner]).unsqueeze(1) * size + torch.arange(size, device=device)
    real = offset < length[owner].unsqueeze(1)
    index = torch.minimum(offset, length[owner].unsqueeze(1) - 1) + begin[owner].unsqueeze(1)
    place = real.view(-1).nonzero().view(-1)
    active = []
    for i in range(max(counts, default=0)):
        left = requests[count > i]
        active.append((left, first[left] + i))
    return Chunks(index, real, place, tuple(active), len(counts), start)


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, chunks: Chunks
) -> tuple[Tensor, Tensor]:
    """Ragged prompts that lie end to end, from an empty state.

    q, k       [T, HK, K] float32 as the rule takes them: unit length, q scaled
    v          [T, HV, V] float
    log_alpha  [T, HV] float32 <= 0
    beta       [T, HV] float32
    chunks     from `plan_chunks`
    Returns o [T, HV, V] float32 and S_ctx [R, HV, K, V] float32; prompts do not see each other.
    """
    if torch.compiler.is_exporting():
        return _delta_rule(q, k, v, log_alpha, beta, chunks.start)
    return _chunked(q, k, v, log_alpha, beta, chunks)


def _rule_shapes(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    del q, log_alpha, beta
    n, hv, width = v.shape
    state = v.new_empty(start.shape[0] - 1, hv, k.shape[2], width, dtype=torch.float32)
    return v.new_empty(n, hv, width, dtype=torch.float32), state


@as_node(
    "(Tensor q, Tensor k, Tensor v, Tensor log_alpha, Tensor beta, Tensor start) -> (Tensor, Tensor)", _rule_shapes
)
def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """`chunked_delta_rule` with the cutting: what a graph has of it."""
    return _chunked(q, k, v, log_alpha, beta, plan_chunks(start))


def _chunked(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    hk, hv, width = k.shape[1], v.shape[1], v.shape[2]
    group, size = hv // hk, chunks.token.shape[1]
    blocks = len(chunks.token)
    query, key = (x[chunks.token].permute(0, 2, 1, 3).unsqueeze(2) for x in (q, k))  # [B, HK, 1, C, K]
    value = v[chunks.token].float().permute(0, 2, 1, 3).reshape(blocks, hk, group, size, width)
    gate = _by_head(beta, chunks, hk)
    decay = _by_head(log_alpha, chunks, hk).cumsum(3)  # [B, HK, G, C]
    pair = (decay.unsqueeze(4) - decay.unsqueeze(3)).exp_().tril_()
    system = (key @ key.transpose(3, 4)) * pair * gate.unsqueeze(4)
    right = torch.cat([value, key * decay.exp().unsqueeze(4)], 4) * gate.unsqueeze(4)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, read = solved.split([width, k.shape[2]], 4)
    within = (query @ key.transpose(3, 4)) * pair
    asked = query * decay.exp().unsqueeze(4)
    kept = key * (decay[..., -1:] - decay).exp().unsqueeze(4)
    carried = decay[..., -1].exp()[..., None, None]
    states = k.new_zeros((chunks.requests, hk, group, k.shape[2], width), dtype=torch.float32)
    out = torch.empty_like(written)
    for requests, block in chunks.active:
        state = states[requests]
        delta = torch.baddbmm(_flat(written[block]), _flat(read[block]), _flat(state), alpha=-1).view_as(written[block])
        out[block] = asked[block] @ state + within[block] @ delta
        states[requests] = state * carried[block] + kept[block].transpose(3, 4) @ delta
    tokens = out.permute(0, 3, 1, 2, 4).reshape(-1, hv, width).index_select(0, chunks.place)
    return tokens, states.view(-1, hv, k.shape[2], width)


def _by_head(x: Tensor, chunks: Chunks, hk: int) -> Tensor:
    """x [T, HV] as [B, HK, G, C], zero at the padding: it writes nothing and forgets nothing."""
    blocks, size = chunks.token.shape
    placed = x[chunks.token].masked_fill_(~chunks.real.unsqueeze(2), 0.0)
    return placed.permute(0, 2, 1).reshape(blocks, hk, -1, size)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 2)
