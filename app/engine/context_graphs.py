"""Context stages as CUDA graphs: what a family launches for the prompts of a batch is one launch.

Prompts lie end to end, so a graph is captured for a number of positions. A batch is padded to the next such number by
one request more, whose prompt is what an earlier batch left; requests that a batch does not have are without positions.
To the family all of it is an ordinary batch of limits.batch + 1 requests. Nobody reads what the pad request leaves.
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
from app.engine.graphs import first
from app.ops.upload import upload_into

PADS: Final = 1
"""Requests more than limits.batch that the memory must have room for."""
_UNIT: Final = 16
"""Numbers of positions are multiples of it, where a prompt may have so many."""


def padded(total: int, longest: int, most: int) -> int:
    """The positions that a batch of `total` is computed with: at most an eighth more, and no more than one prompt, of
    `longest` positions, can have. most: of a whole batch."""
    unit = min(max(_UNIT, 1 << max(0, (total - 1).bit_length() - 4)), longest)
    return min(-(-total // unit) * unit, most)


def shapes(longest: int, most: int) -> tuple[int, ...]:
    """Every number of positions that a batch can be padded to, the largest first."""
    found, total = list[int](), 0
    while total < most:
        total = padded(total + 1, longest, most)
        found.append(total)
    return tuple(reversed(found))


class ContextGraphs:
    """The captured context stages over one lane's own memory. `prepare` off the request path, by one thread at a time;
    `encode` by the thread that computes."""

    def __init__(
        self,
        arena: Arena,
        limits: Limits,
        spec: InputSpec,
        device: torch.device,
        recorder: Recorder,
        turn: Turn = nullcontext,
    ) -> None:
        """arena: the state of limits.batch + PADS requests · spec: the family's one input · turn: of each capture."""
        self._arena, self._spec, self._batch = arena, spec, limits.batch
        self._most = limits.batch * spec.positions
        with torch.inference_mode(mode=False):
            self._values = torch.zeros(self._most, *spec.shape, dtype=spec.dtype, device=device)
            self._start = torch.zeros(limits.batch + PADS + 1, dtype=torch.int32, device=device)
        self._captures = Captures(recorder, self._runs, turn)

    def prepare(self, engine: Engine) -> Taken:
        """Have a graph for every number of positions; see `Captures.prepare`."""
        return self._captures.prepare(engine)

    def _runs(self, engine: Engine, fresh: bool) -> Iterator[tuple[int, Callable[[], StepOutput]]]:
        for positions in shapes(self._spec.positions, self._most):
            if fresh:  # what is run must be a batch; what is captured is whatever batch there is later
                self._lay_out(np.full(self._batch, self._spec.positions), positions)
            yield positions, partial(self._encode, engine, Ragged(self._values[:positions], self._start))

    def _encode(self, engine: Engine, batch: Ragged) -> StepOutput:
        output = engine.encode({self._spec.name: batch}, self._arena)
        assert output is not None, "families whose contexts are captured give step 1's output"
        return output

    def encode(self, engine: Engine, inputs: Sequence[Inputs]) -> StepOutput | None:
        """`Engine.encode` of some requests by a graph; None where there is none for them. The output is overwritten by
        the next ones."""
        prompts = [given[self._spec.name] for given in inputs]
        total = sum(map(len, prompts))
        recorded = self._captures.of(engine).get(padded(total, self._spec.positions, self._most)) if total else None
        if recorded is None:
            return None
        upload_into(self._values[:total], torch.from_numpy(np.concatenate(prompts)))
        self._lay_out(np.array([len(one) for one in prompts]), padded(total, self._spec.positions, self._most))
        recorded.replay()
        return first(len(prompts), recorded.output)

    def _lay_out(self, lengths: npt.NDArray[np.int64], positions: int) -> None:
        """Where each request begins and ends; what is left of the positions is the pad request's."""
        start = np.zeros(self._start.shape[0], dtype=np.int32)
        np.minimum(lengths.cumsum(), positions, out=start[1 : len(lengths) + 1], casting="unsafe")
        start[len(lengths) + 1 :] = start[len(lengths)]
        start[-1] = positions
        upload_into(self._start, torch.from_numpy(start))
