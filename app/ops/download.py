"""From a device to the host, without a wait before somebody asks for what has come."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Download:
    """Copies on their way: a GPU writes them to pinned memory, in the order of the current stream."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Asks for the copies and goes on at once; on a CPU they are the tensors themselves."""
        self._host, self._event = list(tensors), None
        if any(tensor.device.type == "cuda" for tensor in tensors):
            self._host = [torch.empty_like(one, device="cpu", pin_memory=True) for one in tensors]
            for mine, given in zip(self._host, tensors, strict=True):
                mine.copy_(given, non_blocking=True)
            # blocking: whoever waits sleeps, and leaves its core to the thread that launches
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, once they are there. In any thread."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
