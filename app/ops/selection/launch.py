"""The kernels of `chunk.cu` on torch's current stream: what they take, and their launch. Needs CuPy and a GPU.

Nothing is read back from the device, and memory comes from torch only, so that a launch may be captured into a CUDA
graph after one launch outside of it, which compiles.
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.ops import cuda
from app.ops.cuda import Build, Kernel
from app.ops.selection.geometry import Geometry, Requests, geometry

SOURCE = Path(__file__).with_name("chunk.cu")
TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Logits that are served, and their TYPE."""
NORMS = {"step": 1, "valid": 2, "given": 0, "none": 0}
"""What the log-sum-exp is taken over, and NORM of `scan`."""

EARLY = True
"""Whether tail begins while the scan ends, where the GPU can (compute capability 9.0)."""

MOST_COLUMNS = 3
"""Columns that a `Ranked` may have (`MOST_COLUMNS` of ranked.cuh)."""
RANKED = 3
"""SCORE of a `Ranked`."""


class Launched(NamedTuple):
    """row, code, order [M] int64, score [M] float32, n_valid [R] int64 (see `Selected`), and bad [n] int32; broken [n]
    int32: candidates that a bad score or rank cost, [0] but for a `Ranked`; rank [M] float32: [0] where not wanted."""

    row: Tensor
    code: Tensor
    order: Tensor
    score: Tensor
    n_valid: Tensor
    bad: Tensor
    broken: Tensor
    rank: Tensor


class Ranked(NamedTuple):
    """Scores and ranks by an expression: the definitions that ranked.cuh is compiled with, and what they read.

    values   [n, their number] float32, at least one column
    columns  [n, >= C] float32 each, MOST_COLUMNS at most; read where a candidate is legal, entries of a row in sequence
    noise    [n, 3] int64: seed, hash of the prefix, step; where the definitions draw numbers
    wanted   whether the survivors' ranks are
    """

    definitions: str
    values: Tensor
    columns: tuple[Tensor, ...] = ()
    noise: Tensor | None = None
    wanted: bool = False


class Scores(NamedTuple):
    """How a candidate's score comes from its logit: itself (a given rank), or (logit - norm) + parent.

    mask       [n, >= ceil(C / 8)] uint8, bit c % 8 of byte c // 8 of what may be selected; None = everything
    norm       [n] float32 where `normalize` is "given"; "step" and "valid" write theirs here
    parent     [n] float32, -inf = dead row; None: the score is the logit
    normalize  "step", "valid", "given", "none"
    ranked     not by this sum but so; `parent` must be there
    """

    mask: Tensor | None = None
    norm: Tensor | None = None
    parent: Tensor | None = None
    normalize: str = "none"
    ranked: Ranked | None = None


def layout(codes: int, itemsize: int, of: Requests, device: torch.device) -> Geometry | None:
    """The geometry of a launch on a device; None where the kernels do not fit."""
    clusters, shared = limits(device.index or 0)
    return geometry(len(of.keep), of.widest, of.most, codes, itemsize, clusters=clusters, shared=shared)


