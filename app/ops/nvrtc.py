"""NVRTC by itself: what a source compiles to for an architecture, without a GPU, a driver or CuPy."""

from __future__ import annotations

import ctypes
import site
from ctypes.util import find_library
from functools import cache
from pathlib import Path

AS_CUPY = ("-ftz=true", "--device-as-default-execution-space")
"""What CuPy adds to the options of a source of its own accord."""


class CompileError(Exception):
    """The compiler's words about a source."""


class Missing(Exception):
    """There is no NVRTC."""


def version() -> str:
    """Of the library: "13.0". Raises Missing."""
    nvrtc, major, minor = _library(), ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compiled(source: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """(cubin, or b"" for a virtual architecture; log). Raises CompileError with the log, Missing."""
    nvrtc, program = _library(), ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None):
        raise CompileError("NVRTC takes no program")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
        log = _text(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if failed:
            raise CompileError(log)
        virtual = any("compute_" in option for option in options)
        return b"" if virtual else _text(nvrtc, program, "CUBIN"), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    if getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)):
        raise CompileError(f"NVRTC gives no {what}")
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.raw


@cache
def _library() -> ctypes.CDLL:
    """libnvrtc of the wheel nvidia-cuda-nvrtc, which torch's CUDA wheels bring, or of a toolkit."""
    for root in site.getsitepackages():
        for path in sorted(Path(root).glob("nvidia/**/libnvrtc.so.*")):
            if "alt" not in path.name:
                for part in path.parent.glob("libnvrtc-builtins.so.*.*"):
                    if "alt" not in part.name:
                        ctypes.CDLL(str(part))  # which it looks for by name
                return ctypes.CDLL(str(path))
    named = find_library("nvrtc")
    if named is None:
        raise Missing(
            "NVRTC is not installed: it comes with torch for CUDA, or, in a checkout, with "
            "`.venv/bin/pip install -c constraints.txt -e '.[kernels]'`"
        )
    return ctypes.CDLL(named)
