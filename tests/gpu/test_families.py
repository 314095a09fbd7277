"""Every family on a GPU: float32 as on a CPU, 16 bit with the kernels as on a CPU within the rounding of 16 bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from app.config import Limits, SidConfig
from app.core import History, Rows
from app.engine.registry import family
from app.engine.weights import load
from app.ops.attention import launch
from app.runtime.contexts import batch_inputs
from tests import support
from tests.engine import hybrid, tiny

LIMITS = Limits(widths=(16,) * 3, rows=64, batch=4, context=24)
KINDS = {
    "onerec": "onerec", "onerec_grouped": "onerec", "onerec_experts": "onerec", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3", "qwen3_5": "qwen3_5", "qwen3_next_experts": "qwen3_5",
}  # fmt: skip
"""Tiny models, and the family that serves each."""
ALL = {"num_experts_per_tok": 4, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
"""A row goes to all experts, so that no rounding sends it elsewhere."""
PROMPTS = [(3, 4, 5, 6, 7), (9,), tuple(range(3, 23)), (9, 8, 7, 6, 5)]
WIDTHS = [4, 1, 6, 3]


def write(kind, directory):
    """A weights version of a tiny random model."""
    if kind == "qwen3_5":
        hybrid.write(directory)
    elif kind == "qwen3_next_experts":
        hybrid.write(directory, "qwen3_next", **hybrid.EXPERTS | ALL)
    elif kind == "qwen3_moe":
        tiny.write(directory, kind, **ALL)
    elif kind.startswith("onerec"):
        experts = {"routed": 5, "top": 5, "hidden": 16, "shared": 1, "dense": 1, "normalise": False}
        groups = 2 if kind == "onerec" else 1
        changes = {"experts": experts} if kind == "onerec_experts" else {}
        config = support.onerec_config(tiny.SIZES, self_groups=groups, **changes)
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        save_file(support.onerec_weights(config), directory / "model.safetensors")
    else:
        tiny.write(directory, kind)
    return directory


def engine(kind, directory, precision, device):
    sid = SidConfig(sizes=tiny.SIZES) if kind.startswith("onerec") else tiny.SID
    return load(directory, family(KINDS[kind]), sid, LIMITS, precision=precision, device=torch.device(device))


def outputs(engine, kind, compact):
    """Logits of steps 1..L on the CPU in float32; every row has its own path."""
    arena = engine.new_arena(LIMITS)
    generator = torch.Generator().manual_seed(3)
    if kind.startswith("onerec"):
        asked = [
            History(torch.randint(0, 5, (items, 3), generator=generator).numpy().astype("int32"))
            for items in (4, 1, 9, 2)
        ]
        prepared = [engine.prepare(one) for one in asked]
    else:
        prepared = [engine.prepare(tiny.TokenIds(prompt)) for prompt in PROMPTS]
    first = engine.encode(batch_inputs(engine.input_specs(), prepared, engine.device), arena)
    found = [] if first is None else [first]
    n = sum(WIDTHS)
    codes = torch.stack([torch.randint(0, size, (n,), generator=generator) for size in tiny.SIZES])
    request = torch.arange(4).repeat_interleave(torch.tensor(WIDTHS))
    start = torch.tensor([0, 4, 5, 11, 14])
    for t in range(1 if first is None else 2, 4):
        own = torch.arange(n).unsqueeze(1).repeat(1, t - 1)
        code = codes[t - 2] if t > 1 else torch.zeros(n)
        moved = (x.to(engine.device, torch.int32) for x in (code, request, start, own))
        found.append(engine.step(t, Rows(*moved, compact, True), arena))
    return [one.logits.float().cpu() for one in found]


def errors(found, expected):
    """Largest error of each step, in standard deviations of its logits."""
    return [float((a - b).abs().max() / b[b.isfinite()].std()) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_family_on_a_gpu_is_as_near_to_float32_as_on_a_cpu(kind, precision, compact, tmp_path, monkeypatch):
    launches = []
    right = launch.attend
    monkeypatch.setattr(launch, "attend", lambda *x, **how: launches.append(1) or right(*x, **how))
    directory = write(kind, tmp_path / "weights")
    expected = outputs(engine(kind, directory, "float32", "cpu"), kind, compact)
    here = errors(outputs(engine(kind, directory, precision, "cpu"), kind, compact), expected)
    there = errors(outputs(engine(kind, directory, precision, "cuda"), kind, compact), expected)
    assert all(b < 3 * a + 2e-5 for a, b in zip(here, there, strict=True)), (here, there)
    assert bool(launches) == (precision != "float32"), "the kernel runs in 16 bit, and only there"