@cache
def limits(device: int) -> tuple[bool, int]:
    """Whether the blocks of a cluster can share memory, and bytes of shared memory that a block may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.major >= 9, int(properties.shared_memory_per_block_optin)


class Defines(NamedTuple):
    """What each part of `chunk.cu` is compiled with."""

    scan: dict[str, Any]
    tail: dict[str, Any]


def defines(kind: int, score: int, norm: int, shape: Geometry, *, mask: bool, whole: bool) -> Defines:
    """The definitions of chunk.cu for a launch.

    kind: of `TYPES` · score, norm: see chunk.cu · whole: rows of logits are whole 16-byte vectors
    """
    mask = mask or score == RANKED  # which takes none, too
    same = {"TYPE": kind, "SCORE": score, "MASK": int(mask), "SMALL": int(shape.small), "UNITS": shape.units}
    return Defines(
        scan={"PART": 2 if score == RANKED else 0, "NORM": norm, "VEC": int(whole), "CLUSTER": 1, **same},
        tail={"PART": 1, "NORM": 0, "VEC": int(whole), "CLUSTER": shape.cluster, **same},
    )


@lru_cache(maxsize=1024)
def ranked_builds(kind: int, normalize: str, shape: Geometry, *, whole: bool, definitions: str) -> tuple[Build, ...]:
    """The modules of a launch by a `Ranked`; `defines` says what is given, normalize is of `NORMS`."""
    made = defines(kind, RANKED, NORMS[normalize], shape, mask=True, whole=whole)
    return tuple(Build.of(SOURCE, **one)._replace(given=definitions) for one in made)


def whole_vectors(logits: Tensor) -> bool:
    """Whether rows of logits are whole 16-byte vectors."""
    return logits.data_ptr() % 16 == 0 and logits.shape[1] * logits.element_size() % 16 == 0


def select(
    logits: Tensor, scores: Scores, order: Tensor, of: Requests, shape: Geometry, *, ancestry: Tensor | None = None,
    ancestry_out: Tensor | None = None, early: bool = False,
) -> Launched:  # fmt: skip
    """Exact top-K of each request under T0 (RecoGEM 4.3), in one read of the logits.

    logits    [n, C] bfloat16, float16 or float32; NaN and +inf count as -inf and are counted
    order     [n] int64: 0 .. W - 1, distinct among the live rows of a request
    shape     of `layout`, or smaller chunks and clusters that fit
    ancestry  [n, t - 1] int32, and ancestry_out [M, t] int32: the survivors' slots (OneLA 3.3); tombstones get row 0's
    early     see EARLY
    """
    device, (n, codes), of_type = logits.device, logits.shape, TYPES[logits.dtype]
    logits, order = logits.contiguous(), order.contiguous()
    total, count = of.total, len(of.keep)
    mask, parent, ranked = scores.mask, scores.parent, scores.ranked
    chosen = torch.empty(3 * total + count, dtype=torch.int64, device=device)
    row, code, place, n_valid = chosen.split_with_sizes([total, total, total, count])
    score = torch.empty(total, dtype=torch.float32, device=device)
    bad = torch.empty(n, dtype=torch.int32, device=device)
    # what the kernels hand each other: chunk [n, chunks], ends, lasts, floors [n, 2], largest, norm [n]
    work = torch.empty(n * (shape.chunks + 8), dtype=torch.float32, device=device)
    firsts = accumulate((0, shape.chunks, 2, 2, 2, 1))
    chunk, ends, lasts, floors, largest, norm = (work.data_ptr() + 4 * n * first for first in firsts)
    norm = norm if scores.norm is None else scores.norm.data_ptr()
    of_score = 0 if parent is None else 1 if scores.normalize == "none" else 2
    given, definitions, counts = tuple[int, ...](), "", [bad.data_ptr()]
    broken, rank = _nothing(torch.int32, device), _nothing(torch.float32, device)
    if ranked is not None:
        broken, rank = torch.empty_like(bad), torch.empty_like(score) if ranked.wanted else rank
        given = (*_given(ranked), lasts, floors, _address(ranked.noise), largest, _address(rank))
        of_score, definitions, counts = RANKED, ranked.definitions, [*counts, broken.data_ptr()]
    made = defines(
        of_type, of_score, NORMS[scores.normalize], shape, mask=mask is not None, whole=whole_vectors(logits)
    )
    stride = 0 if mask is None else mask.stride(0)
    at = (logits.data_ptr(), _address(mask), chunk, ends, norm, _address(parent), order.data_ptr())
    if n:
        scan = _kernel("scan" if ranked is None else "rank_scan", device, made.scan, definitions)
        scan.launch(n, 128, at[0], at[1], at[5], *at[2:5], *counts, codes, stride, shape.chunks, *given)
    outputs = (row, code, place, score, n_valid, ancestry_out)
    depth = 0 if ancestry is None else ancestry.shape[1]
    operands = (
        *at, *(one.data_ptr() for one in of[:3]), _address(ancestry), *map(_address, outputs), depth, codes, stride,
        shape.chunks, *given,
    )  # fmt: skip
    if count:
        tail = _kernel("tail", device, made.tail, definitions, shape.memory)
        room = (shape.places, shape.room, shape.scores, shape.lines, shape.keys, of.most)
        tail.launch(count * shape.cluster, 1024, *operands, *room, early=early and limits(device.index or 0)[0])
    return Launched(row, code, place, score, n_valid, bad, broken, rank)


def _kernel(name: str, device: torch.device, define: dict[str, Any], definitions: str, memory: int = 0) -> Kernel:
    if not definitions:
        return cuda.load(SOURCE, name, device, memory=memory, **define)
    return cuda.entry(Build.of(SOURCE, **define)._replace(given=definitions), name, device, memory=memory)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _given(ranked: Ranked) -> tuple[int, ...]:
    """What an expression reads, as ranked.cuh takes it."""
    absent = [0] * (MOST_COLUMNS - len(ranked.columns))
    pointers = [one.data_ptr() for one in ranked.columns]
    strides = [one.stride(0) for one in ranked.columns]
    return ranked.values.data_ptr(), *pointers, *absent, *strides, *absent
