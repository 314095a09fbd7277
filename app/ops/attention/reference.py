"""Attention of a wide beam, as its definition: torch, any device.

Letters: R requests, N rows of the flat batch, H query heads, Hkv key/value heads (G = H / Hkv queries share one), D
head dim, S prefix positions. A row attends to two things that are stored apart, and the parts merge exactly:

* the context of its request, held once per request however many beams it has (`context_attention`; RecoGEM 3.2),
* the few positions of its own partial SID, held once per row of the step that made them and found through the row's
  ancestry (`prefix_attention`; OneLA 3.3).

Each part returns its output and the log-sum-exp of its scores; `merge` joins two parts as if all keys had been in one
softmax. Rows are independent: whatever a tombstone row holds stays in that row. Arguments are tensors and scalars only.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

SCORES = 1 << 21
"""Elements of a score matrix that the plain path holds at a time: 8 MiB in float32."""


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, length: Tensor, row_start: Tensor, *, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every row over the context of its request.

    q          [N, H, D] float
    k, v       [R, positions, Hkv, D] float, the dtype of q; read where they lie, never gathered per row
    length     [R] int; request r has the keys k[r, :length[r]] (0 is allowed); what lies behind is never read
    row_start  [R + 1] int, non-decreasing, row_start[0] = 0; empty requests are allowed. Rows from row_start[R] on are
               pad rows: what they get is not said
    bias       [H, positions] float or None; added to the scaled scores
    Returns out [N, H, D] (q's dtype) and lse [N, H] float32; 0 and -inf where a request has no context.

    On a CPU neighbouring requests of equal shape are one call. Elsewhere, and with a bias, scores are made in blocks of
    rows, in float32.
    """
    n, h, d = q.shape
    positions, hkv = k.shape[1], k.shape[2]
    _check_heads(h, hkv)
    starts, lengths = row_start.tolist(), length.tolist()
    fused = q.device.type == "cpu" and bias is None and v.shape[3] == d
    shapes = [(starts[r + 1] - starts[r], lengths[r]) for r in range(len(lengths))]
    parts, first = [], 0
    for (rows, keys), group in groupby(shapes):
        count = len(list(group))
        if not 0 <= keys <= positions:
            raise ValueError(f"length: {keys} is outside of 0..{positions}")
        own = slice(starts[first], starts[first + count])
        part = (q[own], k[first : first + count, :keys], v[first : first + count, :keys])
        if rows and keys and fused:
            parts.append(_fused(*part, scale))
        elif rows and keys:
            parts.append(_plain(*part, scale, None if bias is None else bias[:, :keys]))
        elif rows:
            nothing = q.new_full((rows * count, h), float("-inf"), dtype=torch.float32)
            parts.append((q.new_zeros(rows * count, h, v.shape[3]), nothing))
        first += count
    if rest := n - starts[-1]:  # pad rows
        parts.append((q.new_zeros(rest, h, v.shape[3]), q.new_full((rest, h), float("-inf"), dtype=torch.float32)))
    if not parts:
        return q.new_empty(n, h, v.shape[3]), q.new_empty(n, h, dtype=torch.float32)
    return parts[0] if len(parts) == 1 else (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float) -> Tensor:
    """Causal self-attention of ragged sequences that lie end to end (a prompt; no state is read).

    q        [T, H, D] float
    k, v     [T, Hkv, D] float
    start    [R + 1] int; sequence r owns positions start[r]:start[r + 1], and position i of it sees 0..i
    Returns out [T, H, D]. Neighbouring sequences of equal length are one call; nothing is padded.
    """
    h, hkv = q.shape[1], k.shape[1]
    _check_heads(h, hkv)
    starts = start.tolist()
    parts, first = [], 0
    for size, group in groupby(starts[r + 1] - starts[r] for r in range(len(starts) - 1)):
        count = len(list(group))
        own = slice(starts[first], starts[first + count])
        if size:
            query, key, value = (x[own].view(count, size, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            part = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=h != hkv
            )
            parts.append(part.transpose(1, 2).flatten(0, 1))
        first += count
    return parts[0] if len(parts) == 1 else torch.cat([q[:0], *parts])


def prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    *,
    ancestry: Tensor,
    scale: float,
    first: int = 0,
    bias: Tensor | None = None,
    compact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Every row over its own partial SID: the slots of its ancestors and itself.

    q                 [N, H, D] float
    k, v              [N, Hkv, D] float: the row's own key and value, its last position
    k_slots, v_slots  [steps, rows, Hkv, D] float: slot (j, n) holds what step j + 1 wrote for its row n
    ancestry          [N, t - 1] int: column j is the slot of step j + 1 that belongs to the row. Columns and slots
                      first..t-2 are read, S = t - 1 - first of them; entries of tombstones may be anything
    first             columns to leave out in front (token models have no slots of step 1: first = 1)
    bias              [H, S + 1] float or None, added to the scaled scores; the last column is the row's own position
    compact           the ancestry is the identity: slots 0..N-1 are read in place, without a gather
    Returns out [N, H, D] (q's dtype) and lse [N, H] float32. With S = 0 the output is v itself.
    """
    dots, values = _prefix(q, k, v, k_slots, v_slots, ancestry, first, compact)
    scores = torch.stack(dots, dim=2) * scale
    if bias is not None:
        scores = scores + bias
    n, h, _ = q.shape
    if len(values) == 1:  # softmax over one key is 1
        return v.repeat_interleave(h // k.shape[1], 1), scores[:, :, 0].float()
    lse = torch.logsumexp(scores, 2)
    out = _weighted(torch.exp(scores - lse.unsqueeze(2)), values)
    return out.view(n, h, v.shape[2]).to(q.dtype), lse.float()


def extend_attention(
    shared: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    *,
    ancestry: Tensor,
    scale: float,
    first: int = 0,
    compact: bool = False,
) -> Tensor:
    """`merge(*shared, *prefix_attention(...))[0]` in one softmax: what the context gave counts as one more key.

    shared  out [N, H, D] and lse [N, H] of `context_attention`; the rest as in `prefix_attention`
    Returns out [N, H, D], q's dtype.
    """
    dots, values = _prefix(q, k, v, k_slots, v_slots, ancestry, first, compact)
    context, lse = shared
    share = torch.softmax(torch.stack([*dots, lse / scale], 2).mul_(scale), 2)
    n, h, d = context.shape
    out = _weighted(share, values).view(n, h, d)
    return out.addcmul_(context.to(out.dtype), share[:, :, -1:]).to(q.dtype)


def alone_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    *,
    ancestry: Tensor,
    scale: float,
    first: int = 0,
    compact: bool = False,
) -> Tensor:
    """`extend_attention(context_attention(...), ...)` of one request, in one softmax over one matrix of scores.

    context_k, context_v  [S, Hkv, D], S >= 1: the request's context; the rest as in `prefix_attention`
    Returns out [N, H, D] of q's dtype, which is that of everything.
    """
    (n, h, d), (size, hkv, _) = q.shape, context_k.shape
    _check_heads(h, hkv)
    keys, values = _own(k, v, k_slots, v_slots, ancestry, first, compact)
    queries = (q * scale).view(n, hkv, h // hkv, d)
    scores = q.new_empty(hkv, n * (h // hkv), size + len(keys))
    by_head = queries.transpose(0, 1).reshape(hkv, -1, d)
    torch.bmm(by_head, context_k.permute(1, 2, 0), out=scores[:, :, :size])
    own = scores.view(hkv, n, h // hkv, -1).transpose(0, 1)
    for j, key in enumerate(keys):
        torch.sum(queries * key.unsqueeze(2), 3, out=own[..., size + j])
    share = torch.softmax(scores, 2)
    out = torch.bmm(share[:, :, :size], context_v.transpose(0, 1)).view(hkv, n, h // hkv, d).transpose(0, 1)
    own = share.view(hkv, n, h // hkv, -1).transpose(0, 1)
    for j, value in enumerate(values, size):
        out.addcmul_(own[..., j : j + 1], value.unsqueeze(2))
    return out.reshape(n, h, d)


def _prefix(
    q: Tensor, k: Tensor, v: Tensor, k_slots: Tensor, v_slots: Tensor, ancestry: Tensor, first: int, compact: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """A row's own prefix: its products with q, S + 1 times [N, H] (at least float32), and its values [N, Hkv, D]."""
    n, h, d = q.shape
    hkv = k.shape[1]
    _check_heads(h, hkv)
    keys, values = _own(k, v, k_slots, v_slots, ancestry, first, compact)
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.view(n, hkv, h // hkv, d).to(wide)
    return [(queries * key.to(wide).unsqueeze(2)).sum(-1).view(n, h) for key in keys], values


def _own(
    k: Tensor, v: Tensor, k_slots: Tensor, v_slots: Tensor, ancestry: Tensor, first: int, compact: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values [N, Hkv, D] of a row's own prefix, S of ancestors and its own one."""
    n, steps = k.shape[0], range(first, ancestry.shape[1])
    if compact:
        return [k_slots[j, :n] for j in steps] + [k], [v_slots[j, :n] for j in steps] + [v]
    slot = ancestry.clamp(0, k_slots.shape[1] - 1) if steps else ancestry
    keys = [k_slots[j].index_select(0, slot[:, j]) for j in steps] + [k]
    return keys, [v_slots[j].index_select(0, slot[:, j]) for j in steps] + [v]


def _weighted(share: Tensor, values: list[Tensor]) -> Tensor:
    """Values summed by their shares: share [N, H, >= S], S values [N, Hkv, D] -> [N, Hkv, G, D], share's dtype."""
    n, hkv, _ = values[0].shape
    by_head = share.view(n, hkv, share.shape[1] // hkv, share.shape[2], 1)
    out = by_head[:, :, :, 0] * values[0].unsqueeze(2)
    for j in range(1, len(values)):
        out.addcmul_(by_head[:, :, :, j], values[j].unsqueeze(2).to(out.dtype))
    return out


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join two attention outputs over disjoint keys as if they had shared one softmax.

    out, other        [N, H, D] float
    lse, other_lse    [N, H] float32; -inf = that part had no keys
    Returns out [N, H, D] and lse [N, H]; 0 and -inf where neither part had keys.
    """
    share = torch.where(lse == float("-inf"), 0.0, torch.sigmoid(lse - other_lse)).unsqueeze(-1)
    wide = share.dtype
    return torch.lerp(other.to(wide), out.to(wide), share).to(out.dtype), torch.logaddexp(lse, other_lse)


def _check_heads(h: int, hkv: int) -> None:
    if hkv == 0 or h % hkv:
        raise ValueError(f"q: {h} heads are not a multiple of the {hkv} key/value heads")


def _folded(q: Tensor, k: Tensor) -> Tensor:
    """q [m * n, H, D] of m requests as [m, Hkv, n * G, D]."""
    m, hkv = k.shape[0], k.shape[2]
    n, h, d = q.shape[0] // m, q.shape[1], q.shape[2]
    return q.view(m, n, hkv, h // hkv, d).permute(0, 2, 1, 3, 4).reshape(m, hkv, n * (h // hkv), d)


def _unfolded(x: Tensor, h: int) -> Tensor:
    """x [m, Hkv, n * G, ...] as [m * n, H, ...]."""
    m, hkv = x.shape[:2]
    n = x.shape[2] * hkv // h
    return x.reshape(m, hkv, n, h // hkv, *x.shape[3:]).transpose(1, 2).reshape(m * n, h, *x.shape[3:])


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """m requests of equal rows and keys in one CPU flash-attention call, which knows key/value heads that are shared
    and returns the log-sum-exp as well."""
    m, n = k.shape[0], q.shape[0] // k.shape[0]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001  no public one returns lse
        q.view(m, n, *q.shape[1:]).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=scale
    )
    return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """m requests of equal rows and keys, scores [m, Hkv, rows of a block * G, keys] at a time."""
    m, keys, hkv = k.shape[:3]
    n, h = q.shape[0] // m, q.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    key, value = k.permute(0, 2, 3, 1).to(wide), v.transpose(1, 2).to(wide)
    block = max(1, SCORES // (m * h * keys))
    outs, lses = [], []
    for rows in torch.split(q.view(m, n, h, -1), block, dim=1):
        scores = _folded(rows.flatten(0, 1), k).to(wide) @ key * scale
        if bias is not None:
            by_head = bias.view(hkv, 1, h // hkv, keys)
            scores = (scores.view(m, hkv, -1, h // hkv, keys) + by_head).flatten(2, 3)
        lse = torch.logsumexp(scores, 3)
        safe = lse.masked_fill(lse == float("-inf"), 0.0)
        out = torch.exp(scores - safe.unsqueeze(3)) @ value
        outs.append(_unfolded(out, h).view(m, -1, h, v.shape[3]))
        lses.append(_unfolded(lse, h).view(m, -1, h))
    return torch.cat(outs, 1).flatten(0, 1).to(q.dtype), torch.cat(lses, 1).flatten(0, 1).float()
