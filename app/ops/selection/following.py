"""Launches that may begin while the launch before them on the stream ends (programmatic dependent launch).

CuPy has no launch attributes, so that this calls the driver itself. The kernel must wait (`griddepcontrol.wait`) before
it touches what the one before it wrote.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from app.ops.cuda import Kernel

SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_ALLOWED = _Attribute(SERIALIZATION, 0, 1)


def follow(kernel: Kernel, blocks: int, threads: int, *arguments: int) -> None:
    """Run on torch's current stream of the kernel's device, which must be the current device.

    arguments  int for `long long` and for pointers
    """
    values = (ctypes.c_longlong * len(arguments))(*arguments)
    first = ctypes.addressof(values)
    pointers = (ctypes.c_void_p * len(arguments))(*range(first, first + 8 * len(arguments), 8))
    stream = torch._C._cuda_getCurrentRawStream(kernel.device)  # noqa: SLF001  as in app.ops.cuda
    config = _Config((blocks, 1, 1), (threads, 1, 1), kernel.memory, stream, ctypes.pointer(_ALLOWED), 1)
    status = _driver().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(kernel.function.ptr), pointers, None)
    if status:
        raise RuntimeError(f"cuLaunchKernelEx gave {status}")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
