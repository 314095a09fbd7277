"""CUDA kernels from the `.cu` files beside the operators: compiled by NVRTC through CuPy, launched on torch's streams.

What a source must keep to: entry points are `extern "C"`; nothing is included (NVRTC then needs no toolkit); integer
parameters are `long long`, floating ones `float`; grids have one dimension. A line

    // part: prelude/half.cuh

stands for that file of app/ops: what kernels share is in prelude/, a long source lies in parts beside it. These have
none themselves. Lines of the form

    // build: D=64,128 BF16=0,1
    // build: D=64 BF16=1 arch=sm_90a spill=16

say which definitions it is compiled with (every combination); `make test-kernels` compiles all of them for every
architecture, and allows no more spilled bytes on sm_90 than `spill` (0).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, local
from typing import Any, NamedTuple

import torch

from app.ops import driver, nvrtc

THREADS = 8
"""Modules that are compiled at a time."""
_OPS = Path(__file__).parent
_PART = re.compile(r"^// part: (\S+)$")


class Build(NamedTuple):
    """A module of kernels: a source and the definitions that it is compiled with, sorted by name.

    arch   for instructions of one architecture only ("sm_90a"); "" = the device's
    given  lines that are put before the source: what is made from a policy
    """

    source: Path
    define: tuple[tuple[str, int], ...] = ()
    arch: str = ""
    given: str = ""

    @classmethod
    def of(cls, source: Path, arch: str = "", **define: int) -> Build:
        """With definitions by name."""
        return cls(source, tuple(sorted(define.items())), arch)

    @property
    def name(self) -> str:
        """Of the source below app/ops: "attention/kernel.cu"."""
        return f"{self.source.parent.name}/{self.source.name}"

    def options(self, arch: str = "") -> tuple[str, ...]:
        """What NVRTC is given for an architecture ("sm_90"), as CuPy would; for "" all but that."""
        wanted = self.arch or arch
        return (*options(dict(self.define)), *nvrtc.AS_CUPY, *((f"-arch={wanted}",) if wanted else ()))

    def compiled(self, arch: str) -> bytes:
        """The cubin for an architecture, as CuPy would make it. Raises nvrtc.CompileError, nvrtc.Missing."""
        return nvrtc.compiled(self.given + text(self.source), self.options(arch))[0]


@dataclass(frozen=True, slots=True)
class Kernel:
    """An entry point that is compiled and loaded on one device, so that a launch may be captured into a CUDA graph."""

    function: Any
    device: int
    memory: int

    def launch(self, blocks: int, threads: int, *arguments: Any, early: bool = False) -> None:
        """Run on torch's current stream of the kernel's device.

        arguments  int for `long long` and for pointers (`Tensor.data_ptr()` of a tensor that the caller holds), bytes
                   for a `driver.tensor_map`, numpy scalars for everything else
        early      begin while the kernel before ends (programmatic launch): for a source that says griddepcontrol.wait
                   in front of what it reads or writes of others
        """
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.launch(blocks, threads, *arguments, early=early)
        stream = torch._C._cuda_getCurrentRawStream(self.device)  # noqa: SLF001  30 times quicker than current_stream
        if early or bytes in map(type, arguments):  # neither can CuPy's launch have
            return driver.launch(self.function.ptr, blocks, threads, self.memory, stream, arguments, early=early)
        return self.function((blocks,), (threads,), arguments, self.memory, _Stream(stream))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Stream:
    """All that CuPy's launch asks of a stream."""

    ptr: int


def unfit(device: torch.device) -> str | None:
    """Why no kernel of ours runs on a device; None where they do."""
    if not nvidia(device):
        return f"{device} is no NVIDIA GPU of compute capability 8.0"
    return None if _has_cupy() else "CuPy is not installed"


def nvidia(device: torch.device) -> bool:
    """Whether a device is an NVIDIA GPU of compute capability 8.0 or above: ours, and torch's own 16-bit kernels."""
    return device.type == "cuda" and torch.version.cuda is not None and _capability(device.index or 0) >= (8, 0)


def load(source: Path, name: str, device: torch.device, *, memory: int = 0, arch: str = "", **define: int) -> Kernel:
    """Entry point `name` of a source, compiled with definitions: once a process, device and combination, where `ready`
    has not made it so before; CuPy keeps the binaries on disk.

    device  as a tensor says it, with its number
    memory  bytes of dynamic shared memory of a launch
    arch    for instructions of one architecture only: "sm_90a"
    """
    return entry(Build.of(source, arch, **define), name, device, memory=memory)


def entry(build: Build, name: str, device: torch.device, *, memory: int = 0) -> Kernel:
    """Entry point `name` of a module, as `load` has it."""
    return _load(name, device.index or 0, memory, build)


