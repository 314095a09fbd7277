"""In the place of a GPU: which modules a process would load, and from what. Nothing of them runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from app.ops import cuda
from app.ops.cuda import Build
from app.runtime import engine_artifact, engines

VERSIONS = {"torch": "2.11.0+cu130", "triton": "3.6.0", "cupy": "14.2.0", "nvrtc": "13.0"}


class StandIn:
    """What `app.runtime.engines` sees of a GPU; operators see none, and compute on the CPU.

    arch, unfit  what the device says of itself · refuse: cubins that the driver does not load, sources that do not
    compile, by a part of their text
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.arch, self.unfit, self.refuse = "sm_90", None, "nothing of the kind"
        self._modules = cuda._Modules()
        patch.setattr(cuda, "_MODULES", self._modules)
        patch.setattr(cuda, "_from_source", self._from_source)
        patch.setattr(cuda, "_binary", self._binary)
        seen = SimpleNamespace(
            unfit=lambda _: self.unfit,
            architecture=lambda _: self.arch,
            ready=cuda.ready,
            is_ready=cuda.is_ready,
            compilations=cuda.compilations,
        )
        patch.setattr(engines, "cuda", seen)

    @property
    def loaded(self) -> dict[Build, bytes]:
        """Every module and its cubin; b"" where it was compiled here."""
        return {build: found for (build, _), found in self._modules._loaded.items()}

    @property
    def compiled(self) -> int:
        return self._modules.made

    def _from_source(self, build: Build, _: int) -> bytes:
        if self.refuse in build.given:
            raise RuntimeError(f"{self.refuse}: no such function")
        return b""

    def _binary(self, cubin: bytes, _: int) -> bytes:
        if self.refuse.encode() in cubin:
            raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")
        return cubin


def cubin_of(build: Build, arch: str) -> bytes:
    """In the place of NVRTC: a binary that says what it is of."""
    return f"{arch} {build.name} {build.define} {build.given}".encode()


def without_compiler(patch: pytest.MonkeyPatch) -> None:
    """`Build.compiled` takes no time, and the versions are always the same."""
    patch.setattr(Build, "compiled", cubin_of)
    patch.setattr(engine_artifact, "versions", lambda: dict(VERSIONS))
