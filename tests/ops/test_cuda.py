"""Sources of kernels: their parts; and what an early launch gives the driver."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from app.ops import cuda
from app.ops.builds import sources
from app.ops.cuda import Build
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


def test_an_early_launch_gives_every_argument_at_the_address_of_its_type(monkeypatch):
    """As a kernel reads them: `long long`, `float` and `int`, each from its own place."""
    found = []

    def launched(config, function, places, _):
        own = config._obj
        found.append((tuple(own.grid), tuple(own.block), own.memory, own.stream, own.attributes[0].id, own.count))
        found.append(function.value)
        kinds = (ctypes.c_longlong, ctypes.c_float, ctypes.c_int, ctypes.c_longlong)
        found.append([kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)])
        return 0

    monkeypatch.setattr(cuda, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launched))
    cuda._launch_early(7, 3, 128, 1024, 5, (2**47 + 3, np.float32(-1.5), np.int32(-9), -1))
    assert found == [((3, 1, 1), (128, 1, 1), 1024, 5, 6, 1), 7, [2**47 + 3, -1.5, -9, -1]]


def test_an_early_launch_that_the_driver_refuses_is_an_error(monkeypatch):
    monkeypatch.setattr(cuda, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=lambda *_: 701))
    with pytest.raises(RuntimeError, match="701"):
        cuda._launch_early(7, 1, 32, 0, 5, ())
