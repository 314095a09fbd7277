"""Calls of the CUDA driver itself, for what CuPy's launch cannot have: attributes, and arguments that are structs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of the driver."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig of the driver."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


_EARLY = _Attribute(id=6, value=1)
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"""
_MAP_BYTES, _MAP_ALIGNED = 128, 64
"""Of a CUtensorMap."""
_MAP_TYPES = {torch.float16: 6, torch.bfloat16: 9}
"""CUtensorMapDataType"""


def launch(
    function: int, blocks: int, threads: int, memory: int, stream: int, arguments: Iterable[Any], *, early: bool = False
) -> None:
    """A launch, or a node of the stream's capture. The driver copies the arguments.

    memory     bytes of dynamic shared memory
    arguments  int and numpy scalars, each at the beginning of eight bytes; bytes: a `tensor_map`
    early      see `cuda.Kernel.launch`
    """
    text, starts = bytearray(), []
    for one in arguments:
        if isinstance(one, bytes):
            text += bytes(-len(text) % _MAP_ALIGNED)
            own = one
        else:
            own = one.to_bytes(8, "little", signed=True) if isinstance(one, int) else one.tobytes().ljust(8, b"\0")
        starts.append(len(text))
        text += own
    held, first = _aligned(len(text))
    ctypes.memmove(first, bytes(text), len(text))
    places = (ctypes.c_void_p * len(starts))(*(first + start for start in starts))
    sizes = ((ctypes.c_uint * 3)(blocks, 1, 1), (ctypes.c_uint * 3)(threads, 1, 1))
    config = _Config(*sizes, memory, stream, ctypes.pointer(_EARLY), int(early))
    error = _driver().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), places, None)
    del held  # until here
    if error:
        raise RuntimeError(f"cuLaunchKernelEx: error {error}")


def tensor_map(x: Tensor, rows: int, columns: int) -> bytes:
    """A CUtensorMap: boxes of rows by columns of x [n, m], 16 bit, for a kernel's `const __grid_constant__` parameter
    of 128 bytes. A box's rows are of 128 bytes, swizzled; what lies outside x is zeros.

    It is made of x's address, shape and strides alone, so it is right for as long as the memory is x's. A CUDA graph
    holds it by value, as it holds a pointer, and in its replays both are right: the weights that a graph reads and the
    memory that it makes for itself stay where they were, and another slot of weights has graphs of its own.
    """
    return _tensor_map(x.data_ptr(), _MAP_TYPES[x.dtype], *x.shape, x.stride(0) * x.element_size(), rows, columns)


@lru_cache(1024)  # numbers make numbers: what lies at the address is nothing to it
def _tensor_map(address: int, kind: int, n: int, m: int, stride: int, rows: int, columns: int) -> bytes:
    held, at = _aligned(_MAP_BYTES)
    shape, strides = (ctypes.c_uint64 * 2)(m, n), (ctypes.c_uint64 * 1)(stride)
    box, step = (ctypes.c_uint32 * 2)(columns, rows), (ctypes.c_uint32 * 2)(1, 1)
    of = (ctypes.c_void_p(at), kind, 2, ctypes.c_void_p(address), shape, strides, box, step)
    # not interleaved, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, zeros outside
    error = _driver().cuTensorMapEncodeTiled(*of, 0, 3, 3, 0)
    made = ctypes.string_at(at, _MAP_BYTES)
    del held  # until here
    if error:
        raise RuntimeError(f"cuTensorMapEncodeTiled: error {error} for {n} rows of {m}, {stride} bytes apart")
    return made


def _aligned(size: int) -> tuple[object, int]:
    """Room for a map or what holds one: whom it belongs to, and where it begins."""
    held = ctypes.create_string_buffer(size + _MAP_ALIGNED)
    return held, -(-ctypes.addressof(held) // _MAP_ALIGNED) * _MAP_ALIGNED


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
