"""Which algorithm multiplies: cuBLASLt's heuristics name up to a dozen for a shape, torch takes their first, and on an
H200 the quickest is another one, up to a fifth quicker.

Chosen by measurement, once a process and shape, before anything is served: by as many rows as a step can have, random
numbers (a GPU at its power limit is slower by them than by zeros), sets of operands that no cache holds, in graphs as
steps are, after some work without rest (a rested GPU ranks them otherwise), in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from statistics import median
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from app.ops.product import lt
from app.ops.product.lt import Algorithm
from app.ops.product.reference import Scales, multiply
from app.ops.product.table import LEAST, TABLE, Chosen, Key, Table

T = TypeVar("T")
WORKSPACES: Final = (0, 32 << 20)
"""Bytes that an algorithm may need: asked for those without first. torch gives as many."""
GAIN: Final = 0.98
"""An algorithm that takes more than this part of torch's time is not taken."""
REST_S, LAP_MS = 0.3, 1.5
"""Seconds of work before a shape's first lap, and what a lap takes at least."""
SETS, BYTES, LAUNCHES = 3, 1 << 30, 6
"""Sets of operands, as far as they fit in so many bytes; products of a graph."""
FIRST, KEPT, THEN = 2, 4, 5
"""Rounds of all; how many of them are looked at again, and in how many rounds."""
CLOSE: Final = 2e-2
"""An algorithm whose result is further from torch's, of its largest number, is not taken."""

_EIGHT: Final = 256.0
"""What numbers are multiplied by to use the range of 8 bits."""


class Choice(NamedTuple):
    """What was found for products of a shape. at: rows that were measured; before, now: milliseconds of torch's
    algorithm and of the chosen one there (equal where torch's stays); seconds: what finding it took."""

    key: Key
    chosen: Chosen
    at: int
    before: float = 0.0
    now: float = 0.0
    seconds: float = 0.0

    def document(self) -> dict[str, object]:
        """For a log. from_rows: None where torch's algorithm stays."""
        key, chosen = self.key, self.chosen
        return {
            "outputs": key.m, "inputs": key.k, "dtype": str(key.dtype).removeprefix("torch."), "onto": key.onto,
            "rows": self.at, "from_rows": None if chosen.algorithm is None else chosen.rows,
            "us_before": round(1e3 * self.before, 1), "us": round(1e3 * self.now, 1),
        }  # fmt: skip


def choose(runs: Iterable[Callable[[], object]], table: Table = TABLE) -> tuple[Choice, ...]:
    """Choose for whatever `runs` multiply that was not chosen for before. While nothing else uses the GPU.

    runs  do what will be served, by the most rows that it can have
    """
    if lt.library() is None:
        return ()
    try:
        with table.noting() as wanted:
            for run in runs:
                run()
    except torch.cuda.OutOfMemoryError:
        return ()  # whoever needs the memory will say so
    found: list[Choice] = []
    for key, rows in wanted.items():
        began = time.monotonic()
        choice = _measured(key, rows, _stream(key.device))
        table.put(key, choice.chosen)
        found.append(choice._replace(seconds=time.monotonic() - began))
    torch.cuda.empty_cache()
    return tuple(found)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """One for all: what torch's products compute in is held for each."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _measured(key: Key, rows: int, stream: torch.cuda.Stream) -> Choice:
    try:
        bench = Bench(key, rows, stream)
        ways = bench.ways()
        bench.work(ways[0], REST_S)
        best, times = quickest(ways, bench.lap)
        algorithm = ways[best].algorithm
        least = LEAST if algorithm is None else from_rows(rows, lambda n: _gains(Bench(key, n, stream), algorithm))
    except (torch.cuda.OutOfMemoryError, lt.Failed):  # before CUDA 12.9 cuBLASLt has no scales of rows; torch has
        return Choice(key, Chosen(None), rows)
    return Choice(key, Chosen(algorithm, least), rows, times[0], times[best])


def quickest(ways: Sequence[T], lap: Callable[[T], float]) -> tuple[int, dict[int, float]]:
    """The place of the quickest, and the medians of those that were looked at twice: the first one is among them, and
    wins unless another gains something."""
    numbers = range(len(ways))
    first = _laps(numbers, ways, lap, FIRST)
    again = sorted(numbers, key=lambda one: first[one])[:KEPT]
    times = _laps(sorted({0, *again}), ways, lap, THEN)
    best = min(times, key=lambda one: times[one])
    return (best if times[best] < GAIN * times[0] else 0), times


def _laps(numbers: Sequence[int], ways: Sequence[T], lap: Callable[[T], float], rounds: int) -> dict[int, float]:
    """Medians, in turns: what slows the GPU down for a while slows all."""
    found: dict[int, list[float]] = {one: [] for one in numbers}
    for _ in range(rounds):
        for one in numbers:
            found[one].append(lap(ways[one]))
    return {one: median(times) for one, times in found.items()}


def from_rows(most: int, gains: Callable[[int], bool]) -> int:
    """From how many rows on something gains that does by `most`: looked at by powers of two, downwards."""
    least, rows = most, 1 << (most - 1).bit_length() - 1
    while rows >= LEAST and gains(rows):
        least, rows = rows, rows // 2
    return least


def _gains(bench: Bench, algorithm: Algorithm) -> bool:
    """Whether an algorithm is no slower than torch's."""
    ways = bench.ways([algorithm])
    times = _laps(range(len(ways)), ways, bench.lap, THEN)
    return len(ways) == 2 and times[1] <= times[0]


