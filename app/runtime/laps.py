"""How long the parts of a batch took, without waiting for a GPU between them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch


class Laps:
    """Marks in a batch's way: the clock's time where the host computes, events in the GPU's own queue elsewhere."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._on_gpu, self._clock = device.type == "cuda", clock
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Here; costs a GPU about a microsecond and waits for nothing."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(self._clock())

    def wait_for_last(self) -> None:
        """Wait until the GPU has come to the last part: to the last mark but one."""
        for event in self._events[-2:-1]:
            event.synchronize()

    def seconds(self) -> list[float]:
        """Between each mark and the next. Waits until the GPU has come to the last one."""
        if not self._on_gpu:
            return [after - before for before, after in pairwise(self._times)]
        if self._events:
            self._events[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._events)]
