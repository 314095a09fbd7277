"""The tensor computation of one step at a time (RecoGEM 3.2), behind one seam for every model family.

The engine sees contexts, flat rows and an arena: no client's question, no selection rule, no artifact's name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from app.config import Limits
from app.core import Arena, Context, Contexts, HeadSpec, Inputs, InputSpec, Rows, StateSpec, StepOutput, WeightSpec
from app.engine.families.base import Family
from app.engine.slots import Slot
from app.errors import Rejected
from app.ops.cuda import in_force


class Engine:
    """A family bound to weights on a device. Immutable; `encode` and `step` write the arena they are given and nothing
    else, so one engine serves any number of arenas.

    device, dtype  where and in what the parameters are
    steps          L
    log_norm       whether step outputs carry `log_norm`
    unread         tensors of the artifact that the family leaves alone (`Family.ignored`)
    kernels        what computes: "cuda", "torch", or "torch: " and why
    slot           the memory of its parameters, which comes back when the engine has gone; None: memory of their own
    first_step     the first step that `step` decodes: 2 where `encode` gives step 1's output
    contexts_on_device  see `Family`: contexts can be captured
    addresses      of the parameters: engines of one contract with equal ones compute with the same memory
    """

    def __init__(
        self,
        family: Family,
        *,
        device: torch.device,
        dtype: torch.dtype,
        unread: tuple[str, ...] = (),
        slot: Slot | None = None,
    ) -> None:
        self._family = family
        self.device = device
        self.dtype = dtype
        self.steps = family.steps
        self.log_norm = family.log_norm
        self.unread = unread
        self.kernels = in_force(device, dtype)
        self.slot = slot
        self.first_step = 2 if family.first_from_encode else 1
        self.contexts_on_device = _on_device(family)
        self.addresses = tuple(parameter.data_ptr() for parameter in family.parameters())

    @property
    def contexts(self) -> tuple[type, ...]:
        """The kinds of context that `prepare` takes."""
        return self._family.contexts

    def prepare(self, context: Context) -> Inputs:
        """One context as named host arrays; see `Family.prepare`. Raises InvalidRequest with the field's path."""
        return self._family.prepare(context)

    def encode(self, contexts: Contexts, arena: Arena) -> StepOutput | None:
        """Fill the request-scoped state of contexts 0..R-1; step 1's output where the family gives it here.

        Outputs are inference tensors: they cannot be written in place outside of `torch.inference_mode`.
        """
        with torch.inference_mode():
            return self._family.encode(contexts, arena)

    def step(self, t: int, rows: Rows, arena: Arena) -> StepOutput:
        """Decode step t of L for N rows; reads slots of steps before t and writes slots (t, 0..N-1) if t < L."""
        with torch.inference_mode():
            return self._family.step(t, rows, arena)

    def constants(self) -> Mapping[str, Tensor]:
        """Tensors that steps read beside parameters and arena, by name."""
        return dict(self._family.named_buffers())

    def input_specs(self) -> tuple[InputSpec, ...]:
        """The inputs that `prepare` makes and `encode` takes."""
        return self._family.input_specs()

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Everything carried from `encode` to `step` and from step to step."""
        return self._family.state_specs()

    def head_specs(self) -> tuple[HeadSpec, ...]:
        """Extra outputs of a step."""
        return self._family.head_specs()

    def weight_specs(self) -> tuple[WeightSpec, ...]:
        """The tensors that an artifact of this shape holds."""
        return self._family.weight_specs()

    def missing_tokens(self) -> tuple[tuple[int, ...], ...]:
        """Per step, the codes that the model cannot write."""
        return self._family.missing_tokens()

    def new_arena(self, limits: Limits) -> Arena:
        """Zeroed memory for the state of one batch: request scope [batch, *shape], row scope [max(L - 1, 1), rows,
        *shape]. Allocated once; ordinary tensors, so that others may write them in place.

        Raises Rejected("no_memory") with the tensor's name and bytes.
        """
        slots = max(self.steps - 1, 1)
        arena: dict[str, torch.Tensor] = {}
        for spec in self.state_specs():
            lead = (limits.batch,) if spec.scope == "request" else (slots, limits.rows)
            shape = (*lead, *spec.shape)
            try:
                with torch.inference_mode(mode=False):
                    arena[spec.name] = torch.zeros(shape, dtype=spec.dtype, device=self.device)
            except (MemoryError, RuntimeError) as error:
                message = f"no memory for the state `{spec.name}` {list(shape)} {spec.dtype}: {error}"
                raise Rejected("no_memory", message, location="deployment.toml: limits") from error
        return arena


def _on_device(family: Family) -> bool:
    """`Family.contexts_on_device` of the class that has the family's `encode`: what a base class says of its own is
    nothing that a subclass with another one has said. Without positions there is nothing to capture."""
    positions = [spec.positions for spec in family.input_specs()]
    for kind in type(family).__mro__:
        if "contexts_on_device" in vars(kind) or "encode" in vars(kind):
            return bool(vars(kind).get("contexts_on_device")) and bool(positions) and min(positions) > 0
    return False
