"""cuBLASLt by its C interface, as far as a product of rows with a matrix needs it: the algorithms that its heuristics
name, a product by one of them, 8 bits with a scale a row and an output channel, and a sum onto what is there (which
torch does not have for 8 bits).

Row-major out [n, m] = x [n, k] weight [m, k]^T is column-major [m, n]: the matrix is cuBLASLt's A, transposed, rows are
its B.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from functools import cache, lru_cache
from threading import Lock
from typing import Any, Final, NamedTuple

import torch

TYPES: Final = {torch.bfloat16: 14, torch.float16: 2, torch.float8_e4m3fn: 28}
"""cudaDataType of the operands. What 8 bits give is bfloat16."""
ALIGNMENT: Final = 16
"""Bytes at a multiple of which every operand and every row begins."""
_COMPUTE_32F, _R_32F, _PER_ROW = 68, 0, 3
_TRANSPOSE_A, _A_SCALE, _B_SCALE, _FAST_SUMS, _A_SCALE_MODE, _B_SCALE_MODE = 3, 17, 18, 25, 31, 32
_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_NOWHERE: Final = (ALIGNMENT, ALIGNMENT)
"""For who asks about scales and reads none."""
_REFUSALS: Final = frozenset({7, 8, 15})
"""CUBLAS_STATUS_INVALID_VALUE, _ARCH_MISMATCH, _NOT_SUPPORTED: nothing was launched."""
_HELD: Final = 1024
"""Shapes whose descriptors are kept."""


class Algorithm(NamedTuple):
    """data: 64 bytes that mean something to this version of cuBLASLt; workspace: bytes that a launch needs."""

    data: bytes
    workspace: int


class Shape(NamedTuple):
    """A product on a device: out [n, m] = x [n, k] weight [m, k]^T, x and weight in `dtype`; elements from a row of x,
    weight and out to the next."""

    device: int
    dtype: torch.dtype
    n: int
    m: int
    k: int
    x_row: int
    weight_row: int
    out_row: int


class _Algo(ctypes.Structure):
    """cublasLtMatmulAlgo_t"""

    _fields_ = (("data", c_uint64 * 8),)


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algo", _Algo), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4)
    )  # fmt: skip


class Failed(RuntimeError):
    """cuBLASLt has refused a call. status: its cublasStatus_t; 0 where there was none to ask."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@cache
