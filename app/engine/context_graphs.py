"""Context stages as CUDA graphs: what a family launches for the inputs of a batch is one launch.

Inputs lie end to end, so a graph is captured for numbers of positions. A batch is padded to the next of them by one
request more, whose inputs are what earlier batches left; requests that a batch does not have are without positions. To
the family all of it is an ordinary batch of limits.batch + 1 requests, but that the last one may have more positions
than requests have. Nobody reads what it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from app.config import Limits
from app.core import Arena, Inputs, InputSpec, Ragged, StepOutput
from app.engine.captures import Captures, Recorder, Taken, Turn
from app.engine.engine import Engine
from app.engine.graphs import buckets, first_rows
from app.ops.upload import upload_into

PADS: Final = 1
"""Requests more than limits.batch that the memory must have room for."""
UNIT: Final = 16
"""One input's numbers of positions are multiples of it, where a request may have so many."""
Positions = tuple[int, ...]
"""How many of each input."""


def padded(total: int, longest: int, most: int) -> int:
    """What `total` positions of the only input are computed with: at most an eighth more, and fewer than one request,
    of `longest` positions, can have. most: of a whole batch."""
    unit = min(max(UNIT, 1 << max(0, (total - 1).bit_length() - 4)), longest)
    return min(-(-total // unit) * unit, most)


def shapes(positions: Sequence[int], batch: int) -> tuple[Positions, ...]:
    """Every shape that a batch can be padded to, the smallest first. Several inputs are padded to what one number of
    requests could have of each: others would be too many. positions: of one request, by input"""
    if len(positions) > 1:
        return tuple(tuple(requests * most for most in positions) for requests in buckets(batch))
    longest, found = positions[0], [0]
    while found[-1] < batch * longest:
        found.append(padded(found[-1] + 1, longest, batch * longest))
    return tuple((one,) for one in found[1:])


class ContextGraphs:
    """The captured context stages over one lane's own memory. `prepare` off the request path, by one thread at a time;
    `encode` by the thread that computes."""

    def __init__(
        self,
        arena: Arena,
        limits: Limits,
        specs: Sequence[InputSpec],
        device: torch.device,
        recorder: Recorder,
        turn: Turn = nullcontext,
    ) -> None:
        """arena: the state of limits.batch + PADS requests · specs: the family's inputs · turn: of each capture."""
        self._arena, self._specs, self._batch = arena, specs, limits.batch
        self._shapes = shapes([spec.positions for spec in specs], limits.batch)
        with torch.inference_mode(mode=False):
            self._values = [
                torch.zeros(most, *spec.shape, dtype=spec.dtype, device=device)
                for spec, most in zip(specs, self._shapes[-1], strict=True)
            ]
            self._start = torch.zeros(len(specs), limits.batch + PADS + 1, dtype=torch.int32, device=device)
        self._captures = Captures(recorder, self._runs, turn)

    def prepare(self, engine: Engine) -> Taken:
        """Have a graph for every shape; see `Captures.prepare`."""
        return self._captures.prepare(engine)

    def _runs(self, engine: Engine, fresh: bool) -> Iterator[tuple[Positions, Callable[[], StepOutput | None]]]:
        for shape in reversed(self._shapes):
            parts = zip(self._specs, self._values, self._start, shape, strict=True)
            batch = {spec.name: Ragged(values[:most], start) for spec, values, start, most in parts}
            run = partial(engine.encode, batch, self._arena)
            yield shape, self._laid_out(shape, run) if fresh else run

    def _laid_out(self, shape: Positions, run: Callable[[], StepOutput | None]) -> Callable[[], StepOutput | None]:
        """`run`, which first lays out a batch, once: what is run must be one, what is captured is whatever batch there
        is later. It does so in the stream that it is run in: in any other it would be early, or behind a batch."""
        lengths = [[spec.positions] * self._batch for spec in self._specs]
        before = [partial(self._lay_out, lengths, shape)]

        def run_on_a_batch() -> StepOutput | None:
            while before:
                before.pop()()
            return run()

        return run_on_a_batch

    def encode(self, engine: Engine, inputs: Sequence[Inputs]) -> tuple[bool, StepOutput | None]:
        """`Engine.encode` of some requests by a graph, where there is one: (whether there is, its output). The output
        is overwritten by the next one."""
        known = self._captures.of(engine)
        if not known:
            return False, None
        lengths = [[len(given.get(spec.name, ())) for given in inputs] for spec in self._specs]
        totals = [sum(own) for own in lengths]
        shape = next(one for one in self._shapes if all(map(int.__le__, totals, one)))
        for spec, values, total in zip(self._specs, self._values, totals, strict=True):
            if total:
                parts = [given[spec.name] for given in inputs if spec.name in given]
                upload_into(values[:total], torch.from_numpy(np.concatenate(parts)))
        self._lay_out(lengths, shape)
        known[shape].replay()
        output = known[shape].output
        return True, None if output is None else first_rows(len(inputs), output)

    def _lay_out(self, lengths: Sequence[Sequence[int]], shape: Positions) -> None:
        """Where each request begins and ends in each input, as far as there are positions; what is left of them is the
        pad request's."""
        most: npt.NDArray[np.int64] = np.array(shape)[:, None]
        ends = np.minimum(np.cumsum(lengths, 1), most)
        start = np.zeros(tuple(self._start.shape), np.int32)
        start[:, 1 : ends.shape[1] + 1] = ends
        start[:, ends.shape[1] + 1 : -1] = ends[:, -1:]
        start[:, -1:] = most
        upload_into(self._start, torch.from_numpy(start))
