"""Makes the contract of a deployment: what artifacts, policies and the step loop agree on (RecoGEM 3.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec
import torch

from app.config import NO_FIELDS, Deployment
from app.core import Contract, HeadSpec, InputSpec, StateSpec, StepShape, WeightSpec
from app.engine.functions import Function, links
from app.runtime.workspace import workspace
from app.vocab.aggregates import tables


class Model(Protocol):
    """What the contract asks of a model: a family without weights says it as well as an engine."""

    log_norm: bool

    def input_specs(self) -> tuple[InputSpec, ...]:
        """Context inputs."""

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Carried state."""

    def head_specs(self) -> tuple[HeadSpec, ...]:
        """Extra outputs."""

    def weight_specs(self) -> tuple[WeightSpec, ...]:
        """Tensors of an artifact."""


Parts = Mapping[str, object]
"""Everything that a contract says, as JSON data; its id is made from that."""
BESIDE: Final = frozenset({"format", "id", "made_by", "made_for"})
"""What a contract file says about itself: no part of the contract."""


def make_contract(model: Model, config: Mapping[str, object], deployment: Deployment, precision: str) -> Contract:
    """The contract of a model behind a deployment overlay, without what an export knows: for models in memory.

    config: the values of the model's config.json that it reads · precision: resolved, never "auto".
    """
    weights = [{"name": spec.name, "shape": spec.shape} for spec in sorted(model.weight_specs())]
    return contract_of(make_parts(model, config, deployment, precision, weights, ()), model, deployment, precision)


def make_parts(
    model: Model,
    config: Mapping[str, object],
    deployment: Deployment,
    precision: str,
    weights: Sequence[Mapping[str, object]],
    functions: Sequence[Function],
) -> dict[str, object]:
    """The parts of a contract.

    weights: how each parameter is made (`engine.facts.weight_facts`) · functions: what an export has found
    """
    limits, sid = deployment.limits, deployment.sid
    inputs = [{**spec._asdict(), "dtype": _dtype(spec.dtype)} for spec in model.input_specs()]
    states = [_state(spec) for spec in model.state_specs()]
    parts: dict[str, object] = {
        "family": deployment.family,
        "steps": [step._asdict() for step in _steps(deployment)],
        "limits": limits,
        "sid": sid,
        "precision": precision,
        "parallel": deployment.parallel,
        "inputs": inputs,
        "states": states,
        "heads": [head._asdict() for head in model.head_specs()],
        "weights": weights,
        "log_norm": model.log_norm,
        "config": config,
        "functions": functions,
        "links": links(functions),
        "workspace": workspace(model.state_specs(), functions, limits, sid.sizes),
    }
    if deployment.request != NO_FIELDS:  # a deployment that declares nothing keeps its id
        parts["request"] = deployment.request
    if any(tables(deployment)):
        parts["columns"] = dict(zip(("attributes", "priors", "lists"), tables(deployment), strict=True))
    return parts


def contract_id(parts: Parts) -> str:
    """The first 12 hex digits of the SHA-256 over the canonical JSON of a contract's parts."""
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:12]


def contract_of(parts: Parts, model: Model, deployment: Deployment, precision: str) -> Contract:
    """What the rooms carry of a contract with these parts."""
    return Contract(
        id=contract_id(parts),
        family=deployment.family,
        steps=_steps(deployment),
        limits=deployment.limits,
        precision=precision,
        inputs=model.input_specs(),
        states=model.state_specs(),
        heads=model.head_specs(),
        weights=model.weight_specs(),
        log_norm=model.log_norm,
        config=msgspec.json.encode(parts["config"], order="sorted").decode(),
        request=deployment.request,
    )


def _steps(deployment: Deployment) -> tuple[StepShape, ...]:
    pairs = enumerate(zip(deployment.sid.sizes, deployment.limits.widths, strict=True), 1)
    return tuple(StepShape(t, codes, width) for t, (codes, width) in pairs)


def _state(spec: StateSpec) -> dict[str, object]:
    said = {**spec._asdict(), "dtype": _dtype(spec.dtype)}
    if not spec.first:  # state that later steps read whole keeps a contract's id
        del said["first"]
    return said


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
