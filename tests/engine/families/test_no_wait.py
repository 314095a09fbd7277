"""No family asks the device for anything, in its contexts or in a step: on one that has shapes and kinds only, so that
there is nothing to read, and which has no kernel. What kernels and torch's attention stand behind is one node there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from app.config import Limits, SidConfig
from app.core import Ragged, Rows
from app.engine import registry
from app.engine.families.base import ModelFiles
from tests import support
from tests.engine import hybrid, tiny
from tests.engine.families import test_onerec
from tests.no_wait import NoWait

DEVICE = torch.device("meta")
LIMITS = Limits(widths=(64,) * 3, rows=256, batch=4, context=24)
REQUESTS, ROWS = 3, 150


class Kind(NamedTuple):
    """config.json of a model that `family` serves."""

    family: str
    config: dict[str, Any]


KINDS = {
    **{f"onerec {n}": Kind("onerec", {**test_onerec.BASE, **one}) for n, one in enumerate(test_onerec.SHAPES)},
    "demo": Kind("onerec", support.onerec_config(tiny.SIZES)),
    **{name: Kind(name.removesuffix("_moe"), tiny.config(name)) for name in tiny.CLASSES},
    "biased": Kind("qwen3", tiny.config("qwen3", attention_bias=True, tie_word_embeddings=True)),
    **{name: Kind("qwen3_5", hybrid.config(name)) for name in hybrid.CLASSES},
    "hybrid's experts": Kind("qwen3_5", hybrid.config("qwen3_next", **hybrid.EXPERTS)),
    "as the kernel takes it": Kind(
        "qwen3_5", hybrid.config(linear_key_head_dim=128, linear_value_head_dim=128)
    ),
}  # fmt: skip


def test_every_family_is_looked_at():
    assert {kind.family for kind in KINDS.values()} == set(registry.names())


@pytest.fixture(params=KINDS)
def world(request):
    """A family without memory, its sizes, and an arena."""
    kind = KINDS[request.param]
    sid = tiny.SID if kind.family != "onerec" else SidConfig(sizes=tuple(kind.config["sizes"]))
    limits = Limits(widths=(64,) * len(sid.sizes), rows=256, batch=4, context=24)
    files = ModelFiles(kind.config, Path(), {})
    family = registry.family(kind.family).build(files, sid, limits, torch.bfloat16).to(DEVICE).requires_grad_(False)
    slots = max(family.steps - 1, 1)
    arena = {
        spec.name: torch.empty(
            *((limits.batch,) if spec.scope == "request" else (slots, limits.rows)), *spec.shape, dtype=spec.dtype,
            device=DEVICE,
        )
        for spec in family.state_specs()
    }  # fmt: skip
    return family, sid.sizes, arena


def numbers(*shape):
    return torch.empty(shape, dtype=torch.int32, device=DEVICE)


def contexts(family, *, known):
    """Inputs of some requests, every other one with a request that has none. known: whether the host counts them."""
    found = {}
    for at, spec in enumerate(family.input_specs()):
        counts = tuple(min(n, spec.positions) * (not at or n % 2) for n in (11, 2, 24)[:REQUESTS])
        values = torch.empty(sum(counts), *spec.shape, dtype=spec.dtype, device=DEVICE)
        found[spec.name] = Ragged(values, numbers(REQUESTS + 1), counts if known else ())
    return found


@torch.inference_mode()
def test_contexts_and_steps_ask_for_nothing(world):
    family, sizes, arena = world
    for known in (True, False) if family.contexts_on_device else (True,):
        inputs = contexts(family, known=known)
        with NoWait():
            first = family.encode(inputs, arena)
        assert (first is not None) == family.first_from_encode
        assert first is None or first.logits.shape == (REQUESTS, sizes[0])
    for t in range(1 + family.first_from_encode, family.steps + 1):
        n = REQUESTS if t == 1 else ROWS
        for compact in (False, True):
            rows = Rows(numbers(n), numbers(n), numbers(REQUESTS + 1), numbers(n, t - 1), compact, full=not compact)
            with NoWait():
                output = family.step(t, rows, arena)
            assert output.logits.shape == (n, sizes[t - 1])
