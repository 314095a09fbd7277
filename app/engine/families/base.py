"""What a model family is: tensor computation of one model, and nothing else.

A family is one file here (or a plug-in under the entry point group `widebeam.families`). It knows no requests, no
policies, no versions, no beams as a tree: it sees contexts, flat rows and an arena.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

import torch
from msgspec import Struct
from torch import Tensor, nn

from app.config import Limits, SidConfig
from app.core import Arena, Context, Contexts, HeadSpec, Inputs, InputSpec, Rows, StateSpec, StepOutput, WeightSpec
from app.errors import Fault


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What lies beside the tensors of a weights version. `config` is config.json; `directory` is for tokenizer files
    (read only at load); `shapes` are the tensors of the safetensors files by name."""

    config: Mapping[str, object]
    directory: Path
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Binding:
    """How a parameter is made from the artifact's tensors: `sources` by name, concatenated along dim 0 and cast.

    rows       where given, only these rows of the (single) source are kept, in this order; -1 gives a row of zeros
               (a head for a step's codes). A source that several parameters name is split among them so
    transpose  the sources hold their matrices the other way round, [K, M] for M rows of K; `rows` are counted after it
    """

    sources: tuple[str, ...]
    rows: Tensor | None = field(default=None)
    transpose: bool = False


def fields_of(config: Mapping[str, object], kind: type[Struct]) -> dict[str, object]:
    """The values of a config.json that a struct has fields for. No other is looked at, so no other is in the contract:
    a refit may write what it likes there."""
    return {name: config[name] for name in kind.__struct_fields__ if name in config}


class Family(nn.Module):
    """A model behind the engine seam (RecoGEM 3.1-3.2). Parameters are made without storage (meta device) in `build`;
    the engine binds them from an artifact by `bindings`. Versions that differ in nothing but their tensors' values take
    turns in one module: it must keep nothing that it has computed from its parameters.

    Class attributes: name; contexts = the kinds of `core.Context` that `prepare` takes.
    """

    name: ClassVar[str]
    contexts: ClassVar[tuple[type, ...]]

    steps: int
    """L."""
    log_norm: bool = False
    """Whether `StepOutput.log_norm` is given (the model can emit more than the step's codes)."""
    first_from_encode: bool = False
    """Whether `encode` returns step 1's output, so that there is no `step` call for t = 1."""
    contexts_on_device: bool = False
    """Whether `encode` asks the host for nothing of a batch but its shapes (no `Ragged.counts`), takes requests without
    positions, and a last one with more of them than `InputSpec` says, whose state may be anything but must not be
    written beyond its own: then it is captured as steps are."""

    @classmethod
    @abstractmethod
    def build(cls, files: ModelFiles, sid: SidConfig, limits: Limits, dtype: torch.dtype) -> Self:
        """The module without weights. Raises Rejected(location="config.json: field") for a configuration that does not
        fit the family, the SID sizes or the limits."""

    def bindings(self) -> Mapping[str, Binding]:
        """Parameter name -> how to make it. Default: each from the tensor of its own name."""
        return {name: Binding((name,)) for name, _ in self.named_parameters()}

    def projections(self) -> Iterable[str]:
        """Parameters [outputs, inputs] that are multiplied by `functional.linear` or `x.addmm_(y, weight.t())` and are
        used for nothing else, by name: precision "fp8" holds them in 8 bits. Default: none, and fp8 is refused."""
        return ()

    def weight_specs(self) -> tuple[WeightSpec, ...]:
        """The tensors that an artifact must hold, as it holds them. Default: what the plain bindings say; a family that
        concatenates or picks rows says the shapes of its sources itself."""
        parameters = dict(self.named_parameters())
        specs = []
        for name, binding in self.bindings().items():
            if len(binding.sources) != 1 or binding.rows is not None:
                raise Fault(f"{type(self).__name__}.weight_specs must say the sources of `{name}`")
            shape = tuple(parameters[name].shape)
            specs.append(WeightSpec(binding.sources[0], shape[::-1] if binding.transpose else shape))
        return tuple(specs)

    def tied(self) -> Mapping[str, str]:
        """Tensors that an artifact may hold a second time: name -> the bound tensor that it must equal."""
        return {}

    def ignored(self) -> Iterable[str]:
        """Tensors that an artifact may hold and this family does not read, by name (rotary tables, say). Any other
        tensor that no binding names is refused."""
        return ()

    @abstractmethod
    def input_specs(self) -> tuple[InputSpec, ...]:
        """The inputs that `prepare` makes and `encode` takes."""

    @abstractmethod
    def state_specs(self) -> tuple[StateSpec, ...]:
        """Everything carried from `encode` to `step` and from step to step."""

    def head_specs(self) -> tuple[HeadSpec, ...]:
        """Extra outputs. Default: none."""
        return ()

    @abstractmethod
    def prepare(self, context: Context) -> Inputs:
        """One request's context as named host arrays; pure, called at admission on the event loop, so quick.

        A history that is too long keeps its newest items. Raises InvalidRequest with the field's path
        (`$.context.tokens[3]`, `$.context.embeddings.short`).
        """

    def missing_tokens(self) -> tuple[tuple[int, ...], ...]:
        """Per step, the codes that the model has no token for and so cannot write; the gate refuses a vocab that uses
        one. Default: none."""
        return ((),) * self.steps

    @abstractmethod
    def encode(self, contexts: Contexts, arena: Arena) -> StepOutput | None:
        """Fill the request-scoped state of requests 0..R-1. Families whose last context position predicts c1 return
        step 1's output here, one row a request in request order, and get no `step` call for t = 1."""

    @abstractmethod
    def step(self, t: int, rows: Rows, arena: Arena) -> StepOutput:
        """Decode step t (1..L): the rows' logits; writes slots (t, 0..N-1) of the row-scoped state if t < L."""
