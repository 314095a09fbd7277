"""`tests.gpu.sanitize` without a GPU: its cases make their operands on the CPU, kernels are named and do nothing, and
nothing is compared. `tests/test_sanitize.py` runs it in a process of its own, as python -O: without assertions."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from app.ops import cuda, library
from app.ops.builds import GPUS
from app.ops.cuda import Build, Kernel
from app.ops.gated import product
from app.ops.gdn import around
from app.ops.selection import launch, radix
from tests.gpu import sanitize

ARCH, CPU = "sm_90", torch.device("cpu")
PROPERTIES = SimpleNamespace(
    multi_processor_count=132, shared_memory_per_multiprocessor=GPUS[ARCH].processor,
    shared_memory_per_block_optin=GPUS[ARCH].block, major=9, minor=0,
)  # fmt: skip


class _OnCpu(TorchFunctionMode):
    """Who asks for a GPU gets the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in {Tensor.cuda, Tensor.pin_memory}:
            return args[0]
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        named = {key: _here(one) for key, one in (kwargs or {}).items()}
        return func(*map(_here, args), **named)


def _here(given: Any) -> Any:
    gpu = given.type == "cuda" if isinstance(given, torch.device) else isinstance(given, str) and given[:4] == "cuda"
    return CPU if gpu else given


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """A GPU of compute capability 9.0 that computes nothing."""
    generator = torch.Generator
    patch.setattr(torch, "Generator", lambda device="cpu": generator(_here(device)))
    patch.setattr(torch.testing, "assert_close", lambda *_, **__: None)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    patch.setattr(torch.cuda, "get_device_properties", lambda _=None: PROPERTIES)
    patch.setattr(library, "eager", lambda _: False)
    patch.setattr(cuda, "unfit", lambda _: None)
    patch.setattr(cuda, "architecture", lambda _: ARCH)
    patch.setattr(cuda, "entry", _named)
    patch.setattr(Kernel, "launch", lambda *_, early=False: None)
    patch.setattr(product, "tensor_map", lambda *_: b"")
    patch.setattr(around, "fits", lambda x, *_: x.dtype in {torch.bfloat16, torch.float16})
    for module in (launch, radix):
        patch.setattr(module, "limits", lambda _: (GPUS[ARCH].clusters, GPUS[ARCH].block))


def _named(build: Build, name: str, device: torch.device, *, memory: int = 0) -> Kernel:
    del device
    return Kernel(f"{build.name}:{name}", 0, memory)


if __name__ == "__main__":
    import_module("tests.gpu.policies.test_generated")  # which computes: its policies are compiled there

    with pytest.MonkeyPatch.context() as given, _OnCpu():
        stand_in(given)
        sys.exit(1 if sanitize.run(sanitize.parts()) else 0)
