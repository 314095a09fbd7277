"""Sources of kernels: their parts; which launches are the driver's own; and who has compiled what."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from app.ops import cuda, driver
from app.ops.builds import sources
from app.ops.cuda import Build, Kernel
from app.ops.nvrtc import CompileError, Missing, compiled, version

OPS = Path(cuda.__file__).parent
PART = OPS / "prelude" / "half.cuh"


@pytest.fixture
def source(tmp_path):
    """A source of four lines; its third is a part, its fourth wrong."""
    file = tmp_path / "one.cu"
    file.write_text('// build:\n#define A 1\n// part: prelude/half.cuh\nextern "C" __global__ void f() { g(); }\n')
    return file


def test_a_part_stands_where_its_line_is(source):
    found = cuda.text(source)
    assert found.index("#define A 1") < found.index(PART.read_text()) < found.index("void f()")
    assert "// part:" not in found


def test_an_engine_is_bound_to_the_parts_of_its_sources(source):
    assert cuda.files(source) == (source, PART)
    assert sources([Build.of(source, A=1), Build.of(source, A=2)]) == tuple(sorted((source, PART)))


def test_a_part_that_is_not_there_is_an_error_that_names_it(source):
    source.write_text("// part: prelude/none.cuh\n")
    with pytest.raises(FileNotFoundError, match=r"prelude/none\.cuh"):
        cuda.text(source)


def test_parts_have_no_parts_and_every_one_is_some_sources():
    named = {file for source in OPS.glob("*/*.cu") for file in cuda.files(source)}
    parts = set(OPS.glob("*/*.cuh"))
    assert parts <= named
    assert [part for part in parts if cuda.files(part) != (part,)] == []


def test_the_compilers_words_name_the_line_of_the_source(source):
    try:
        version()
    except Missing:
        pytest.skip("NVRTC is not installed")
    with pytest.raises(CompileError, match=r"one\.cu\(4\)"):
        compiled(cuda.text(source), ("-arch=sm_90",))


def test_what_cupys_launch_cannot_have_is_the_drivers_own(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 5, raising=False)
    monkeypatch.setattr(driver, "launch", lambda *given, early: seen.append(("driver", *given, early)))

    class Function:
        ptr = 7

        def __call__(self, *given):
            seen.append(("cupy", *given[:4], given[4].ptr))

    kernel = Kernel(Function(), 0, 64)
    kernel.launch(2, 32, 1)
    kernel.launch(2, 32, 1, early=True)
    kernel.launch(2, 32, b"map", 1)
    assert seen == [
        ("cupy", (2,), (32,), (1,), 64, 5), ("driver", 7, 2, 32, 64, 5, (1,), True),
        ("driver", 7, 2, 32, 64, 5, (b"map", 1), False),
    ]  # fmt: skip


def test_modules_are_counted_for_the_thread_that_makes_them_or_waits_for_them(source, monkeypatch):
    monkeypatch.setattr(cuda, "_MODULES", cuda._Modules())
    monkeypatch.setattr(cuda, "_from_source", lambda build, device: f"module {build.define}")
    monkeypatch.setattr(cuda, "_binary", lambda cubin, device: cubin)
    device, builds = torch.device("cpu"), [Build.of(source, A=n) for n in range(6)]
    with ThreadPoolExecutor(1) as other:
        assert other.submit(cuda.ready, builds[:3], device).result() == 3
        assert (cuda.compilations(), cuda.compilations_here()) == (3, 0)
        assert cuda.ready(builds, device, {builds[3]: b"cubin"}) == 2  # three are there, one is a binary
        cuda._MODULES.load(builds[5], 0)
        assert (cuda.compilations(), cuda.compilations_here()) == (5, 2)
        assert other.submit(cuda.compilations_here).result() == 3
