"""Small real things for tests: random models behind the engine seam, catalogues, jobs, and deployment roots on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from app.config import Deployment, Limits, SidConfig
from app.engine.engine import Engine
from app.engine.families.base import ModelFiles
from app.engine.families.onerec import OneRec
from app.engine.families.onerec_config import parse as parse_onerec
from app.engine.families.onerec_reference import OneRecReference

ONEREC: Mapping[str, object] = {
    "family": "onerec",
    "d_model": 16,
    "layers": 2,
    "heads": 2,
    "head_dim": 8,
    "cross_groups": 2,
    "self_groups": 1,
    "ffn": 32,
    "history": {"short": 6, "long": 2, "pool": 2},
}


def onerec_config(sizes: Sequence[int], **changes: object) -> dict[str, object]:
    """config.json of a small random onerec."""
    return {**ONEREC, "sizes": list(sizes), **changes}


def onerec_weights(config: Mapping[str, object], seed: int = 0, scale: float = 0.3) -> dict[str, torch.Tensor]:
    """Random weights, large enough that prefixes matter to the logits."""
    reference = OneRecReference(parse_onerec(dict(config))).eval()
    generator = torch.Generator().manual_seed(seed)
    reference.reset_parameters(generator)
    state = reference.state_dict()
    return {name: w + scale * torch.randn(w.shape, generator=generator) for name, w in sorted(state.items())}


def onerec_engine(sizes: Sequence[int], limits: Limits, seed: int = 0, **changes: object) -> Engine:
    """A small onerec in memory, bound as the engine binds it."""
    config = msgspec.to_builtins(parse_onerec(onerec_config(sizes, **changes)))
    weights = onerec_weights(config, seed)
    files = ModelFiles(config, Path(), {name: tuple(w.shape) for name, w in weights.items()})
    family = OneRec.build(files, SidConfig(sizes=tuple(sizes)), limits, torch.float32)
    for name, binding in family.bindings().items():
        owner, _, leaf = name.rpartition(".")
        setattr(family.get_submodule(owner), leaf, torch.nn.Parameter(weights[binding.sources[0]], requires_grad=False))
    return Engine(family.eval(), device=torch.device("cpu"), dtype=torch.float32)


def random_sids(sizes: Sequence[int], items: int, seed: int = 0) -> np.ndarray:
    """Distinct random SIDs [items, L] int32 in SID order."""
    generator = np.random.default_rng(seed)
    total = int(np.prod(sizes))
    flat = np.sort(generator.choice(total, size=min(items, total), replace=False))
    return np.stack(np.unravel_index(flat, sizes), axis=1).astype(np.int32)
