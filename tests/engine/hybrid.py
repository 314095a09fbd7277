"""Small weights versions of Gated DeltaNet hybrids with Hugging Face's names, made without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from app.config import Limits, SidConfig
from app.engine.engine import Engine
from app.engine.registry import family
from app.engine.weights import load
from tests.engine import tiny
from tests.engine.tiny import CPU, LIMITS, SID, VOCABULARY

LINEAR, FULL = "linear_attention", "full_attention"
CLASSES = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_next": "Qwen3NextForCausalLM",
}


EXPERTS = tiny.EXPERTS | {"shared_expert_intermediate_size": 20}


def text(**changes: Any) -> dict[str, Any]:
    values = {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "layer_types": [LINEAR, FULL, LINEAR],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    }
    return {key: value for key, value in (values | changes).items() if value is not ...}


def config(kind: str = "qwen3_5_text", **changes: Any) -> dict[str, Any]:
    """config.json; `changes` go into the text model's values, `...` leaves a field out."""
    head = {"model_type": kind, "architectures": [CLASSES[kind]]}
    if kind == "qwen3_5":
        return {**head, "text_config": text(**changes), "vision_config": {"depth": 1}}
    return text(**head | ({"num_experts": 0} if kind == "qwen3_next" else {}) | changes)


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    kind, c = config["model_type"], config.get("text_config", config)
    trunk, d, f = "model.language_model" if kind == "qwen3_5" else "model", c["hidden_size"], c["intermediate_size"]
    hk, hv, k, v = (c[f"linear_{x}"] for x in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
    keys, values, dim = hk * k, hv * v, c["head_dim"]
    q, kv, kernel = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim, c.get("linear_conv_kernel_dim", 4)
    shapes: dict[str, tuple[int, ...]] = {
        f"{trunk}.embed_tokens.weight": (c["vocab_size"], d),
        f"{trunk}.norm.weight": (d,),
    }
    for i, layer_kind in enumerate(c["layer_types"]):
        layer = f"{trunk}.layers.{i}"
        shapes |= {f"{layer}.{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
        if c.get("num_experts") and i not in c.get("mlp_only_layers", ()):
            shapes |= tiny.experts(c, f"{layer}.mlp")
        else:
            shapes |= {f"{layer}.mlp.{x}_proj.weight": (f, d) for x in ("gate", "up")}
            shapes[f"{layer}.mlp.down_proj.weight"] = (d, f)
        if layer_kind == FULL:
            sizes = (("q", 2 * q), ("k", kv), ("v", kv))
            shapes |= {f"{layer}.self_attn.{x}_proj.weight": (size, d) for x, size in sizes}
            shapes |= {f"{layer}.self_attn.{x}_norm.weight": (dim,) for x in "qk"}
            shapes[f"{layer}.self_attn.o_proj.weight"] = (d, q)
            continue
        sizes = {"qkvz": 2 * keys + 2 * values, "ba": 2 * hv}
        if kind != "qwen3_next":
            sizes = {"qkv": 2 * keys + values, "z": values, "b": hv, "a": hv}
        shapes |= {f"{layer}.linear_attn.in_proj_{x}.weight": (size, d) for x, size in sizes.items()}
        shapes[f"{layer}.linear_attn.conv1d.weight"] = (2 * keys + values, 1, kernel)
        shapes |= {f"{layer}.linear_attn.{x}": (hv,) for x in ("A_log", "dt_bias")}
        shapes[f"{layer}.linear_attn.norm.weight"] = (v,)
        shapes[f"{layer}.linear_attn.out_proj.weight"] = (d, values)
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], d)
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        made[name] = torch.randn(shape, generator=generator) * (0.5 if len(shape) > 1 else 0.3)
        if name.endswith("linear_attn.norm.weight"):
            made[name] += 1.0
        elif name.endswith("A_log"):
            made[name] -= 2.0  # little decay: what beams wrote early still matters late
    return made


def write(directory: Path, kind: str = "qwen3_5_text", *, seed: int = 0, **changes: Any) -> Path:
    """A weights version; the conditional kind has a vision tensor and one of multi-token prediction beside it."""
    values = config(kind, **changes)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    made = tensors(values, seed)
    if kind == "qwen3_5":
        made |= {"model.visual.pos_embed.weight": torch.zeros(2, 3), "mtp.norm.weight": torch.zeros(2)}
    save_file(made, directory / "model.safetensors")
    return directory


def engine(directory: Path, sid: SidConfig = SID, limits: Limits = LIMITS, **how: Any) -> Engine:
    return load(directory, family("qwen3_5"), sid, limits, **({"device": CPU} | how))
