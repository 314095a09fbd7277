"""A request's context as the arrays that the `onerec` family encodes. NumPy only: this runs at admission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from app.config import Limits
from app.core import Array, Context, Embeddings, History, Inputs, InputSpec, TokenIds
from app.engine.families.onerec_config import OneRecConfig
from app.errors import InvalidRequest

HISTORY_SHORT, HISTORY_LONG = "history.short", "history.long"
NO_ITEM = -1


class Room(NamedTuple):
    """Context positions that short and long inputs may take, beside the static one."""

    short: int
    long: int

    @classmethod
    def within(cls, short: int, long: int, limits: Limits) -> Room:
        """The newest first: what `limits.context` cuts is the oldest end of the long part."""
        left = max(0, limits.context - 1)
        return cls(min(short, left), min(long, max(0, left - short)))


@dataclass(frozen=True, slots=True)
class OneRecInputs:
    """The named inputs of a model. Every request gives all of them: those of the other kind of context are empty.

    specs    positions newest first: history.short [n, L], history.long [n, pool, L] (codes of -1 are no item),
             static, short, long [n, width]
    history  room for a history, or None where the model takes none
    pool     items of one long position
    """

    specs: tuple[InputSpec, ...]
    history: Room | None
    pool: int

    @classmethod
    def of(cls, config: OneRecConfig, limits: Limits) -> OneRecInputs:
        """The inputs that a model has under a deployment's limits."""
        specs: list[InputSpec] = []
        room, pool = None, 1
        if config.history is not None:
            room, pool = Room.within(config.history.short, config.history.long, limits), config.history.pool
            specs.append(InputSpec(HISTORY_SHORT, (config.steps,), torch.int32, room.short))
            if room.long:
                specs.append(InputSpec(HISTORY_LONG, (pool, config.steps), torch.int32, room.long))
        features = config.features
        if features is not None:
            fits = Room.within(features.short_positions, features.long_positions, limits)
            widths = (features.static, features.short, features.long)
            parts = zip(("static", "short", "long"), widths, (1, *fits), strict=True)
            specs += [InputSpec(name, (width,), torch.float32, most) for name, width, most in parts if width and most]
        return cls(tuple(specs), room, pool)

    def prepare(self, context: Context) -> Inputs:
        """See `Family.prepare`."""
        match context:
            case History(codes):
                return self._empty() | self._history(codes)
            case Embeddings(tensors):
                return self._empty() | self._features(tensors)
            case TokenIds():
                raise InvalidRequest("this model has no tokens of its own", path="$.context.tokens")

    def _empty(self) -> dict[str, Array]:
        kinds = {torch.int32: np.int32, torch.float32: np.float32}
        return {spec.name: np.zeros((0, *spec.shape), kinds[spec.dtype]) for spec in self.specs}

    def _history(self, codes: npt.NDArray[np.int32]) -> dict[str, Array]:
        if self.history is None:
            raise InvalidRequest("this model takes `embeddings`, not a history", path="$.context.history")
        short, long = self.history
        newest = codes[::-1]
        inputs: dict[str, Array] = {HISTORY_SHORT: np.ascontiguousarray(newest[:short])}
        if long:
            older = newest[short : short + long * self.pool]
            pooled = np.full((-(-len(older) // self.pool) * self.pool, codes.shape[1]), NO_ITEM, np.int32)
            pooled[: len(older)] = older
            inputs[HISTORY_LONG] = pooled.reshape(-1, self.pool, codes.shape[1])
        return inputs

    def _features(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, Array]:
        specs = {spec.name: spec for spec in self.specs if spec.name not in {HISTORY_SHORT, HISTORY_LONG}}
        if not specs:
            raise InvalidRequest("this model takes a `history`, not embeddings", path="$.context.embeddings")
        known = ", ".join(f"`{name}`" for name in specs)
        for name in tensors:
            if name not in specs:
                raise InvalidRequest(f"the model has no input `{name}`; it takes {known}", path=_path(name))
        for name in specs:
            if name not in tensors:
                raise InvalidRequest(f"`{name}` is missing; the model takes {known}", path="$.context.embeddings")
        return {name: _checked(tensors[name], spec) for name, spec in specs.items()}


def _checked(value: npt.NDArray[np.float32], spec: InputSpec) -> Array:
    """One feature input, newest first."""
    width, path = spec.shape[0], _path(spec.name)
    if value.ndim != 2 or value.shape[1] != width:
        message = f"`{spec.name}` has shape {list(value.shape)}; the model takes [positions, {width}]"
        raise InvalidRequest(message, path=path)
    if spec.name == "static" and value.shape[0] != 1:
        raise InvalidRequest(f"`static` has {value.shape[0]} positions; the model takes exactly 1", path=path)
    if value.shape[0] > spec.positions:
        message = f"`{spec.name}` has {value.shape[0]} positions; the model takes at most {spec.positions}"
        raise InvalidRequest(message, path=path)
    if not np.isfinite(value).all():
        row, column = np.argwhere(~np.isfinite(value))[0]
        raise InvalidRequest(f"`{spec.name}` is not finite at [{row}, {column}]", path=path)
    return np.ascontiguousarray(value[::-1], dtype=np.float32)


def _path(name: str) -> str:
    return f"$.context.embeddings.{name}"
