"""The gated delta rule as its definition: every sequence carries its whole state (OneLA 2.2).

    S_t = alpha_t S_{t-1} + beta_t (v_t - alpha_t S_{t-1} k_t) k_t^T        o_t = S_t q_t

States lie transposed, [HV, K, V] (the paper writes d_v x d_k), as the matrix products of `replay` and transformers
have them. HK key heads serve HV value heads, HV / HK neighbouring ones each. Nothing of this runs in a server: it is
what the chunked prefill and the replay are held to, and costs a state per beam.
"""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rule_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of N sequences.

    state        [N, HV, K, V]
    q, k         [N, HK, K] as the rule takes them: unit length, q scaled
    v            [N, HV, V]
    alpha, beta  [N, HV]
    Returns o [N, HV, V] and the new states; everything in the dtype of `state`.
    """
    group = v.shape[1] // k.shape[1]
    query, key = (x.to(state.dtype).repeat_interleave(group, 1) for x in (q, k))
    decayed = state * alpha.to(state.dtype)[:, :, None, None]
    known = torch.einsum("nhkv,nhk->nhv", decayed, key)
    delta = beta.to(state.dtype).unsqueeze(2) * (v.to(state.dtype) - known)
    state = decayed + torch.einsum("nhk,nhv->nhkv", key, delta)
    return torch.einsum("nhkv,nhk->nhv", state, query), state


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, start: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Ragged sequences that lie end to end, token by token from an empty state.

    q, k         [T, HK, K]
    v            [T, HV, V]
    alpha, beta  [T, HV]
    start        [R + 1] int; sequence r owns start[r]:start[r + 1]
    Returns o [T, HV, V] and the last states [R, HV, K, V], in `dtype`.
    """
    outputs, states, starts = [], [], start.tolist()
    for r in range(len(starts) - 1):
        state = v.new_zeros((1, v.shape[1], k.shape[2], v.shape[2]), dtype=dtype)
        for i in range(starts[r], starts[r + 1]):
            one = slice(i, i + 1)
            o, state = delta_rule_step(state, q[one], k[one], v[one], alpha[one], beta[one])
            outputs.append(o)
        states.append(state)
    return torch.cat(outputs) if outputs else v.to(dtype), torch.cat(states)
