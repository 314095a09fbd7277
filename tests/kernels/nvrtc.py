"""NVRTC without a GPU: what a kernel compiles to for an architecture, and what ptxas says about it."""

from __future__ import annotations

import ctypes
import re
import site
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path


@dataclass(frozen=True)
class Build:
    """One `// build:` combination of a source. spill: bytes that it may spill on sm_90."""

    source: Path
    define: tuple[tuple[str, int], ...]
    arch: str | None
    spill: int

    def __str__(self) -> str:
        defines = " ".join(f"{name}={value}" for name, value in self.define)
        return f"{self.source.parent.name}/{self.source.name} {defines} {self.arch or ''}".strip()


@dataclass(frozen=True)
class Entry:
    """What ptxas says about an entry point."""

    name: str
    registers: int
    spilled: int


def builds(source: Path) -> list[Build]:
    """Every combination that the source's `// build:` lines name."""
    found = []
    for line in re.findall(r"^// build:(.*)$", source.read_text("utf-8"), re.MULTILINE):
        fields = dict(word.split("=") for word in line.split())
        arch, spill = fields.pop("arch", None), int(fields.pop("spill", "0"))
        choices = [[(name, int(value)) for value in values.split(",")] for name, values in fields.items()]
        found += [Build(source, define, arch, spill) for define in product(*choices)]
    assert found, f"{source}: no `// build:` line"
    return found


@cache
def library() -> ctypes.CDLL:
    """libnvrtc of the wheel nvidia-cuda-nvrtc."""
    for root in site.getsitepackages():
        for path in sorted(Path(root).glob("nvidia/**/libnvrtc.so.*")):
            if "alt" not in path.name:
                for part in path.parent.glob("libnvrtc-builtins.so.*.*"):
                    if "alt" not in part.name:
                        ctypes.CDLL(str(part))  # which it looks for by name
                return ctypes.CDLL(str(path))
    raise AssertionError("NVRTC is not installed: make test-kernels does")


def compiled(source: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """(cubin, or b"" for a virtual architecture; log). Raises AssertionError with the log where it does not compile."""
    nvrtc = library()
    program = ctypes.c_void_p()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    log = _text(nvrtc, program, "ProgramLog").rstrip(b"\0").decode()
    assert not failed, log
    cubin = b"" if any("compute_" in option for option in options) else _text(nvrtc, program, "CUBIN")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin, log


def entries(log: str) -> list[Entry]:
    """The entry points in a log of `--ptxas-options=-v`."""
    pattern = (
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers"
    )
    return [
        Entry(name, int(registers), max(int(stores), int(loads)))
        for name, stores, loads, registers in re.findall(pattern, log, re.DOTALL)
    ]


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    assert not getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    assert not getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.raw
