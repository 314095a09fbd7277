"""transformers' own beam search over Gated DeltaNet hybrids finds the same items with the same scores (OneLA).

transformers carries a recurrent state for every beam; ours are one S_ctx a request and records. Its chunked prefill,
its recurrent decode and our replay round differently, so near-ties are 3e-4 wide here.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from app.engine.registry import family
from app.engine.weights import load
from tests.oracles import checkpoints
from tests.oracles.checkpoints import Case
from tests.oracles.test_transformers import assert_equal_up_to_near_ties, generate

EPS = 3e-4
CPU = torch.device("cpu")
WIDTHS = [1, 2, 16, 64]
KINDS = ["qwen3_5", "qwen3_5_conditional", "qwen3_next", "qwen3_next_experts"]
PROMPTS = [(9, 4, 11, 6, 7, 8), (5,), tuple(range(4, 30)) * 3, (6, 7)]
SETTINGS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6, "partial_rotary_factor": 0.5}
EXPERTS = checkpoints.EXPERTS | {"shared_expert_intermediate_size": 20}
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}


def make_model(kind: str, case: Case, *, seed: int, **config: Any) -> Any:
    import transformers
    from transformers.models import qwen3_5

    torch.manual_seed(seed)
    settings = {"vocab_size": case.vocabulary} | SETTINGS | config
    if kind.startswith("qwen3_next"):
        experts = EXPERTS if kind == "qwen3_next_experts" else {"num_experts": 0}
        model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**experts | settings))
    elif kind == "qwen3_5":
        model = qwen3_5.Qwen3_5ForCausalLM(qwen3_5.Qwen3_5TextConfig(**settings))
    else:
        tied = {"tie_word_embeddings": settings.get("tie_word_embeddings", False)}
        whole = qwen3_5.Qwen3_5Config(text_config=settings, vision_config=VISION, **tied)
        model = qwen3_5.Qwen3_5ForConditionalGeneration(whole)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "linear_attn.norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "norm" in name:
                parameter.uniform_(-0.5, 0.5)
            elif name.endswith("A_log"):
                parameter.uniform_(-4.0, 0.5)  # from hardly any decay to a strong one: old tokens matter
            elif "conv1d" in name:
                parameter.normal_(0, 0.5)
    return model.eval()


def load_case(path, case, limits):
    return load(path, family("qwen3_5"), case.sid, limits, device=CPU)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(5, 8, 12), (64, 16, 16), (5, 6, 7, 8)], ids=lambda sizes: "x".join(map(str, sizes)))
def test_generate_finds_the_same_items(kind, sizes, tmp_path):
    case = checkpoints.make_case("hybrid", sizes, 300, contiguous=sizes[0] != 5, seed=sum(sizes))
    model = make_model(kind, case, seed=len(sizes), tie_word_embeddings=sizes[0] == 64)
    checkpoints.save(model, case, tmp_path)
    limits = checkpoints.make_limits(case, max(WIDTHS), len(PROMPTS), context=80)
    engine = load_case(tmp_path, case, limits)
    arena = engine.new_arena(limits)
    for width, normalize in itertools.product(WIDTHS, ["full", "valid"]):
        ours = checkpoints.search(engine, case, PROMPTS, [width] * len(PROMPTS), normalize, arena)
        theirs = generate(model, case, PROMPTS, width, normalize)
        for mine, other in zip(ours, theirs, strict=True):
            assert_equal_up_to_near_ties(mine, other, EPS)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3_5", {"attention_bias": True}),
        ("qwen3_5", {"num_key_value_heads": 4, "head_dim": 8, "rms_norm_eps": 1e-2}),
        ("qwen3_5", {"linear_conv_kernel_dim": 2}),
        ("qwen3_5", {"linear_conv_kernel_dim": 7, "linear_num_key_heads": 4}),
        ("qwen3_5", {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}),
        ("qwen3_5", {"rope_parameters": LINEAR_ROPE}),
        ("qwen3_next", {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_value_head_dim": 5}),
        ("qwen3_next", {"attention_bias": True}),
        ("qwen3_next_experts", {"norm_topk_prob": False, "mlp_only_layers": [0, 3]}),
        ("qwen3_next_experts", {"decoder_sparse_step": 2, "num_experts_per_tok": 1}),
    ],
)  # fmt: skip
def test_every_configuration_value_that_matters_is_read(kind, config, tmp_path):
    case = checkpoints.make_case("values", (6, 7, 8), 200, contiguous=False, seed=5)
    model = make_model(kind, case, seed=2, **config)
    checkpoints.save(model, case, tmp_path)
    limits = checkpoints.make_limits(case, 16, 2)
    engine = load_case(tmp_path, case, limits)
    ours = checkpoints.search(engine, case, PROMPTS[:2], [16, 16], "full", engine.new_arena(limits))
    for mine, other in zip(ours, generate(model, case, PROMPTS[:2], 16, "full"), strict=True):
        assert_equal_up_to_near_ties(mine, other, EPS)
