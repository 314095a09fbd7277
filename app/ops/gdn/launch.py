"""The fused kernel of `kernel.cu` on torch's current stream: what it takes, and its launch. Needs CuPy and a GPU.

Nothing is read back from the device, so a launch may be captured into a CUDA graph (after one launch outside of it,
which compiles).
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.ops.gdn.replay import Records

DEPTH = 8
"""Ancestors that the kernel replays at most."""
_INPUTS = (torch.bfloat16, torch.float16)


class _Kernel(NamedTuple):
    """A compiled kernel: `columns` of V a block, `rows` of a request at a time, bytes of dynamic shared `memory`, and
    how many blocks are `resident` on a processor."""

    function: Any
    columns: int
    rows: int
    memory: int
    resident: int
    processors: int


def unfit(window: Tensor, s_ctx: Tensor, records: Records, *, key_heads: int, ancestors: int) -> str | None:
    """Why the kernel cannot take these operands; None where it can."""
    hv, k, v = s_ctx.shape[1:]
    reason = _unfit_device(window.device)
    if reason is not None:
        return reason
    if window.dtype not in _INPUTS:
        return f"window: {window.dtype}; bfloat16 and float16 are served"
    if k not in {128, 256} or v % 128 or hv % key_heads:
        return f"s_ctx: {hv} value heads over {key_heads} key heads, K {k}, V {v}; K 128 or 256, V a multiple of 128"
    if s_ctx.dtype != torch.float32 or records.delta.dtype != torch.float16 or records.k.dtype != torch.float16:
        return "s_ctx and records: float32 and float16 are served"
    return f"ancestry: {ancestors} ancestors; at most {DEPTH}" if ancestors > DEPTH else None


def _unfit_device(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return f"window: on {device}; the kernel runs on NVIDIA GPUs"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "device: compute capability 8.0 is needed"
    return None if find_spec("cupy") else "CuPy is not installed"


def fused_replay(
    window: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    s_ctx: Tensor,
    records: Records,
    *,
    key_heads: int,
    row_start: Tensor,
    ancestry: Tensor,
    first: int = 0,
    compact: bool = False,
    into: int | None,
    dtype: torch.dtype = torch.float32,
    portable: bool = False,
) -> Tensor:
    """One decode step of every row: unit keys and queries, `replay`, and the records' slots, in one launch.

    window     [N, 2 HK K + HV V] bfloat16 or float16: q, k, v of each row as the convolution gives them
    log_alpha, beta  [N, HV] float32
    s_ctx      [R, HV, K, V] float32
    records    slots; k and delta float16
    row_start  [R + 1], ancestry [N, t - 1] int32, both on the device; first, compact: see `replay`
    into       the slots (into, 0..N-1) are written; None = none
    dtype      of the output: float32 or the window's
    portable   use what every GPU since compute capability 8.0 has, on 9.0 too, where warpgroup products are quicker
    Returns o [N, HV, V]. Raises ValueError with the reason of `unfit`. q, k are exact operands; S_ctx is rounded to two
    16-bit terms (relative 2^-17), delta and k to float16 in their slots only.
    """
    n, (requests, hv, k, v) = len(window), s_ctx.shape
    reason = unfit(window, s_ctx, records, key_heads=key_heads, ancestors=ancestry.shape[1] - first)
    if reason is None and dtype not in {torch.float32, window.dtype}:
        reason = f"dtype: {dtype}; float32 or the window's"
    if reason is not None:
        raise ValueError(reason)
    out = torch.empty((n, hv, v), dtype=dtype, device=window.device)
    if not n:
        return out
    wgmma = not portable and torch.cuda.get_device_capability(window.device) == (9, 0)
    bf16, out32 = window.dtype == torch.bfloat16, dtype == torch.float32
    kernel = _compiled(window.device.index or 0, k, v, bf16=bf16, out32=out32, wgmma=wgmma)
    operands = [window.contiguous(), log_alpha.contiguous(), beta.contiguous(), s_ctx.contiguous(), *records]
    start, tree = row_start.to(torch.int32).contiguous(), ancestry.to(torch.int32).contiguous()
    for name, tensor in zip(Records._fields, records, strict=True):
        if not tensor.is_contiguous():
            raise ValueError(f"records.{name}: must be contiguous")
    blocks = requests * hv * (v // kernel.columns)
    splits = max(1, min(kernel.resident * kernel.processors // blocks, -(-n // (requests * kernel.rows))))
    numbers = [np.int32(x) for x in (tree.shape[1], first, compact)]
    _launch(
        kernel, window.device, (blocks * splits,),
        [operands[0].data_ptr(), np.int32(operands[0].shape[1]), *(x.data_ptr() for x in operands[1:]),
         start.data_ptr(), tree.data_ptr(), *numbers, np.int64(records.k.shape[1]),
         np.int32(-1 if into is None else into), np.int32(key_heads), np.int32(hv), np.int32(splits), out.data_ptr()],
    )  # fmt: skip
    return out


def _launch(kernel: _Kernel, device: torch.device, grid: tuple[int], arguments: list[Any]) -> None:
    with torch.cuda.device(device), _stream(torch.cuda.current_stream(device).cuda_stream):
        kernel.function(grid, (kernel.rows * 4,), tuple(arguments), shared_mem=kernel.memory)


@cache
def _stream(pointer: int) -> Any:
    """One of torch's streams as CuPy takes it. `Stream.from_external`, which is to follow `ExternalStream`, destroys
    the stream when it is collected itself (CuPy 14)."""
    import cupy  # noqa: PLC0415  there is none on a CPU

    return cupy.cuda.ExternalStream(pointer)


@cache
def _compiled(device: int, k: int, v: int, *, bf16: bool, out32: bool, wgmma: bool) -> _Kernel:
    """Once for each device and shape; NVRTC needs no toolkit, since the source includes nothing."""
    import cupy  # noqa: PLC0415

    columns, warps, resident = (128, 8, 2) if k == 128 else (64, 4, 3)
    flags = {"K": k, "V": v, "VT": columns, "BF16": int(bf16), "OUT32": int(out32), "WGMMA": int(wgmma)}
    source = Path(__file__).with_name("kernel.cu").read_text("utf-8")
    with cupy.cuda.Device(device):
        options = ["--std=c++17", *(f"-D{name}={x}" for name, x in flags.items())]
        module = cupy.RawModule(code=source, options=(*options, *(["-arch=sm_90a"] if wgmma else [])))
        function = module.get_function("replay")
        memory = k * columns * 4 + warps * 8 * DEPTH * 16
        function.max_dynamic_shared_size_bytes = memory
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return _Kernel(function, columns, warps * 8, memory, resident, processors)
