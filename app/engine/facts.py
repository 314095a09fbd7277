"""What a model family says of itself without weights, and which values it was made from: the family's part of the
contract (RecoGEM 3.1). `export.py` adds what its functions do."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import torch
from torch import nn

from app.config import Limits, SidConfig
from app.engine.families.base import Binding, Family, ModelFiles
from app.engine.fp8 import carrier, quantised
from app.engine.safetensors import DTYPES
from app.ops.fp8 import FP8

_NO_SOURCE: Final = frozenset({"torch", "builtins", "abc", "typing"})


class Noted(Mapping[str, object]):
    """A mapping that notes which of its values are taken; what is below a value counts as taken with it."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values
        self._taken: set[str] = set()

    def __getitem__(self, key: str) -> object:
        value = self._values[key]
        self._taken.add(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def taken(self) -> dict[str, object]:
        """What was taken, by name."""
        return {key: self._values[key] for key in sorted(self._taken)}


def noted_limits(limits: Limits) -> tuple[Limits, set[str]]:
    """The same limits, and the names of those that were asked for so far."""
    asked: set[str] = set()

    class NotedLimits(Limits, frozen=True):
        """Limits that note who is asked for."""

        def __getattribute__(self, name: str) -> object:
            if name in Limits.__struct_fields__:
                asked.add(name)
            return super().__getattribute__(name)

    return NotedLimits(**{name: getattr(limits, name) for name in limits.__struct_fields__}), asked


class Model(NamedTuple):
    """A family without weights. config, limits: the values of config.json and [limits] that it was made from."""

    family: Family
    config: Mapping[str, object]
    limits: Mapping[str, object]


def build(kind: type[Family], files: ModelFiles, sid: SidConfig, limits: Limits, dtype: torch.dtype) -> Model:
    """`Family.build`, with what it reads. Raises Rejected as that does."""
    config, (given, asked) = Noted(files.config), noted_limits(limits)
    family = kind.build(ModelFiles(config, files.directory, files.shapes), sid, given, dtype)
    return Model(family, config.taken(), {name: getattr(limits, name) for name in sorted(asked)})


def weight_facts(family: Family, dtype: torch.dtype) -> list[dict[str, object]]:
    """How each parameter is made: its sources by name and shape, what may be stored, and what is done to it.

    A source that several parameters name is split among them. dtype: of `resolve_precision`
    """
    shapes = {spec.name: spec.shape for spec in family.weight_specs()}
    target, eight = str(carrier(dtype)).removeprefix("torch."), quantised(family, dtype)
    parameters = dict(family.named_parameters())
    return [
        {
            "parameter": name,
            "shape": list(parameters[name].shape),
            "sources": [{"name": source, "shape": shapes.get(source)} for source in binding.sources],
            "accepts": sorted(DTYPES),
            "transform": _transform(binding, target, eight=name in eight),
        }
        for name, binding in sorted(family.bindings().items())
        if name in parameters
    ]


def _transform(binding: Binding, target: str, *, eight: bool) -> list[dict[str, object]]:
    steps: list[dict[str, object]] = [{"op": "transpose"}] if binding.transpose else []
    if binding.rows is not None:
        steps.append(_picked(binding.rows.to("cpu", torch.int64)))
    if eight:
        steps.append({"op": "quantise", "dtype": str(FP8).removeprefix("torch."), "scale": "float32", "per": "row"})
    else:
        steps.append({"op": "cast", "dtype": target})
    if len(binding.sources) > 1:
        steps.append({"op": "concatenate", "dim": 0})
    return steps


def _picked(rows: torch.Tensor) -> dict[str, object]:
    """Which rows of a source are kept: a stretch of them, or a list, which its digest names."""
    first = int(rows[0]) if len(rows) else -1
    if first >= 0 and torch.equal(rows, torch.arange(first, first + len(rows))):
        return {"op": "split", "first": first, "rows": len(rows)}
    digest = hashlib.sha256(rows.contiguous().numpy().astype("<i8").tobytes()).hexdigest()[:16]
    return {"op": "gather", "rows": len(rows), "absent": int((rows < 0).sum()), "digest": digest}


def made_for(model: Model, name: str, sid: SidConfig, dtype: torch.dtype) -> str:
    """What an export depends on, as one digest: the family's code, the values it read, and all that it declares."""
    family = model.family
    parts = {
        "family": name,
        "code": code_digest(family),
        "config": model.config,
        "limits": model.limits,
        "sid": sid,
        "dtype": str(dtype),
        "tensors": [(n, list(t.shape), str(t.dtype)) for n, t in _tensors(family)],
        "inputs": [(*spec[:2], str(spec.dtype), spec.positions) for spec in family.input_specs()],
        "states": [(*spec[:2], str(spec.dtype), spec.scope) for spec in family.state_specs()],
        "heads": family.head_specs(),
        "log_norm": family.log_norm,
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


def _tensors(family: Family) -> Iterable[tuple[str, torch.Tensor]]:
    yield from family.named_parameters()
    yield from family.named_buffers()


def code_digest(module: nn.Module) -> str:
    """Of the source files that a family and its parts are written in. Left out: torch's own, and `Family`, whose
    defaults are declarations, which the digest has by their values."""
    classes = {base for part in module.modules() for base in type(part).__mro__} - {Family}
    files = {_source(kind) for kind in classes if kind.__module__.partition(".")[0] not in _NO_SOURCE}
    parts = sorted(hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if file)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _source(kind: type) -> str | None:
    try:
        return inspect.getsourcefile(kind)
    except (TypeError, OSError):
        return None