def library() -> ctypes.CDLL | None:
    """The library that torch has loaded; None where it has none."""
    if torch.version.cuda is None:
        return None
    try:
        return opened(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except (OSError, AttributeError):
        return None


def opened(name: str) -> ctypes.CDLL:
    """A cuBLASLt. Raises OSError, AttributeError where it is none."""
    found = ctypes.CDLL(name)
    found.cublasLtGetVersion.restype = c_size_t
    pointers, size = [c_void_p], [c_size_t]
    found.cublasLtMatmul.argtypes = [*pointers * 14, *size, *pointers]
    found.cublasLtMatmulAlgoGetHeuristic.argtypes = [*pointers * 7, c_int, *pointers * 2]
    found.cublasLtMatmulDescSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
    found.cublasLtMatmulPreferenceSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
    found.cublasLtMatrixLayoutCreate.argtypes = [c_void_p, c_int, c_uint64, c_uint64, c_int64]
    for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
        getattr(found, f"cublasLt{kind}Destroy").argtypes = pointers
    return found


def version() -> int:
    """Of the library; 0 where there is none."""
    found = library()
    return 0 if found is None else int(found.cublasLtGetVersion())


class Product:
    """A shape's descriptors. Any thread may launch it, on any stream: they are not changed, but for the places of the
    scales, which is done under a lock. Raises Failed."""

    def __init__(self, lib: ctypes.CDLL, shape: Shape) -> None:
        self._lib, self.shape = lib, shape
        self._eight = shape.dtype == torch.float8_e4m3fn
        self._lock = Lock()
        self._made: list[tuple[str, c_void_p]] = []
        self._refused: set[Algorithm] = set()
        kind, out = TYPES[shape.dtype], TYPES[torch.bfloat16 if self._eight else shape.dtype]
        self._desc = self._new("MatmulDesc", c_int(_COMPUTE_32F), c_int(_R_32F))
        self._set(_TRANSPOSE_A, c_int32(1))
        if self._eight:
            self._set(_FAST_SUMS, c_int8(1))  # as torch is asked to
            self._set(_A_SCALE_MODE, c_int32(_PER_ROW))
            self._set(_B_SCALE_MODE, c_int32(_PER_ROW))
        self._weight = self._new("MatrixLayout", kind, shape.k, shape.m, shape.weight_row)
        self._x = self._new("MatrixLayout", kind, shape.k, shape.n, shape.x_row)
        self._out = self._new("MatrixLayout", out, shape.m, shape.n, shape.out_row)
        self._one, self._zero = c_float(1.0), c_float(0.0)

    def __del__(self) -> None:
        for kind, made in self._made:
            getattr(self._lib, f"cublasLt{kind}Destroy")(made)

    def algorithms(self, workspace: int, most: int = 16) -> list[Algorithm]:
        """What the heuristics name, their best guess first: without sums over several blocks, for operands of
        `ALIGNMENT`. workspace: bytes that one may need."""
        preference = self._new("MatmulPreference")
        wanted = [(_WORKSPACE, c_size_t(workspace)), (_REDUCTIONS, c_uint32(0))]
        for attribute, value in (*wanted, *((one, c_uint32(ALIGNMENT)) for one in _ALIGNMENTS)):
            _check(
                self._lib.cublasLtMatmulPreferenceSetAttribute(preference, attribute, byref(value), sizeof(value)),
                f"attribute {attribute} of a preference",
            )
        found, count = (_Result * most)(), c_int(0)
        with self._scaled(_NOWHERE):
            status = self._lib.cublasLtMatmulAlgoGetHeuristic(
                self._handle(), self._desc, *self._layouts, preference, most, found, byref(count)
            )
        named = [] if status else [one for one in found[: count.value] if one.state == 0]
        return [Algorithm(bytes(one.algo), int(one.workspace)) for one in named]

    def launched(
        self, algorithm: Algorithm, x: int, weight: int, out: int, *, onto: bool, scales: tuple[int, int] | None = None
    ) -> bool:
        """`launch`, unless cuBLASLt does not take an algorithm, of another number of rows perhaps, for this shape: it
        is not asked again then. Its own check before a launch refuses what it then computes."""
        if algorithm in self._refused:
            return False
        try:
            self.launch(algorithm, x, weight, out, onto=onto, scales=scales)
        except Failed as error:
            if error.status not in _REFUSALS:
                raise
            self._refused.add(algorithm)
            return False
        return True

    def launch(
        self, algorithm: Algorithm, x: int, weight: int, out: int, *, onto: bool, scales: tuple[int, int] | None = None
    ) -> None:
        """On torch's current stream of the shape's device.

        x, weight, out  addresses · onto: out += instead of out = · scales: of x's rows and weight's, for 8 bits
        """
        # torch's allocator gives a workspace that nobody else writes before this has, in a capture, too
        space = (
            torch.empty(algorithm.workspace, dtype=torch.uint8, device=torch.device("cuda", self.shape.device))
            if algorithm.workspace
            else None
        )
        beta = byref(self._one if onto else self._zero)
        weight_layout, x_layout, _, out_layout = self._layouts
        operands = (
            self._handle(), self._desc, byref(self._one), weight, weight_layout, x, x_layout, beta, out, out_layout,
            out, out_layout, algorithm.data, None if space is None else space.data_ptr(), algorithm.workspace,
            torch._C._cuda_getCurrentRawStream(self.shape.device),  # noqa: SLF001  30 times quicker than current_stream
        )  # fmt: skip
        with self._scaled(scales):
            status = self._lib.cublasLtMatmul(*operands)
        _check(status, "cublasLtMatmul")

    @property
    def _layouts(self) -> tuple[c_void_p, c_void_p, c_void_p, c_void_p]:
        return self._weight, self._x, self._out, self._out

    def _handle(self) -> c_void_p:
        return _handle(self._lib, self.shape.device)

    def _new(self, kind: str, *arguments: Any) -> c_void_p:
        made = c_void_p()
        _check(getattr(self._lib, f"cublasLt{kind}Create")(byref(made), *arguments), kind)
        self._made.append((kind, made))
        return made

    def _set(self, attribute: int, value: Any) -> None:
        status = self._lib.cublasLtMatmulDescSetAttribute(self._desc, attribute, byref(value), sizeof(value))
        _check(status, f"attribute {attribute} of a product")

    @contextmanager
    def _scaled(self, scales: tuple[int, int] | None) -> Iterator[None]:
        """With the places of the scales in the description, in 8 bits."""
        if not self._eight or scales is None:
            yield
            return
        with self._lock:
            of_x, of_weight = scales
            self._set(_A_SCALE, c_void_p(of_weight))
            self._set(_B_SCALE, c_void_p(of_x))
            yield


@lru_cache(_HELD)
def product(shape: Shape) -> Product:
    """The descriptors of a shape, made once while it is in use."""
    lib = library()
    if lib is None:
        raise Failed("there is no cuBLASLt")
    return Product(lib, shape)


@cache
def _handle(lib: ctypes.CDLL, device: int) -> c_void_p:
    """Threads may share it (cuBLASLt's documentation)."""
    made = c_void_p()
    with torch.cuda.device(device):
        _check(lib.cublasLtCreate(byref(made)), "cublasLtCreate")
    return made


def _check(status: int, what: str) -> None:
    if status:
        raise Failed(f"{what}: cuBLAS status {status}", status)
