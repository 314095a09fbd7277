"""Which kernels a deployment can come to launch: all of them can then be made before the first request, or elsewhere.

What is named here may be more than a deployment uses, and never less: `tests/ops/test_builds.py` compares it with what
the launches ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import torch

from app.ops.attention import context
from app.ops.attention import launch as attention
from app.ops.cuda import Build, files
from app.ops.gated import product as gated
from app.ops.gdn import launch as gdn
from app.ops.selection.geometry import DEEPEST, STATIC, Geometry, candidates, first_cluster, fitted
from app.ops.selection.launch import NORMS, SOURCE, TYPES, defines, ranked_builds

_OPS: Final = Path(__file__).parent


class Gpu(NamedTuple):
    """What a layout depends on: bytes of shared memory that a block may have, that a processor has, and whether blocks
    can share theirs (CUDA programming guide, "Technical Specifications per Compute Capability")."""

    block: int
    processor: int
    clusters: bool


GPUS: Final = {
    "sm_80": Gpu(163 << 10, 164 << 10, clusters=False),
    "sm_86": Gpu(99 << 10, 100 << 10, clusters=False),
    "sm_89": Gpu(99 << 10, 100 << 10, clusters=False),
    "sm_90": Gpu(227 << 10, 228 << 10, clusters=True),
    "sm_100": Gpu(227 << 10, 228 << 10, clusters=True),
    "sm_120": Gpu(99 << 10, 100 << 10, clusters=True),
}
"""The architectures that kernels are made for."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a deployment computes with.

    dtype   of the model's logits and keys · heads: the head dims of its prefixes · positions: of the longest prefix
    delta   (K, V) of its Gated DeltaNet layers
    sizes   C_1..C_L · width: widest rows or survivors of a request · batch: requests of a batch
    eight   whether projections are in 8 bits
    """

    dtype: torch.dtype
    heads: frozenset[int]
    delta: frozenset[tuple[int, int]]
    sizes: tuple[int, ...]
    width: int
    batch: int
    eight: bool = False
    positions: int = 1


def needed(needs: Needs, arch: str) -> tuple[Build, ...]:
    """Every module that `needs` can come to, for an architecture of `GPUS`."""
    bf16 = int(needs.dtype == torch.bfloat16)
    found: list[Build] = []
    if needs.dtype != torch.float32:
        for dim in sorted(needs.heads):
            if attention.shape_unfit(dim, 1) is None:
                found += [Build.of(_OPS / "attention" / "kernel.cu", D=dim, BF16=bf16)]
            if context.shape_unfit(dim, arch) is None:
                found += [Build.of(context.SOURCE, context.ARCH, D=dim, BF16=bf16)]
        for k, v in sorted(needs.delta):
            found += _replay(k, v, bf16, arch) if gdn.shape_unfit(k, v) is None else ()
        found += [Build.of(_OPS / name / "kernel.cu", BF16=bf16) for name in ("gated", "grouped")]
        if arch == "sm_90":
            found += [Build.of(gated.SOURCE, gated.ARCH, BF16=bf16)]
        found += [Build.of(_OPS / "norm" / "kernel.cu", BF16=bf16, PIECES=pieces) for pieces in (1, 2, 4, 8, 16)]
        if needs.delta:
            found += [Build.of(_OPS / "gdn" / "around.cu", BF16=bf16, J=size) for size in (2, 3, 4)]
    if needs.eight:
        found += [Build.of(_OPS / "fp8" / "kernel.cu")]
    for wide in (0, 1):
        found += [Build.of(_OPS / "trie" / "kernel.cu", WIDE=wide)]
        found += [Build.of(_OPS / "selection" / "candidates.cu", WIDE=wide)]
    found += [Build.of(_OPS / "selection" / "radix.cu", CUT=cut) for cut in (0, 1)]
    found += [Build.of(_OPS / "transition" / "kernel.cu")]
    found += _selection(needs, GPUS[arch])
    return tuple(dict.fromkeys(found))


def by_torch(needs: Needs, arch: str) -> dict[str, str]:
    """The operators that torch computes although there are kernels for other shapes or architectures: why, by name.
    Empty in float32, where no model has kernels."""
    if needs.dtype == torch.float32:
        return {}
    reasons = [("prefix attention", attention.shape_unfit(d, needs.positions)) for d in sorted(needs.heads)]
    reasons += [("context attention", context.shape_unfit(d, arch)) for d in sorted(needs.heads)]
    reasons += [("replay of records", gdn.shape_unfit(k, v)) for k, v in sorted(needs.delta)]
    found: dict[str, str] = {}
    for name, reason in reasons:
        if reason is not None:
            found[name] = f"{found[name]}; {reason}" if name in found else reason
    return found


def _replay(k: int, v: int, bf16: int, arch: str) -> Iterator[Build]:
    """`gdn/kernel.cu` as `gdn.launch` chooses it; either dtype of the output."""
    cut = gdn.blocks(k, GPUS[arch].processor, wgmma=arch == "sm_90")
    for out32 in (0, 1):
        how = {"K": k, "V": v, "BF16": bf16, "OUT32": out32, **cut.defines}
        yield Build.of(_OPS / "gdn" / "kernel.cu", "sm_90a" if cut.wgmma else "", **how)


def _selection(needs: Needs, gpu: Gpu) -> Iterator[Build]:
    """`chunk.cu` over logits, by any policy that follows them, and over float32 ranks of any number of columns."""
    kind = TYPES[needs.dtype]
    scored = [(1, NORMS["none"]), *((2, norm) for norm in sorted(set(NORMS.values())))]
    for codes in sorted(set(needs.sizes)):
        whole = codes * needs.dtype.itemsize % 16 == 0
        for shape in _shapes(needs, codes, needs.dtype.itemsize, gpu):
            for (score, norm), mask in product(scored, (False, True)):
                yield from _built(kind, score, norm, shape, mask=mask, whole=whole)
    deepest = _shapes(needs, max(needs.sizes), 4, gpu, most=max(needs.width, DEEPEST))
    for shape, whole in product(deepest, (False, True)):
        yield from _built(TYPES[torch.float32], 0, 0, shape, mask=False, whole=whole)


def of_expressions(needs: Needs, arch: str, steps: Iterable[tuple[int, str, str]]) -> tuple[Build, ...]:
    """The modules of `selection.select_ranked` for steps of policies: their codes, what they normalise over ("step",
    "given", "valid", "none"), and their definitions."""
    found: list[Build] = []
    for codes, normalize, definitions in dict.fromkeys(steps):
        whole = codes * needs.dtype.itemsize % 16 == 0
        for shape in _shapes(needs, codes, needs.dtype.itemsize, GPUS[arch]):
            found += ranked_builds(TYPES[needs.dtype], normalize, shape, whole=whole, definitions=definitions)
    return tuple(dict.fromkeys(found))


def _built(kind: int, score: int, norm: int, shape: Geometry, *, mask: bool, whole: bool) -> Iterator[Build]:
    for define in defines(kind, score, norm, shape, mask=mask, whole=whole):
        yield Build.of(SOURCE, **define)


def _shapes(needs: Needs, codes: int, itemsize: int, gpu: Gpu, most: int = 0) -> Iterator[Geometry]:
    """The layouts that `geometry` can give for at most `codes` columns, rows of at most `width`, as many survivors or
    `most`, and any number of requests. A layout that fits the largest fits all: those behind it in the order are never
    asked."""
    firsts = {first_cluster(count, clusters=gpu.clusters) for count in range(1, needs.batch + 1)}
    for first in sorted(firsts):
        for shape in candidates(codes, itemsize, first, small=True, clusters=gpu.clusters):
            yield shape
            if not shape.small and fitted(shape, needs.width, most or needs.width, gpu.block - STATIC) is not None:
                break


def sources(made: Sequence[Build]) -> tuple[Path, ...]:
    """The files that builds are made of, parts of sources among them, sorted."""
    return tuple(sorted({file for source in {build.source for build in made} for file in files(source)}))
