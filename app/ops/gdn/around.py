"""The kernels of `around.cu`: convolution, gates and gated norm of a decode step, one pass each. Their definitions are
the torch operators of `convolution.py` and `gates.py`, which call these where they fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from app.ops import cuda

_SOURCE = Path(__file__).with_name("around.cu")
_THREADS, _ALIGNED = 256, 16
_SIZES = (2, 3, 4)


def fits(x: Tensor, *others: Tensor) -> bool:
    """Whether the kernels take these operands: one 16-bit dtype, an NVIDIA GPU, rows and parameters on 16 bytes."""
    return (
        x.device.type == "cuda"
        and cuda.unfit(x.device) is None
        and x.dtype in {torch.bfloat16, torch.float16}
        and x.numel() > 0
        and x.stride(-1) == 1
        and x.stride(0) * x.element_size() % _ALIGNED == 0
        and all(y.dtype == x.dtype and y.is_contiguous() for y in others)
        and all(y.data_ptr() % _ALIGNED == 0 for y in (x, *others))
    )


def convolution_fits(x: Tensor, weight: Tensor, tail: Tensor, slots: Tensor) -> bool:
    """Whether `window_convolution` takes these."""
    return x.shape[1] % 8 == 0 and weight.shape[1] in _SIZES and fits(x, weight, tail, slots)


def window_convolution(
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    slots: Tensor,
    *,
    request: Tensor,
    ancestry: Tensor,
    first: int,
    compact: bool,
    key: Tensor | None,
) -> Tensor:
    """See `convolution.window_convolution`; request and ancestry int32. Raises ValueError for keys that do not lie
    densely on 16 bytes."""
    if key is not None and not (key.is_contiguous() and key.dtype == x.dtype and key.data_ptr() % _ALIGNED == 0):
        raise ValueError("key: must be contiguous, on 16 bytes, in the dtype of x")
    n, d = x.shape
    where, channels = (key.data_ptr(), key.shape[1]) if key is not None else (0, 0)
    out = torch.empty((n, d), dtype=x.dtype, device=x.device)
    owner, tree = request.to(torch.int32).contiguous(), ancestry.to(torch.int32).contiguous()
    kernel = _kernel("window_convolution", x, weight.shape[1])
    kernel.launch(
        n * -(-d // (8 * _THREADS)), _THREADS, x.data_ptr(), x.stride(0), weight.data_ptr(), tail.data_ptr(),
        slots.data_ptr(), owner.data_ptr(), tree.data_ptr(), tree.shape[1], first, int(compact), slots.shape[1], n, d,
        out.data_ptr(), where, channels,
    )  # fmt: skip
    return out


def gates(ba: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See `gates.decay_and_beta`; ba contiguous."""
    n, heads = ba.shape[0], ba.shape[1] // 2
    log_alpha, beta = (torch.empty((n, heads), dtype=torch.float32, device=ba.device) for _ in range(2))
    _kernel("gates", ba).launch(
        -(-n * heads // _THREADS), _THREADS, ba.data_ptr(), a_log.data_ptr(), dt_bias.data_ptr(), n, heads,
        log_alpha.data_ptr(), beta.data_ptr(),
    )  # fmt: skip
    return log_alpha, beta


def norm_fits(o: Tensor, z: Tensor, weight: Tensor) -> bool:
    """Whether `gated_norm` takes these."""
    lies = o.is_contiguous() and o.dtype == torch.float32 and z.stride(1) == z.shape[2]
    return lies and z.shape[2] % 4 == 0 and fits(z, weight)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `gates.gated_norm`."""
    n, heads, width = o.shape
    out = torch.empty((n, heads, width), dtype=z.dtype, device=z.device)
    _kernel("gated_norm", z).launch(
        -(-n * heads // (_THREADS // 32)), _THREADS, o.data_ptr(), z.data_ptr(), z.stride(0), weight.data_ptr(),
        np.float32(eps), n, heads, width, out.data_ptr(),
    )  # fmt: skip
    return out


def _kernel(name: str, x: Tensor, size: int = 4) -> cuda.Kernel:
    return cuda.load(_SOURCE, name, x.device, BF16=int(x.dtype == torch.bfloat16), J=size)
