"""Decode steps as CUDA graphs (RecoGEM 4.1): captured off the request path, replayed on it.

A graph belongs to a weight slot, an arena, a step, a number of rows and whether `log_norm` is asked for. It holds the
decode of that step only, and no address but those of the slot, the arena, the static inputs here and the family's own
constants: another vocab or policy captures nothing, and weights that are read into a slot again find its graphs there.

Numbers of rows are rounded up to buckets at most an eighth apart. Pad rows are of no request (`row_start` ends before
them), have slots of their own behind the others', and hold what an earlier batch left: codes of that step's table,
slots of that arena, all of them numbers that may be looked up. Nobody reads what they compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from app.config import Limits
from app.core import Arena, Rows, StepOutput
from app.engine.engine import Engine
from app.errors import Rejected
from app.ops.product import Choice

KEPT = 8
"""Slots whose graphs are kept although no engine in memory uses them."""
SPARE = 64 << 20
"""Bytes that stay free beside another slot's graphs."""


class Shape(NamedTuple):
    """What a graph is captured for: step t, a bucket of rows, and whether `log_norm` is computed."""

    t: int
    rows: int
    full: bool


class Taken(NamedTuple):
    """What a capture cost: new graphs, seconds, and bytes of the device's memory. refused: why an engine's steps cannot
    be captured and run as they are; None where they can. choices: algorithms of products that were chosen before."""

    graphs: int = 0
    seconds: float = 0.0
    bytes: int = 0
    refused: str | None = None
    choices: tuple[Choice, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Taken]) -> Taken:
        """Captures one after the other."""
        refused = next((one.refused for one in parts if one.refused is not None), None)
        graphs, size = sum(one.graphs for one in parts), sum(one.bytes for one in parts)
        return cls(graphs, sum(one.seconds for one in parts), size, refused)


class Recorded(Protocol):
    """A captured step. `output` has a fixed place, overwritten by the next replay of any graph of the same recorder."""

    @property
    def output(self) -> StepOutput:
        """Of all rows of the bucket."""

    def replay(self) -> None:
        """Compute it from what the inputs hold now; does not wait for it."""


class Recorder(Protocol):
    """Captures what is launched."""

    def record(self, run: Callable[[], StepOutput], *, fresh: bool) -> Recorded:
        """What `run` launches. fresh: run it once before, which loads and compiles kernels; it writes the arena.

        Raises Rejected("no_memory" | "capture_failed").
        """

    def used(self) -> int:
        """Bytes of the device's memory that are in use."""

    def free(self) -> int:
        """Bytes of it that are not."""

    def end(self, *, fresh: bool) -> None:
        """All that was to be recorded now is."""


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


@dataclass(frozen=True, slots=True)
class _Set:
    """The graphs over one slot, and the family's constants that they were captured with and read."""

    constants: Mapping[str, Tensor]
    by_shape: Mapping[Shape, Recorded]

    def fits(self, engine: Engine) -> bool:
        """Whether an engine at the same addresses has the same constants."""
        own, held = engine.constants(), self.constants
        if {name: _kind(one) for name, one in own.items()} != {name: _kind(one) for name, one in held.items()}:
            return False
        with _beside(engine.device):  # and one answer for all: in line with the batches, each would wait for them
            same = [torch.eq(one, held[name]).all() for name, one in own.items()]
            return not same or bool(torch.stack(same).all())


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _beside(device: torch.device) -> AbstractContextManager[object]:
    """Where what was made before is looked at without waiting for what else a GPU has to do."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


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
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
        steps: range | None = None,
    ) -> None:
        """turn: what each capture happens in · steps: those that are replayed over this arena; None: all."""
        self._arena, self._limits, self._sizes, self._recorder = arena, limits, tuple(sizes), recorder
        self._turn, self._steps = turn, range(1, len(sizes) + 1) if steps is None else steps
        self._most = most_rows(limits, sizes)
        self._rows = StaticRows(self._most, limits.batch, device)
        self._sets: dict[tuple[int, ...], _Set] = {}
        self._bound: WeakKeyDictionary[Engine, _Set] = WeakKeyDictionary()
        self._fresh = True
        self._cost = 0

    def prepare(self, engine: Engine) -> Taken:
        """Have a graph for every shape of an engine's steps: those of its slot where they are there already.

        Before the first batch over the arena kernels are run once each; later nothing runs, and batches may go on.
        Steps that read something back from the device while they run cannot be captured: `Taken.refused`. Raises
        Rejected("no_memory").
        """
        if engine in self._bound:
            return Taken()
        known = self._sets.get(engine.addresses)
        if known is not None and known.fits(engine):
            self._bound[engine] = known
            return Taken()
        if self._cost and self._cost + SPARE > self._recorder.free():
            # found out in the middle, it would be the batches beside it that find no memory
            message = f"{self._cost >> 20} MiB are needed for CUDA graphs, {self._recorder.free() >> 20} MiB are free"
            raise Rejected("no_memory", message, location="deployment.toml: limits")
        began, used = time.monotonic(), self._recorder.used()
        try:
            made = self._captured(engine)
        except Rejected as error:
            if error.code != "capture_failed":
                raise
            return Taken(refused=error.message)
        self._sets[engine.addresses] = self._bound[engine] = made
        self._trim()
        self._cost = max(0, self._recorder.used() - used)
        return Taken(len(made.by_shape), time.monotonic() - began, self._cost)

    def largest(self, engine: Engine) -> Iterator[Callable[[], StepOutput]]:
        """Each step by the most rows that it can have. They write the arena."""
        for t in self._steps:
            if t >= engine.first_step:
                yield partial(engine.step, t, self._rows.view(Shape(t, self._most[t - 1], full=False)), self._arena)

    def _captured(self, engine: Engine) -> _Set:
        fresh, self._fresh = self._fresh, False
        made: dict[Shape, Recorded] = {}
        try:
            for shape in plan(self._limits, self._sizes, first=engine.first_step, log_norm=engine.log_norm):
                if shape.t not in self._steps:
                    continue
                run = partial(engine.step, shape.t, self._rows.view(shape), self._arena)
                with self._turn():
                    made[shape] = self._recorder.record(run, fresh=fresh)
        finally:
            self._recorder.end(fresh=fresh)
        return _Set(engine.constants(), made)

    def _trim(self) -> None:
        """Let graphs go whose slots nobody uses, oldest first, once there are many."""
        used = {id(one) for one in self._bound.values()}
        idle = [addresses for addresses, one in self._sets.items() if id(one) not in used]
        for addresses in idle[: max(0, len(self._sets) - KEPT)]:
            del self._sets[addresses]

    def step(self, engine: Engine, t: int, rows: Rows) -> StepOutput | None:
        """`Engine.step` by a graph, for the planned rows of the arena; None where there is none for these rows.

        The output is overwritten by the next step.
        """
        known, n = self._bound.get(engine), rows.codes.shape[0]
        if known is None or rows.compact or not 0 < n <= self._most[t - 1]:
            return None
        recorded = known.by_shape.get(Shape(t, bucket(n, self._most[t - 1]), rows.full and engine.log_norm))
        if recorded is None:
            return None
        self._rows.fill(t, rows)
        recorded.replay()
        logits, log_norm, heads = recorded.output
        norm = None if log_norm is None else log_norm[:n]
        return StepOutput(logits[:n], norm, {name: head[:n] for name, head in heads.items()})
