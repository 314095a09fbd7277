"""Where contexts are encoded. On a GPU that is a lane of its own: a stream, and memory for what contexts leave behind,
so that the context stage of a batch runs beside the decode of the one before it. Step 1 goes with it: it has a row a
request, which leaves most of a GPU idle, and needs nothing but its contexts. The decode finds all of it copied to its
arena, where the captured steps read it: a copy inside the device, of as many requests as there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from app.core import Arena, Contract, Inputs, Rows, StateSpec, StepOutput
from app.engine.context_graphs import ContextGraphs
from app.engine.engine import Engine
from app.engine.graphs import Graphs
from app.errors import Rejected
from app.runtime.contexts import batch_inputs
from app.runtime.laps import Laps

Decode = Callable[[Graphs | None, Engine, int, Rows, Arena], StepOutput]
"""Step t of some rows over an arena, by its graph where there is one."""


def own_arena(arena: Arena, contract: Contract, *, first: bool, pads: int = 0) -> Arena:
    """Zeroed memory like that of `arena` for what contexts leave behind: the state of limits.batch requests and of
    `pads` more, and with `first` a slot of step 1 for each of the former. Raises Rejected("no_memory")."""
    batch, own = contract.limits.batch, dict[str, torch.Tensor]()
    try:
        with torch.inference_mode(mode=False):
            for state in contract.states:
                if state.scope == "request":
                    own[state.name] = arena[state.name].new_zeros(batch + pads, *state.shape)
                elif first:
                    own[state.name] = torch.zeros_like(arena[state.name][:1, :batch])
    except (MemoryError, RuntimeError) as error:
        message = f"no memory for the state of contexts beside a decode: {error}"
        raise Rejected("no_memory", message, location="deployment.toml: limits") from error
    return own


class ContextLane:
    """The context stages over one arena. By the thread that launches.

    graphs    step 1, captured over the memory that this lane has for it; None: it is not here, or runs as it is
    captured  contexts, captured over that memory; None: they run as they are
    """

    def __init__(
        self,
        own: Arena,
        states: Sequence[StateSpec],
        device: torch.device,
        graphs: Graphs | None,
        captured: ContextGraphs | None = None,
    ) -> None:
        """own: `own_arena`; empty: contexts are encoded where they are decoded."""
        self.graphs, self.captured, self._own = graphs, captured, own
        self._requests: dict[torch.dtype, list[str]] = {}  # of one dtype: those are copied in one launch
        for state in states:
            if state.scope == "request" and state.name in own:
                self._requests.setdefault(state.dtype, []).append(state.name)
        self._slots = [state.name for state in states if state.scope == "row" and state.name in own]
        self._places: dict[int, tuple[Arena, list[tuple[list[Tensor], list[Tensor]]]]] = {}
        self._first: dict[int, Rows] = {}
        apart = bool(own) and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if apart else None  # type: ignore[no-untyped-call]
        self.settle()

    def settle(self) -> None:
        """What was asked of the device until now in this thread, weights above all, comes before the next contexts."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def encode(
        self, engine: Engine, inputs: Sequence[Inputs], arena: Arena, laps: Laps, decode: Decode
    ) -> StepOutput | None:
        """The contexts of a batch's inputs, as whatever is launched next finds them, and step 1's output where that is
        known then. Marks its begin, its end, and where the decode goes on."""
        if self._stream is None:
            output = self._encode(engine, inputs, arena, laps, decode)
        else:
            following = torch.cuda.current_stream(self._stream.device)
            with torch.cuda.stream(self._stream):
                output = self._encode(engine, inputs, arena, laps, decode)
            following.wait_stream(self._stream)
        given = self._hand_over(len(inputs), output, arena) if self._own else output
        if self._stream is not None:
            self._stream.wait_stream(following)  # the next contexts come after these copies
        laps.mark()
        return given

    def _encode(
        self, engine: Engine, inputs: Sequence[Inputs], arena: Arena, laps: Laps, decode: Decode
    ) -> StepOutput | None:
        laps.mark()
        there, output = self.captured.encode(engine, inputs) if self.captured else (False, None)
        if not there:
            contexts = batch_inputs(engine.input_specs(), inputs, engine.device)
            output = engine.encode(contexts, {**arena, **self._own})
        if output is None and self._slots:
            rows = self._first.get(len(inputs))
            if rows is None:
                rows = self._first[len(inputs)] = _first_rows(len(inputs), engine.device)
            output = decode(self.graphs, engine, 1, rows, self._own)
        laps.mark()
        return output

    def _hand_over(self, requests: int, output: StepOutput | None, arena: Arena) -> StepOutput | None:
        """Copy what a batch has here to where the decode reads it; the output, too, which the next one overwrites."""
        for into, held in self._copies(requests, arena):
            torch._foreach_copy_(into, held)
        if output is None:
            return None
        norm = None if output.log_norm is None else output.log_norm.clone()
        return StepOutput(output.logits.clone(), norm, {name: head.clone() for name, head in output.heads.items()})

    def _copies(self, requests: int, arena: Arena) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Where what a number of requests has here goes, and where it lies: of one dtype each. Made once: views of the
        state of 28 layers took a seventh of the engine thread's interpreter time."""
        known = self._places.get(requests)
        if known is None or known[0] is not arena:
            groups = [(names, False) for names in self._requests.values()] + [(self._slots, True)] * bool(self._slots)
            made = [tuple(_parts(one, names, requests, slots=slots) for one in (arena, self._own))
                    for names, slots in groups]  # fmt: skip
            known = self._places[requests] = arena, [(into, held) for into, held in made]
        return known[1]


def _parts(arena: Arena, names: Sequence[str], requests: int, *, slots: bool) -> list[Tensor]:
    """What requests 0 .. requests - 1 have in an arena; slots: of step 1."""
    return [arena[name][0, :requests] if slots else arena[name][:requests] for name in names]


def _first_rows(requests: int, device: torch.device) -> Rows:
    """Those of step 1, a row a request; with `log_norm`, as `Engine.encode` gives it, whoever asks for it."""
    number = torch.arange(requests + 1, dtype=torch.int32, device=device)
    codes = torch.zeros_like(number[:-1])
    return Rows(codes, number[:-1], number, codes.new_empty(requests, 0), compact=False, full=True)