class Way(NamedTuple):
    """A way to multiply LAUNCHES times. algorithm: None for torch's; replays: of a lap."""

    algorithm: Algorithm | None
    graph: torch.cuda.CUDAGraph
    replays: int


class Bench:
    """Operands of a shape, and the time that ways to multiply them take."""

    def __init__(self, key: Key, rows: int, stream: torch.cuda.Stream) -> None:
        self._key, self._device, self._stream = key, torch.device("cuda", key.device), stream
        self._pool = torch.cuda.graph_pool_handle()
        self._random = torch.Generator(self._device).manual_seed(0)
        m, k, eight = key.m, key.k, key.dtype == torch.float8_e4m3fn
        size = rows * (k * key.dtype.itemsize + 2 * m)
        sets = max(1, min(SETS, BYTES // size))
        self._weight = self._operand(m, k)
        self._xs = [self._operand(rows, k) for _ in range(sets)]
        out = torch.bfloat16 if eight else key.dtype
        self._outs = [self._numbers(rows, m).to(out) for _ in range(sets)]
        self._scales = Scales(self._scale(rows), self._scale(m)) if eight else None
        self._product = lt.product(lt.Shape(key.device, key.dtype, rows, m, k, k, k, m))

    def ways(self, algorithms: Sequence[Algorithm] | None = None) -> list[Way]:
        """torch's own, then those of some algorithms (of all that the heuristics name) that give what it gives."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            torch.cuda.synchronize(self._device)
            if algorithms is None:
                named = [one for most in WORKSPACES for one in self._product.algorithms(most)]
                algorithms = tuple(dict.fromkeys(named))
            begin = self._outs[0].clone()
            self._multiply(None, 0)
            expected = self._ends()
            good = [None, *(one for one in algorithms if self._right(one, begin, expected))]
            return [self._way(one) for one in good]

    def work(self, way: Way, seconds: float) -> None:
        """Multiply without rest."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.lap(way)

    def lap(self, way: Way) -> float:
        """Milliseconds of a product."""
        return self._lap(way.graph, way.replays)

    def _lap(self, graph: torch.cuda.CUDAGraph, replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / replays / LAUNCHES

    def _right(self, algorithm: Algorithm, begin: Tensor, expected: Tensor) -> bool:
        self._outs[0].copy_(begin)
        try:
            self._multiply(algorithm, 0)
        except lt.Failed:
            return False
        return bool((self._ends() - expected).abs().max() <= CLOSE * expected.abs().max())

    def _ends(self) -> Tensor:
        """The first and the last rows of a result, in float32."""
        return torch.cat([self._outs[0][:LEAST], self._outs[0][-LEAST:]]).float()

    def _way(self, algorithm: Algorithm | None) -> Way:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            for number in range(LAUNCHES):
                self._multiply(algorithm, number % len(self._xs))
        except BaseException:
            with suppress(RuntimeError):  # it would hide what went wrong: no memory, say
                graph.capture_end()
            raise
        graph.capture_end()
        graph.replay()  # the first takes longer
        once = self._lap(graph, 1) * LAUNCHES
        return Way(algorithm, graph, max(1, round(LAP_MS / once)))

    def _multiply(self, algorithm: Algorithm | None, number: int) -> None:
        out, x = self._outs[number], self._xs[number]
        if algorithm is None:
            multiply(out, x, self._weight, self._scales, onto=self._key.onto)
            return
        places = None if self._scales is None else (self._scales.x.data_ptr(), self._scales.weight.data_ptr())
        operands = (x.data_ptr(), self._weight.data_ptr(), out.data_ptr())
        self._product.launch(algorithm, *operands, onto=self._key.onto, scales=places)

    def _operand(self, rows: int, columns: int) -> Tensor:
        """Numbers of which a product of k is about 1."""
        kind, numbers = self._key.dtype, self._numbers(rows, columns).mul_(self._key.k**-0.25)
        return (numbers * _EIGHT).clamp_(-448, 448).to(kind) if kind == torch.float8_e4m3fn else numbers.to(kind)

    def _numbers(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._random, dtype=torch.bfloat16, device=self._device)

    def _scale(self, size: int) -> Tensor:
        return torch.full((size,), 1 / _EIGHT, device=self._device)
