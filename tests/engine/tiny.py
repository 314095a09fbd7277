"""Small weights versions with Hugging Face's names, made without transformers, and the seam's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from app.config import Limits, SidConfig
from app.core import Ragged, Rows, TokenIds
from app.engine.engine import Engine
from app.engine.registry import family
from app.engine.weights import load

CPU = torch.device("cpu")
SIZES = (5, 6, 7)
BASES = (10, 15, 21)
VOCABULARY = 40
LIMITS = Limits(widths=(16,) * 3, rows=64, batch=4, context=24)
CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [0]}
SID = SidConfig(sizes=SIZES, token_base=BASES, prefix=(2,))


def config(kind: str = "qwen3", **changes: Any) -> dict[str, Any]:
    values = {
        "model_type": kind,
        "architectures": [CLASSES[kind]],
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
    }
    values |= EXPERTS if kind == "qwen3_moe" else {}
    return {key: value for key, value in (values | changes).items() if value is not ...}


def experts(config: dict[str, Any], mlp: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer's experts."""
    d, f, shared = (config.get(x) for x in ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"))
    owners = {f"experts.{number}": f for number in range(config["num_experts"])}
    shapes = {f"{mlp}.gate.weight": (config["num_experts"], d)}
    if shared:
        owners["shared_expert"], shapes[f"{mlp}.shared_expert_gate.weight"] = shared, (1, d)
    for owner, hidden in owners.items():
        shapes |= {f"{mlp}.{owner}.{x}_proj.weight": (hidden, d) for x in ("gate", "up")}
        shapes[f"{mlp}.{owner}.down_proj.weight"] = (d, hidden)
    return shapes


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    d, f, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], d),
        "model.norm.weight": (d,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{x}_proj.weight": (size, d) for x, size in (("q", q), ("k", kv), ("v", kv))}
        shapes[f"{layer}.self_attn.o_proj.weight"] = (d, q)
        if config.get("num_experts") and i not in config["mlp_only_layers"]:
            shapes |= experts(config, f"{layer}.mlp")
        else:
            shapes |= {f"{layer}.mlp.{x}_proj.weight": (f, d) for x in ("gate", "up")}
            shapes[f"{layer}.mlp.down_proj.weight"] = (d, f)
        if config["model_type"] != "qwen2":
            shapes |= {f"{layer}.self_attn.{x}_norm.weight": (dim,) for x in "qk"}
        else:
            shapes |= {f"{layer}.self_attn.{x}_proj.bias": (size,) for x, size in (("q", q), ("k", kv), ("v", kv))}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    return {name: torch.randn(shape) * 0.3 + (1.0 if "norm" in name else 0.0) for name, shape in shapes.items()}


def write(directory: Path, kind: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """A weights version; `changes` go into config.json, `...` leaves a field out. Tensors follow the changes but for
    the model's type."""
    values = config(kind, **changes)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    save_file(
        tensors(config(kind) | {k: v for k, v in values.items() if k != "model_type"}, seed),
        directory / "model.safetensors",
    )
    return directory


def engine(directory: Path, kind: str = "qwen3", sid: SidConfig = SID, limits: Limits = LIMITS, **how: Any) -> Engine:
    return load(directory, family(kind.removesuffix("_moe")), sid, limits, **({"device": CPU} | how))


def contexts(engine: Engine, prompts: list[tuple[int, ...]]) -> dict[str, Ragged]:
    prepared = [engine.prepare(TokenIds(prompt))["tokens"] for prompt in prompts]
    start = np.cumsum([0, *map(len, prepared)], dtype=np.int32)
    return {"tokens": Ragged(torch.from_numpy(np.concatenate(prepared)), torch.from_numpy(start))}


def rows(
    widths: list[int], codes: list[int], ancestry: torch.Tensor, *, compact: bool = False, full: bool = True
) -> Rows:
    """Rows of requests 0..R-1 with these widths; ancestry [N, t - 1]."""
    return Rows(
        codes=torch.tensor(codes, dtype=torch.int32),
        request=torch.arange(len(widths)).repeat_interleave(torch.tensor(widths)).int(),
        row_start=torch.tensor([0, *np.cumsum(widths)], dtype=torch.int32),
        ancestry=ancestry.int(),
        compact=compact,
        full=full,
    )
