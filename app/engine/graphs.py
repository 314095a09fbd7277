"""Decode steps as CUDA graphs (RecoGEM 4.1): captured off the request path, replayed on it.

A graph belongs to a weight slot, an arena, a step, a number of rows and whether `log_norm` is asked for. It holds the
decode of that step only, and no address but those of the slot, the arena, the static inputs here and the family's own
constants: another vocab or policy captures nothing, and weights that are read into a slot again find its graphs there.

Numbers of rows are rounded up to buckets at most an eighth apart. Pad rows are of no request (`row_start` ends before
them), have slots of their own behind the others', and hold what an earlier batch left: codes of that step's table,
slots of that arena, all of them numbers that may be looked up. Nobody reads what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from app.config import Limits
from app.core import Arena, Rows, StepOutput
from app.engine.captures import Captures, Recorder, Taken, Turn
from app.engine.engine import Engine


class Shape(NamedTuple):
    """What a graph is captured for: step t, a bucket of rows, and whether `log_norm` is computed."""

    t: int
    rows: int
    full: bool


def bucket(rows: int, most: int) -> int:
    """What a step of `rows` <= most rows is padded to: eight buckets in each doubling, and every number up to 16."""
    unit = 1 << max(0, (rows - 1).bit_length() - 4)
    return min(-(-rows // unit) * unit, most)


def buckets(most: int) -> Iterator[int]:
    """Every bucket up to `most` rows, ascending."""
    rows = 0
    while rows < most:
        rows = bucket(rows + 1, most)
        yield rows


def most_rows(limits: Limits, sizes: Sequence[int]) -> tuple[int, ...]:
    """The most rows of a batch that enter step t, t = 1..L, whatever its policies: known from the limits alone."""
    width, found = 1, []
    for widest, codes in zip(limits.widths, sizes, strict=True):
        found.append(min(limits.rows, limits.batch * width))
        width = min(widest, width * codes)
    return tuple(found)


def plan(limits: Limits, sizes: Sequence[int], *, first: int, log_norm: bool) -> tuple[Shape, ...]:
    """Every shape that the limits allow, the largest first, so that smaller ones find their memory in the pool.

    sizes     C_1..C_L · first: the first step that decodes (2 where `encode` gives step 1)
    log_norm  whether the family gives it; then every bucket has a graph with and one without
    """
    shapes = [
        Shape(t, rows, full)
        for t, most in enumerate(most_rows(limits, sizes), 1)
        if t >= first
        for rows in buckets(most)
        for full in ((False, True) if log_norm else (False,))
    ]
    return tuple(sorted(shapes, key=lambda shape: (-shape.rows, shape.t, not shape.full)))


class StaticRows:
    """What graphs read of a batch, at fixed addresses."""

    def __init__(self, most: Sequence[int], requests: int, device: torch.device) -> None:
        """most: rows of each step · requests: of a batch, at most."""
        with torch.inference_mode(mode=False):
            self._codes = [torch.zeros(rows, dtype=torch.int32, device=device) for rows in most]
            self._ancestry = [torch.zeros(rows, t, dtype=torch.int32, device=device) for t, rows in enumerate(most)]
            self._request = torch.zeros(max(most), dtype=torch.int32, device=device)
            self._row_start = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        self._held: tuple[Tensor, Tensor] | None = None

    def view(self, shape: Shape) -> Rows:
        """The rows of a graph."""
        at, n = shape.t - 1, shape.rows
        return Rows(
            self._codes[at][:n], self._request[:n], self._row_start, self._ancestry[at][:n], compact=False,
            full=shape.full,
        )  # fmt: skip

    def fill(self, t: int, rows: Rows) -> None:
        """Copy the rows of step t in; requests that a batch does not have get no rows. Whose rows they are is there
        already where the same two tensors said so the last time: nobody writes them."""
        n, starts = rows.codes.shape[0], rows.row_start.shape[0]
        into, given = [self._codes[t - 1][:n]], [rows.codes]
        if t > 1:
            into.append(self._ancestry[t - 1][:n])
            given.append(rows.ancestry)
        if self._held is None or rows.request is not self._held[0] or rows.row_start is not self._held[1]:
            into += [self._request[:n], self._row_start[:starts]]
            given += [rows.request, rows.row_start]
            self._row_start[starts:].fill_(n)
        torch._foreach_copy_(into, given)
        self._held = rows.request, rows.row_start


class Graphs:
    """The captured steps over one arena (one lane of one contract). `prepare` off the request path, by one thread at a
    time; `step` by the thread that computes."""

    def __init__(
        self,
        arena: Arena,
        limits: Limits,
        sizes: Sequence[int],
        device: torch.device,
        recorder: Recorder,
        turn: Turn = nullcontext,
        steps: range | None = None,
    ) -> None:
        """turn: what each capture happens in · steps: those that are replayed over this arena; None: all."""
        self._arena, self._limits, self._sizes = arena, limits, tuple(sizes)
        self._steps = range(1, len(sizes) + 1) if steps is None else steps
        self._most = most_rows(limits, sizes)
        self._rows = StaticRows(self._most, limits.batch, device)
        self._captures = Captures(recorder, self._runs, turn)

    def prepare(self, engine: Engine) -> Taken:
        """Have a graph for every shape of an engine's steps; see `Captures.prepare`."""
        return self._captures.prepare(engine)

    def largest(self, engine: Engine) -> Iterator[Callable[[], StepOutput]]:
        """Each step by the most rows that it can have. They write the arena."""
        for t in self._steps:
            if t >= engine.first_step:
                yield partial(engine.step, t, self._rows.view(Shape(t, self._most[t - 1], full=False)), self._arena)

    def _runs(self, engine: Engine, _fresh: bool) -> Iterator[tuple[Shape, Callable[[], StepOutput | None]]]:
        for shape in plan(self._limits, self._sizes, first=engine.first_step, log_norm=engine.log_norm):
            if shape.t in self._steps:
                yield shape, partial(engine.step, shape.t, self._rows.view(shape), self._arena)

    def step(self, engine: Engine, t: int, rows: Rows) -> StepOutput | None:
        """`Engine.step` by a graph, for the planned rows of the arena; None where there is none for these rows.

        The output is overwritten by the next step.
        """
        n = rows.codes.shape[0]
        if rows.compact or not 0 < n <= self._most[t - 1]:
            return None
        key = Shape(t, bucket(n, self._most[t - 1]), rows.full and engine.log_norm)
        recorded = self._captures.of(engine).get(key)
        if recorded is None:
            return None
        self._rows.fill(t, rows)
        recorded.replay()
        assert recorded.output is not None, "a step has logits"
        return first_rows(n, recorded.output)


def first_rows(n: int, output: StepOutput) -> StepOutput:
    """The first n rows."""
    logits, log_norm, heads = output
    norm = None if log_norm is None else log_norm[:n]
    return StepOutput(logits[:n], norm, {name: head[:n] for name, head in heads.items()})
