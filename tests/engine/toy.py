"""A model family of its own, as somebody outside of the project would write one: nothing here is known anywhere else.

The context is the sum of the code vectors of the user's items. A row's vector is the context, its own code's vector and
half of its parent's vector, which it finds through its ancestry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from app.config import Limits, SidConfig
from app.core import Arena, Context, Contexts, History, Inputs, InputSpec, Rows, StateSpec, StepOutput
from app.engine.families.base import Binding, Family, ModelFiles
from app.errors import InvalidRequest, Rejected


class Toy(Family):
    """config.json: {"width": d}. Tensors: codes.0.., heads.0.. [C_t, d]."""

    name: ClassVar[str] = "toy"
    contexts: ClassVar[tuple[type, ...]] = (History,)

    def __init__(self, width: int, sizes: tuple[int, ...], context: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.steps, self.context, self.dtype = width, len(sizes), context, dtype
        with torch.device("meta"):
            self.codes = nn.ParameterList(torch.empty(size, width, dtype=dtype) for size in sizes)
            self.heads = nn.ParameterList(torch.empty(size, width, dtype=dtype) for size in sizes)

    @classmethod
    def build(cls, files: ModelFiles, sid: SidConfig, limits: Limits, dtype: torch.dtype) -> Self:
        width = files.config.get("width")
        if not isinstance(width, int) or width < 1:
            raise Rejected("bad_config", f"{width!r} is no width", location="config.json: width")
        return cls(width, sid.sizes, limits.context, dtype)

    def input_specs(self) -> tuple[InputSpec, ...]:
        return (InputSpec("items", (self.steps,), torch.int32, self.context),)

    def state_specs(self) -> tuple[StateSpec, ...]:
        return (
            StateSpec("context", (self.width,), self.dtype, "request"),
            StateSpec("vector", (self.width,), self.dtype, "row"),
        )

    def prepare(self, context: Context) -> Inputs:
        if not isinstance(context, History):
            raise InvalidRequest("this model takes a history", path="$.context")
        return {"items": np.ascontiguousarray(context.codes[-self.context :])}

    def encode(self, contexts: Contexts, arena: Arena) -> None:
        values, start, _ = contexts["items"]
        requests = torch.arange(start.shape[0] - 1, device=start.device)
        owner = torch.repeat_interleave(requests, start.diff(), output_size=values.shape[0])
        items: Tensor = sum(functional.embedding(values[:, t], table) for t, table in enumerate(self.codes))
        arena["context"][: requests.shape[0]] = items.new_zeros(requests.shape[0], self.width).index_add(
            0, owner, items
        )

    def step(self, t: int, rows: Rows, arena: Arena) -> StepOutput:
        n, slots = rows.codes.shape[0], arena["vector"]
        x = arena["context"].index_select(0, rows.request)
        if t > 1:
            parent = torch.arange(n, device=x.device) if rows.compact else rows.ancestry[:, t - 2].long()
            x = x + functional.embedding(rows.codes, self.codes[t - 2]) + 0.5 * slots[t - 2].index_select(0, parent)
        if t < self.steps:
            slots[t - 1, :n] = x
        return StepOutput(functional.linear(x, self.heads[t - 1]), None, {})


class Turned(Toy):
    """The same model from checkpoints that hold heads.0.. as [d, C_t]: one binding, and nothing else, says so."""

    name: ClassVar[str] = "turned"

    def bindings(self) -> Mapping[str, Binding]:
        return {name: Binding((name,), transpose=name.startswith("heads")) for name, _ in self.named_parameters()}