def text(source: Path) -> str:
    """A source as it is compiled, with its parts in their places; the compiler's messages name the files and lines."""
    lines = [f'#line 1 "{source.name}"']
    for number, line in enumerate(source.read_text("utf-8").splitlines(), 1):
        if part := _PART.match(line):
            lines += [f'#line 1 "{part[1]}"', (_OPS / part[1]).read_text("utf-8")]
            line = f'#line {number + 1} "{source.name}"'  # noqa: PLW2901  it goes on behind the part
        lines.append(line)
    return "\n".join(lines) + "\n"


def files(source: Path) -> tuple[Path, ...]:
    """A source and its parts."""
    found = map(_PART.match, source.read_text("utf-8").splitlines())
    return (source, *(_OPS / part[1] for part in found if part))


def options(define: dict[str, int]) -> tuple[str, ...]:
    """What NVRTC is given, beside the architecture."""
    return ("--std=c++17", *(f"-D{name}={value}" for name, value in define.items()))


def in_force(device: torch.device, dtype: torch.dtype) -> str:
    """What computes on a device, in a word or a sentence: "cuda" the kernels, "torch" torch's operators, and why where
    one would expect the kernels."""
    if device.type != "cuda" or dtype == torch.float32:
        return "torch"
    reason = unfit(device)
    return "cuda" if reason is None else f"torch: {reason}"


def architecture(device: torch.device) -> str:
    """What our kernels are compiled for on a device: "sm_90"."""
    major, minor = _capability(device.index or 0)
    return f"sm_{major}{minor}"


def ready(builds: Iterable[Build], device: torch.device, cubins: Mapping[Build, bytes] | None = None) -> int:
    """Have modules on a device before their first launch: from their binaries where those are given, else compiled.

    Returns how many were compiled. Raises what CuPy raises for a source or a binary that the device does not take.
    """
    number, given = device.index or 0, cubins or {}

    def load_one(build: Build) -> int:
        before = compilations_here()
        _MODULES.load(build, number, given.get(build))
        return compilations_here() - before

    with ThreadPoolExecutor(THREADS) as pool:
        made = sum(pool.map(load_one, dict.fromkeys(builds)))
    _MODULES.here.made += made  # this thread has waited for them
    return made


def is_ready(build: Build, device: torch.device) -> bool:
    """Whether a module is loaded, so that its launch compiles nothing."""
    return _MODULES.has(build, device.index or 0)


def compilations() -> int:
    """Modules that this process has made from source, by NVRTC or from what CuPy keeps of it on the disk."""
    return _MODULES.made


def compilations_here() -> int:
    """Those of them that this thread has made, or waited for in `ready`."""
    return _MODULES.here.made


class _Here(local):
    """Of a thread: how many modules it has compiled, or waited for in `ready`."""

    made = 0


class _Modules:
    """The modules that this process has loaded, once each and for good, as the driver keeps them.

    made  how many were compiled · here: the same of each thread
    """

    def __init__(self) -> None:
        self._loaded: dict[tuple[Build, int], Any] = {}
        self._lock = Lock()
        self.made, self.here = 0, _Here()

    def has(self, build: Build, device: int) -> bool:
        """Whether a build is there."""
        return (build, device) in self._loaded

    def load(self, build: Build, device: int, cubin: bytes | None = None) -> Any:
        """CuPy's module of a build on a device."""
        found = self._loaded.get((build, device))
        if found is None:
            found = _from_source(build, device) if cubin is None else _binary(cubin, device)
            self.here.made += cubin is None
            with self._lock:  # whoever was here first has made the one that counts
                self.made += cubin is None
                found = self._loaded.setdefault((build, device), found)
        return found


_MODULES = _Modules()


@cache
def _load(name: str, device: int, memory: int, build: Build) -> Kernel:
    from cupy.cuda import Device  # noqa: PLC0415  there is none on a CPU
    from cupy.cuda import driver as limits  # noqa: PLC0415

    with Device(device), torch.cuda.device(device):
        function = _MODULES.load(build, device).get_function(name)
        if memory:
            # one function serves launches with more and with less: the limit never falls
            limit = limits.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            limits.funcSetAttribute(function.ptr, limit, max(memory, limits.funcGetAttribute(limit, function.ptr)))
        return Kernel(function, device, memory)


def _from_source(build: Build, device: int) -> Any:
    import cupy  # noqa: PLC0415  there is none on a CPU

    given = options(dict(build.define)) + ((f"-arch={build.arch}",) if build.arch else ())
    with cupy.cuda.Device(device):
        return cupy.RawModule(code=build.given + text(build.source), options=given).module


def _binary(cubin: bytes, device: int) -> Any:
    from cupy.cuda import Device, function  # noqa: PLC0415  there is none on a CPU

    with Device(device):
        module = function.Module()
        module.load(cubin)
        return module


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _has_cupy() -> bool:
    return find_spec("cupy") is not None
