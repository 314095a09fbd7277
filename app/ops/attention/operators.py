"""The attention operators as the engine calls them: registered with `torch.library`, so that torch.export and
torch.compile see one operator where a device has its own way to compute it.

On a CPU, and for float32, it is the definition (`reference.py`). On an NVIDIA GPU in 16 bit, prefixes are `kernel.cu`,
contexts `context.cu`; prompts, and contexts that it does not take, are torch's flash attention over ragged sequences.
Nothing waits on the host.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from app.ops import cuda
from app.ops.attention import context as fused
from app.ops.attention import launch, reference
from app.ops.library import eager, register

ALONE = 1 << 17
"""Most scores of a request alone that are one matrix: 512 KiB in float32. Beyond it blocks of them are quicker."""


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
) -> Tensor:
    """The output of `reference.prefix_attention`. Without ancestors and with a key per query head it is v itself."""
    if ancestry.shape[1] == first and q.shape[1] == v.shape[1]:
        return v
    out: Tensor = _PREFIX_CALL(q, k, v, k_slots, v_slots, ancestry, scale, first, bias, compact)
    return out


def prefix_attention_with_lse(
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
    """`reference.prefix_attention`: out [N, H, D] and lse [N, H] float32 (stored head by head), for `merge`."""
    out: tuple[Tensor, Tensor] = _PREFIX_LSE_CALL(q, k, v, k_slots, v_slots, ancestry, scale, first, bias, compact)
    return out


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
    """`reference.extend_attention`: a row's prefix and what `context_attention` gave, in one softmax."""
    out: Tensor = _EXTEND_CALL(*shared, q, k, v, k_slots, v_slots, ancestry, scale, first, compact)
    return out


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: Tensor,
    row_start: Tensor,
    *,
    widest: int,
    scale: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.context_attention`, lse stored head by head.

    widest  rows that no request exceeds, known on the host (the contract's width of the step); it sizes the launch
    """
    out: tuple[Tensor, Tensor] = _CONTEXT_CALL(q, k, v, length, row_start, widest, scale, bias)
    return out


def beam_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: tuple[Tensor, Tensor],
    length: Tensor,
    row_start: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    *,
    ancestry: Tensor,
    widest: int,
    scale: float,
    first: int = 0,
    compact: bool = False,
) -> Tensor:
    """`extend_attention` of `context_attention`: every row over the context of its request and its own prefix.

    context  keys and values [R, positions, Hkv, D]; the rest as there
    A small batch of one request is one softmax on a CPU (`reference.alone_attention`).
    """
    if eager(q) and q.dtype == torch.float32 and v.shape[2] == q.shape[2] and row_start.shape[0] == 2:
        (_, rows), keys = row_start.tolist(), int(length[0])
        if rows == q.shape[0] <= widest and 0 < keys <= context[0].shape[1] and rows * q.shape[1] * keys <= ALONE:
            context_k, context_v = (one[0, :keys] for one in context)
            return reference.alone_attention(
                q,
                k,
                v,
                context_k,
                context_v,
                k_slots,
                v_slots,
                ancestry=ancestry,
                scale=scale,
                first=first,
                compact=compact,
            )
    shared = context_attention(q, *context, length, row_start, widest=widest, scale=scale)
    return extend_attention(
        shared, q, k, v, k_slots, v_slots, ancestry=ancestry, scale=scale, first=first, compact=compact
    )


def causal_attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor, *, longest: int, scale: float) -> Tensor:
    """`reference.causal_attention`.

    longest  positions that no sequence exceeds, known on the host
    """
    out: Tensor = _CAUSAL_CALL(q, k, v, start, longest, scale)
    return out


# ---- what the operators are ----------------------------------------------------------------------------------------


def _prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    ancestry: Tensor,
    scale: float,
    first: int,
    bias: Tensor | None,
    compact: bool,
) -> Tensor:
    if launch.unfit(q, v, ancestry.shape[1] - first + 1) is None:
        out, _ = launch.attend(
            q, k, v, k_slots, v_slots, ancestry, scale=scale, first=first, bias=bias, compact=compact
        )
    else:
        out, _ = reference.prefix_attention(
            q, k, v, k_slots, v_slots, ancestry=ancestry, scale=scale, first=first, bias=bias, compact=compact
        )
    return out


def _prefix_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    ancestry: Tensor,
    scale: float,
    first: int,
    bias: Tensor | None,
    compact: bool,
) -> tuple[Tensor, Tensor]:
    if launch.unfit(q, v, ancestry.shape[1] - first + 1) is None:
        out, lse = launch.attend(
            q, k, v, k_slots, v_slots, ancestry, scale=scale, first=first, bias=bias, compact=compact, lse=True
        )
    else:
        out, lse = reference.prefix_attention(
            q, k, v, k_slots, v_slots, ancestry=ancestry, scale=scale, first=first, bias=bias, compact=compact
        )
    assert lse is not None
    return out, _by_head(lse)


def _extend(
    shared: Tensor,
    shared_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    ancestry: Tensor,
    scale: float,
    first: int,
    compact: bool,
) -> Tensor:
    context = (shared, shared_lse)
    if launch.unfit(q, v, ancestry.shape[1] - first + 1) is None:
        out, _ = launch.attend(
            q, k, v, k_slots, v_slots, ancestry, scale=scale, first=first, compact=compact, shared=context
        )
        return out
    return reference.extend_attention(
        context, q, k, v, k_slots, v_slots, ancestry=ancestry, scale=scale, first=first, compact=compact
    )


def _context(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: Tensor,
    row_start: Tensor,
    widest: int,
    scale: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if bias is None and fused.unfit(q, k, v, scale) is None:
        return fused.attend(q, k, v, length, row_start, widest=widest, scale=scale)
    requests, positions = k.shape[:2]
    if bias is None and _flash(q, v):
        start = torch.arange(0, (requests + 1) * positions, positions, dtype=torch.int32, device=q.device)
        keys, values = k.flatten(0, 1), v.flatten(0, 1)
        out, lse = _ragged(q, keys, values, row_start, start, widest, positions, scale, used=length)
        # a request without a context: +inf there, -inf here
        return out, lse.nan_to_num_(nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf).t()
    if q.device.type == "cpu":
        _check_sizes(row_start, widest, "widest")
    out, lse = reference.context_attention(q, k, v, length, row_start, scale=scale, bias=bias)
    return out.contiguous(), _by_head(lse)


def _causal(q: Tensor, k: Tensor, v: Tensor, start: Tensor, longest: int, scale: float) -> Tensor:
    if _flash(q, v):
        return _ragged(q, k, v, start, start, longest, longest, scale, causal=True)[0]
    if q.device.type == "cpu":
        _check_sizes(start, longest, "longest")
    return reference.causal_attention(q, k, v, start, scale).contiguous()


def _flash(q: Tensor, v: Tensor) -> bool:
    """Whether torch's flash attention takes these heads."""
    dim = q.shape[2]
    served = q.dtype in {torch.bfloat16, torch.float16} and dim % 8 == 0 and dim <= 256 and v.shape[-1] == dim
    return served and cuda.nvidia(q.device) and q.shape[0] > 0


def _ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    key_start: Tensor,
    longest: int,
    keys: int,
    scale: float,
    *,
    causal: bool = False,
    used: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sequences of q at start[r]:start[r + 1] over those of k, v at key_start[r], the first used[r] keys of them.
    Returns out [N, H, D] and lse [H, N]. `longest` and `keys` bound what a sequence has; with `longest` 1 torch lays
    lse out in another way, so it is 2 at least."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001  no public one takes used keys, gives lse
        q, k, v, start.to(torch.int32), key_start.to(torch.int32), max(2, longest), keys, 0.0, causal, False,
        scale=scale, seqused_k=None if used is None else used.to(torch.int32),
    )  # fmt: skip
    return out, lse


def _check_sizes(start: Tensor, most: int, name: str) -> None:
    found = max((stop - begin for begin, stop in pairwise(start.tolist())), default=0)
    if found > most:
        raise ValueError(f"{name}: {most}, but a request has {found}")


def _by_head(lse: Tensor) -> Tensor:
    """lse [N, H] stored head by head."""
    return lse.t().contiguous().t()


# ---- and their shapes ----------------------------------------------------------------------------------------------


def _lse_like(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32).t()


def _out_shape(q: Tensor, _k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[-1])


def _pair_shape(q: Tensor, _k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[-1]), _lse_like(q)


def _extend_shape(shared: Tensor, _lse: Tensor, q: Tensor, *_: object) -> Tensor:
    return q.new_empty(shared.shape)


_PREFIX = "Tensor q, Tensor k, Tensor v, Tensor k_slots, Tensor v_slots, Tensor ancestry, float scale, int first"
_CONTEXT = "Tensor q, Tensor k, Tensor v, Tensor length, Tensor row_start, int widest, float scale, Tensor? bias"
_PREFIX_CALL = register(f"prefix_attention({_PREFIX}, Tensor? bias, bool compact) -> Tensor", _prefix, _out_shape)
_PREFIX_LSE_CALL = register(
    f"prefix_attention_with_lse({_PREFIX}, Tensor? bias, bool compact) -> (Tensor, Tensor)",
    _prefix_with_lse,
    _pair_shape,
)
_EXTEND_CALL = register(
    f"extend_attention(Tensor shared, Tensor shared_lse, {_PREFIX}, bool compact) -> Tensor", _extend, _extend_shape
)
_CONTEXT_CALL = register(f"context_attention({_CONTEXT}) -> (Tensor, Tensor)", _context, _pair_shape)
_CAUSAL_CALL = register(
    "causal_attention(Tensor q, Tensor k, Tensor v, Tensor start, int longest, float scale) -> Tensor",
    _causal,
    _out_shape,
)
