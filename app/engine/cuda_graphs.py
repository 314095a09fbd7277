"""torch's CUDA graphs behind `graphs.Recorder`. Nothing here waits for batches that run beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from app.core import StepOutput
from app.errors import Rejected
from app.ops.gated import gated

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TYPES = {torch.uint8: "|u1", torch.int16: "<i2", torch.int32: "<i4", torch.int64: "<i8"}


@dataclass(frozen=True, slots=True)
class CudaRecorded:
    """See `graphs.Recorded`."""

    output: StepOutput | None
    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        """On torch's current stream."""
        self.graph.replay()


class CudaRecorder:
    """Records into one memory pool: graphs that never run at the same time share what they compute in. The pool lives
    while one of its graphs does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._began = False

    def record(self, run: Callable[[], StepOutput | None], *, fresh: bool) -> CudaRecorded:
        """See `graphs.Recorder`. Raises Rejected("capture_failed")."""
        before = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.inference_mode():
            if not self._began:
                if fresh:  # what is run finds the arena's zeros, which another stream may have behind a batch
                    self._stream.wait_stream(before)
                self._begin()
            if fresh:
                run()
            graph = torch.cuda.CUDAGraph()
            try:
                # others' threads may allocate and launch meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = run()
                finally:
                    graph.capture_end()
            except torch.cuda.OutOfMemoryError as error:
                raise Rejected("no_memory", f"for CUDA graphs: {error}", location="deployment.toml: limits") from error
            except RuntimeError as error:
                raise Rejected("capture_failed", f"a step cannot be captured into a CUDA graph: {error}") from error
            return CudaRecorded(_borrowed(output), graph)

    def _begin(self) -> None:
        """cuBLAS and CuPy prepare a thread when it first calls them, which no capture may hold."""
        few = torch.zeros(16, 16, dtype=torch.bfloat16, device=self._device)
        gated(few @ few, few)
        self._began = True

    def used(self) -> int:
        """See `graphs.Recorder`."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def free(self) -> int:
        """See `graphs.Recorder`."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def end(self, *, fresh: bool) -> None:
        """See `graphs.Recorder`. What the runs before the captures took goes back."""
        self._began = False
        if fresh:
            self._stream.synchronize()
            torch.cuda.empty_cache()


def _borrowed(output: StepOutput | None) -> StepOutput | None:
    """The same places without keeping their memory from the captures to come: the pool outlives them."""
    if output is None:
        return None
    norm = None if output.log_norm is None else _alias(output.log_norm)
    return StepOutput(_alias(output.logits), norm, {name: _alias(head) for name, head in output.heads.items()})


def _alias(tensor: Tensor) -> Tensor:
    words = tensor.view(_WORDS[tensor.element_size()])
    return torch.as_tensor(_Place(words), device=tensor.device).view(tensor.dtype)


class _Place:
    """Memory by its address alone."""

    def __init__(self, words: Tensor) -> None:
        size = words.element_size()
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": tuple(words.shape),
            "strides": tuple(stride * size for stride in words.stride()),
            "typestr": _TYPES[words.dtype],
            "data": (words.data_ptr(), False),
        }
