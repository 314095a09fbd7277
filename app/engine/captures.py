"""Work of an engine as CUDA graphs, whatever it is: captured off the request path, found again by its weight slot.

A graph holds no address but those of the slot, of memory that outlives it and of the family's own constants: another
vocab or policy captures nothing, and weights that are read into a slot again find its graphs there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from app.core import StepOutput
from app.engine.engine import Engine
from app.errors import Rejected
from app.ops.product import Choice

KEPT = 8
"""Slots whose graphs are kept although no engine in memory uses them."""
SPARE = 64 << 20
"""Bytes that stay free beside another slot's graphs."""
K = TypeVar("K")
Turn = Callable[[], AbstractContextManager[None]]
Runs = Callable[[Engine, bool], Iterator[tuple[K, Callable[[], StepOutput | None]]]]
"""What an engine computes, by a key each: the largest first, so that smaller ones find their memory in the pool. With
True each is run once before the next one is asked for, and no batch runs over the same memory meanwhile."""


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
    """Something captured. `output` has a fixed place: the next replay of any graph of its recorder writes over it."""

    @property
    def output(self) -> StepOutput | None:
        """Of everything that it was captured for."""

    def replay(self) -> None:
        """Compute it from what the inputs hold now; does not wait for it."""


class Recorder(Protocol):
    """Captures what is launched."""

    def record(self, run: Callable[[], StepOutput | None], *, fresh: bool) -> Recorded:
        """What `run` launches. fresh: run it once before, which loads and compiles kernels; it writes the arena.

        Raises Rejected("no_memory" | "capture_failed").
        """

    def used(self) -> int:
        """Bytes of the device's memory that are in use."""

    def free(self) -> int:
        """Bytes of it that are not."""

    def end(self, *, fresh: bool) -> None:
        """All that was to be recorded now is."""


@dataclass(frozen=True, slots=True)
class _Set(Generic[K]):
    """The graphs over one slot, and the family's constants that they were captured with and read."""

    constants: Mapping[str, Tensor]
    by_key: Mapping[K, Recorded]

    def fits(self, engine: Engine) -> bool:
        """Whether an engine at the same addresses has the same constants."""
        own, held = engine.constants(), self.constants
        if {name: _kind(one) for name, one in own.items()} != {name: _kind(one) for name, one in held.items()}:
            return False
        others = [(one, held[name]) for name, one in own.items() if one is not held[name]]
        if not others:  # the module is used again
            return True
        with _beside(engine.device):  # and one answer for all: in line with the batches, each would wait for them
            return bool(torch.stack([torch.eq(one, other).all() for one, other in others]).all())


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _beside(device: torch.device) -> AbstractContextManager[object]:
    """Where what was made before is looked at without waiting for what else a GPU has to do."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class Captures(Generic[K]):
    """The captures of one kind of work over memory of its own. `prepare` off the request path, by one thread at a time;
    `of` by the thread that computes."""

    def __init__(self, recorder: Recorder, runs: Runs[K], turn: Turn = nullcontext) -> None:
        """turn: what each capture happens in."""
        self._recorder, self._runs, self._turn = recorder, runs, turn
        self._sets: dict[tuple[int, ...], _Set[K]] = {}
        self._bound: WeakKeyDictionary[Engine, _Set[K]] = WeakKeyDictionary()
        self._fresh = True
        self._cost = 0

    def of(self, engine: Engine) -> Mapping[K, Recorded]:
        """What an engine was prepared for; empty where it was not."""
        known = self._bound.get(engine)
        return known.by_key if known is not None else {}

    def prepare(self, engine: Engine) -> Taken:
        """Have a graph for each of an engine's runs: those of its slot where they are there already.

        The first time kernels are run once each, which writes the memory; later nothing runs, and batches may go on.
        Work that reads something back from the device while it runs cannot be captured: `Taken.refused`. Raises
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
        return Taken(len(made.by_key), time.monotonic() - began, self._cost)

    def _captured(self, engine: Engine) -> _Set[K]:
        fresh, self._fresh = self._fresh, False
        made: dict[K, Recorded] = {}
        try:
            for key, run in self._runs(engine, fresh):
                with self._turn():
                    made[key] = self._recorder.record(run, fresh=fresh)
        finally:
            self._recorder.end(fresh=fresh)
        return _Set(engine.constants(), made)

    def _trim(self) -> None:
        """Let graphs go whose slots nobody uses, oldest first, once there are many."""
        used = {id(one) for one in self._bound.values()}
        idle = [addresses for addresses, one in self._sets.items() if id(one) not in used]
        for addresses in idle[: max(0, len(self._sets) - KEPT)]:
            del self._sets[addresses]
