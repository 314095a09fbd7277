"""Where contexts are encoded. On a GPU that is a lane of its own: a stream, and memory for what contexts leave behind,
so that the context stage of a batch runs beside the decode of the one before it. The decode finds it copied to its
arena, where the captured steps read it: a copy inside the device, of as many requests as there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.core import Arena, Inputs, StateSpec, StepOutput
from app.engine.engine import Engine
from app.errors import Rejected
from app.runtime.contexts import batch_inputs
from app.runtime.laps import Laps


class ContextLane:
    """The context stages over one arena. By the thread that launches."""

    def __init__(self, arena: Arena, states: Sequence[StateSpec], device: torch.device, *, own: bool) -> None:
        """own: whether contexts are encoded into memory of their own. Raises Rejected("no_memory")."""
        apart = own and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if apart else None  # type: ignore[no-untyped-call]
        names = [state.name for state in states if state.scope == "request"] if own else []
        try:
            with torch.inference_mode(mode=False):
                self._own = {name: torch.zeros_like(arena[name]) for name in names}
        except (MemoryError, RuntimeError) as error:
            message = f"no memory for the state of contexts beside a decode: {error}"
            raise Rejected("no_memory", message, location="deployment.toml: limits") from error
        self.settle()

    def settle(self) -> None:
        """What was asked of the device until now in this thread, weights above all, comes before the next contexts."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def encode(self, engine: Engine, inputs: Sequence[Inputs], arena: Arena, laps: Laps) -> StepOutput | None:
        """`Engine.encode` of a batch's inputs, as whatever is launched next finds it. Marks its begin, its end, and
        where the decode goes on."""
        if self._stream is None:
            output = self._encode(engine, inputs, arena, laps)
        else:
            decode = torch.cuda.current_stream(self._stream.device)
            with torch.cuda.stream(self._stream):
                output = self._encode(engine, inputs, arena, laps)
            for tensor in (output.logits, output.log_norm, *output.heads.values()) if output is not None else ():
                if tensor is not None:
                    tensor.record_stream(decode)  # its memory is the other stream's, where nobody knows of this use
            decode.wait_stream(self._stream)
        for name, held in self._own.items():
            arena[name][: len(inputs)].copy_(held[: len(inputs)])
        if self._stream is not None:
            self._stream.wait_stream(decode)  # the next contexts come after these copies
        laps.mark()
        return output

    def _encode(self, engine: Engine, inputs: Sequence[Inputs], arena: Arena, laps: Laps) -> StepOutput | None:
        laps.mark()
        contexts = batch_inputs(engine.input_specs(), inputs, engine.device)
        output = engine.encode(contexts, {**arena, **self._own})
        laps.mark()
        return output
