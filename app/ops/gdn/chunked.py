"""The gated delta rule over whole prompts, chunk by chunk: dense products inside a chunk, one state between chunks.

With gamma_i the product of the alphas of a chunk up to position i, D_ij = gamma_i / gamma_j and S the state before it:

    A_ij = beta_i (k_i . k_j) D_ij  for j < i                      T = (I + A)^-1
    delta = T (beta v) - T (beta gamma k) S                        the rows of v that the recurrence writes
    o = gamma q S + (q k^T * D, j <= i) delta                      S' = gamma_C S + (gamma_C / gamma_j k_j)^T delta
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from app.ops.graph import as_node
from app.ops.upload import upload_ints

CHUNK, CPU_CHUNK = 64, 32
"""Positions of a chunk: the work inside grows with it, the number of states in a row shrinks. On a CPU shorter ones
cost less: what grows are passes over memory and triangular solves."""
BLOCK = 8
"""Unknowns that a CPU solves for at a time. In the powers that invert so many no entry grows beyond 20."""


class Chunks(NamedTuple):
    """How ragged prompts are cut; made once for all layers. B chunks in all: the first one of every prompt, then the
    second one of those that have it, and so on, prompts of many chunks in front.

    token     [B, C] int64   the token at each place; behind a prompt's end its last token again
    real      [B, C] bool    places that are no padding
    place     [T] int64      where each token went, as b * C + c
    rounds    of the scan: the first chunk of each, and how many there are
    rank      [R] int64      where each request is in a round
    start     what was cut
    """

    token: Tensor
    real: Tensor
    place: Tensor
    rounds: tuple[tuple[int, int], ...]
    rank: Tensor
    start: Tensor


def plan_chunks(start: Tensor, size: int | None = None, counts: Sequence[int] = ()) -> Chunks:
    """start [R + 1] int: request r owns the tokens start[r]:start[r + 1] (none is allowed). counts [R]: how many those
    are; where the host does not know, it waits for the device."""
    if torch.compiler.is_exporting():  # a graph has the cutting inside its node
        nothing = start.new_empty(0)
        return Chunks(nothing, nothing, nothing, (), nothing, start)
    device, begin = start.device, start.long()
    if size is None:
        size = CPU_CHUNK if device.type == "cpu" else CHUNK
    length = begin.diff()
    lengths = counts or length.tolist()
    chunks = [-(-one // size) for one in lengths]
    active = [sum(one > i for one in chunks) for i in range(max(chunks, default=0))]
    rounds = tuple(zip(accumulate(active, initial=0), active, strict=False))
    order = sorted(range(len(chunks)), key=lambda r: -chunks[r])
    ranked = upload_ints(order, torch.int64, device)
    rank = torch.empty_like(ranked).index_copy_(0, ranked, torch.arange(len(order), device=device))
    first, many = (upload_ints([one[at] for one in rounds], torch.int64, device) for at in (0, 1))

    lap = torch.repeat_interleave(many, output_size=sum(active))  # of each chunk
    owner = ranked[torch.arange(len(lap), device=device) - first[lap]].unsqueeze(1)
    offset = (lap * size).unsqueeze(1) + torch.arange(size, device=device)
    real = offset < length[owner]
    token = torch.minimum(offset, length[owner] - 1) + begin[owner]

    request = torch.repeat_interleave(length, output_size=sum(lengths))  # of each token
    position = torch.arange(len(request), device=device) - (begin - begin[0])[request]
    lap = position // size
    place = (first[lap] + rank[request]) * size + position - lap * size
    return Chunks(token, real, place, rounds, rank, start)


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
    hk, hv, dim, width = k.shape[1], v.shape[1], k.shape[2], v.shape[2]
    group, (blocks, size) = hv // hk, chunks.token.shape
    by_head = (blocks, hk, group, size)
    at, own = _places(chunks.token, hk), _places(chunks.token, hv)
    query, key = (x.reshape(-1, dim).index_select(0, at).view(blocks, hk, 1, size, dim) for x in (q, k))
    value = v.reshape(-1, width).index_select(0, own).float().view(*by_head, width)
    gate, decay = (_gates(x, own, chunks).view(by_head) for x in (beta, log_alpha))
    exp = torch.exp
    if decay.device.type == "cpu":  # where results leave the range of numbers, exp there takes ten times as long
        exp, decay = torch.exp2, decay * math.log2(math.e)
    decay = decay.cumsum(3)
    grown = exp(decay).unsqueeze(4)
    pair = exp(decay.unsqueeze(4) - decay.unsqueeze(3)).tril_()
    system = ((key @ key.transpose(3, 4)) * pair).mul_(gate.unsqueeze(4))
    right = torch.cat([value, key * grown], 4).mul_(gate.unsqueeze(4))
    written, read = torch.split(_solved(system.flatten(0, 2), right.flatten(0, 2)), [width, dim], 2)
    within = pair.mul_(query @ key.transpose(3, 4)).flatten(0, 2)
    asked = (query * grown).flatten(0, 2)
    kept = (key * exp(decay[..., -1:] - decay).unsqueeze(4)).flatten(0, 2).transpose(1, 2)
    carried = grown[..., -1:, :].flatten(0, 2)
    states = k.new_zeros((len(chunks.rank) * hv, dim, width), dtype=torch.float32)
    out = torch.empty_like(written, memory_format=torch.contiguous_format)
    for first, count in chunks.rounds:
        state, each = states[: count * hv], slice(first * hv, (first + count) * hv)
        delta = torch.baddbmm(written[each], read[each], state, alpha=-1)
        torch.bmm(asked[each], state, out=out[each]).baddbmm_(within[each], delta)
        state.mul_(carried[each]).baddbmm_(kept[each], delta)
    back = (chunks.place // size * hv * size + chunks.place % size).unsqueeze(1) + torch.arange(
        0, hv * size, size, device=out.device
    )
    tokens = out.view(-1, width).index_select(0, back.view(-1)).view(-1, hv, width)
    return tokens, states.view(-1, hv, dim, width).index_select(0, chunks.rank)


def _solved(system: Tensor, right: Tensor) -> Tensor:
    """(I + A)^-1 right: system [M, C, C], of which A is what lies below the diagonal, right [M, C, X].

    On a CPU in blocks, all systems at once: LAPACK would take them one by one, on one core.
    """
    many, size, _ = system.shape
    if system.device.type != "cpu" or size % BLOCK:
        whole: Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        return whole
    rows = size // BLOCK
    own = system.view(many, rows, BLOCK, rows, BLOCK).diagonal(0, 1, 3).permute(0, 3, 1, 2)
    power = own.reshape(-1, BLOCK, BLOCK).tril(-1)
    inverse = torch.eye(BLOCK) - power  # (I + A)^-1 = (I - A) (I + A^2) (I + A^4), as A^8 = 0
    for _ in range(1, (BLOCK - 1).bit_length()):
        power = power @ power
        inverse = torch.baddbmm(inverse, inverse, power)
    inverse = inverse.view(many, rows, BLOCK, BLOCK)
    solved = torch.empty_like(right)
    for i in range(rows):
        here, before = slice(i * BLOCK, (i + 1) * BLOCK), slice(0, i * BLOCK)
        left = torch.baddbmm(right[:, here], system[:, here, before], solved[:, before], alpha=-1)
        solved[:, here] = inverse[:, i] @ left
    return solved


def _places(token: Tensor, heads: int) -> Tensor:
    """token [B, C] of T -> [B * heads * C] among T * heads rows: chunk by chunk, head by head."""
    return (token.unsqueeze(1) * heads + torch.arange(heads, device=token.device).unsqueeze(1)).view(-1)


def _gates(x: Tensor, own: Tensor, chunks: Chunks) -> Tensor:
    """x [T, HV] as [B, HV, C], zero at the padding: it writes nothing and forgets nothing."""
    blocks, size = chunks.token.shape
    placed = x.reshape(-1).index_select(0, own).view(blocks, -1, size)
    return placed.masked_fill_(~chunks.real.unsqueeze(1), 0.0)
