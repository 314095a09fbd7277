"""Every kernel compiles for every architecture that is served, without a GPU, and spills nothing on sm_90 (`make
test-kernels`)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import pytest

from app.ops import cuda
from app.ops.builds import GPUS
from app.ops.nvrtc import AS_CUPY, CompileError
from app.ops.nvrtc import compiled as compile_source
from tests.kernels import nvrtc
from tests.kernels.nvrtc import Build

REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted([*REPOSITORY.glob("app/ops/*/*.cu"), *REPOSITORY.glob("bench/*.cu")])
ARCHITECTURES = (*(arch for arch in GPUS if arch != "sm_90"), "compute_80")


def compiled(build: Build, arch: str, *more: str) -> tuple[bytes, str]:
    options = (*cuda.options(dict(build.define)), *AS_CUPY, f"-arch={build.arch or arch}", *more)
    return compile_source(cuda.text(build.source), options)


def covering(builds: Iterable[Build], together: int) -> list[Build]:
    """Some of them that have every `together` values of definitions together once."""
    chosen, seen = [], set()
    for build in builds:
        here = set(combinations((*build.define, ("arch", build.arch)), together))
        if not chosen or not here <= seen:
            chosen.append(build)
            seen |= here
    return chosen


@pytest.mark.parametrize("build", [b for source in SOURCES for b in covering(nvrtc.builds(source), 2)], ids=str)
def test_a_kernel_does_not_spill_on_sm_90(build):
    cubin, log = compiled(build, "sm_90", "--ptxas-options=-v")
    assert cubin[:4] == b"\x7fELF"
    found = nvrtc.entries(log)
    assert found, log
    assert [entry for entry in found if entry.spilled > build.spill] == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_kernel_compiles_for_every_architecture(source, arch):
    portable = [build for build in nvrtc.builds(source) if build.arch is None]
    for build in covering(portable, 1):
        compiled(build, arch)


def test_a_source_that_is_wrong_fails_with_the_compilers_words():
    with pytest.raises(CompileError, match=r"identifier .* is undefined"):
        compile_source('extern "C" __global__ void f() { g(); }', ("-arch=sm_90",))


def test_a_build_is_compiled_to_a_binary_as_an_engine_holds_it():
    source = REPOSITORY / "app" / "ops" / "trie" / "kernel.cu"
    one, again = (cuda.Build.of(source, WIDE=1).compiled("sm_90") for _ in range(2))
    assert one == again
    assert one[:4] == b"\x7fELF"
    with pytest.raises(CompileError, match="gpu-architecture"):
        cuda.Build.of(source, WIDE=1).compiled("sm_1")
