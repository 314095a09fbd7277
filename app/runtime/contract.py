"""Makes the contract of a deployment: what artifacts, policies and the step loop agree on (RecoGEM 3.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import msgspec

from app.config import NO_FIELDS, Deployment
from app.core import Contract, HeadSpec, InputSpec, StateSpec, StepShape, WeightSpec


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


def make_contract(model: Model, config: Mapping[str, object], deployment: Deployment, precision: str) -> Contract:
    """The contract of a model behind a deployment overlay.

    config: the model's config.json · precision: resolved, never "auto".
    The id is the first 12 hex digits of the SHA-256 over the canonical JSON of everything else in it.
    """
    limits, sid = deployment.limits, deployment.sid
    pairs = enumerate(zip(sid.sizes, limits.widths, strict=True), 1)
    steps = tuple(StepShape(t, codes, width) for t, (codes, width) in pairs)
    parts: dict[str, object] = {
        "family": deployment.family,
        "steps": steps,
        "limits": limits,
        "sid": sid,
        "precision": precision,
        "inputs": [(spec.name, spec.shape, str(spec.dtype), spec.positions) for spec in model.input_specs()],
        "states": [(spec.name, spec.shape, str(spec.dtype), spec.scope) for spec in model.state_specs()],
        "heads": model.head_specs(),
        "weights": sorted(model.weight_specs()),
        "log_norm": model.log_norm,
        "config": config,
    }
    if deployment.request != NO_FIELDS:  # a deployment that declares nothing keeps its id
        parts["request"] = deployment.request
    return Contract(
        id=hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:12],
        family=deployment.family,
        steps=steps,
        limits=limits,
        precision=precision,
        inputs=model.input_specs(),
        states=model.state_specs(),
        heads=model.head_specs(),
        weights=model.weight_specs(),
        log_norm=model.log_norm,
        config=msgspec.json.encode(config, order="sorted").decode(),
        request=deployment.request,
    )
