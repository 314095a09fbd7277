import pytest

from app.engine.families.qwen_config import read_config
from app.errors import Rejected
from tests.engine import tiny
from tests.engine.tiny import EXPERTS as SMALL

EXPERTS = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **SMALL}


def read(kind="qwen3", positions=64, **changes):
    return read_config(tiny.config(kind, **changes), kind, positions)


def test_both_generations_of_rotary_fields_mean_the_same():
    new = read(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert new == read(rope_theta=1e6) == read(rope_theta=1e6, rope_scaling=None)
    assert new.theta == 1e6
    linear = {"rope_type": "linear", "factor": 4.0}
    assert read(rope_parameters={**linear, "rope_theta": 5e5}) == read(rope_theta=5e5, rope_scaling=linear)
    assert read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0}).rope_factor == 4.0
    assert (read().theta, read().rope_factor) == (10000.0, 1.0)


def test_absent_fields_are_what_transformers_takes():
    assert read(head_dim=...).dim == 128
    assert read("qwen2", head_dim=...).dim == 4
    assert read(num_key_value_heads=None).kv_heads == 4
    assert (read().qkv_bias, read().out_bias, read().qk_norm) == (False, False, True)
    assert (read(attention_bias=True).qkv_bias, read(attention_bias=True).out_bias) == (True, True)
    assert (read("qwen2").qkv_bias, read("qwen2").out_bias, read("qwen2").qk_norm) == (True, False, False)


def test_a_sliding_window_that_never_matters_is_accepted():
    read(use_sliding_window=True, sliding_window=64, max_window_layers=0)
    read(use_sliding_window=True, sliding_window=8, max_window_layers=2)
    read(use_sliding_window=False, sliding_window=8, max_window_layers=0)
    read(layer_types=["full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=64)


FAULTS = [
    ({"hidden_size": ...}, "hidden_size", "missing required field `hidden_size`"),
    ({"num_key_value_heads": ...}, "num_key_value_heads", "missing required field"),
    ({"hidden_size": "16"}, "hidden_size", "Expected `int`, got `str`"),
    ({"vocab_size": 0}, "vocab_size", "Expected `int` >= 1"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps", "Expected `float` > 0"),
    ({"model_type": "qwen2_moe"}, "model_type", "`qwen2_moe`; the family of this deployment is `qwen3`"),
    ({"num_experts": 8}, "num_experts", "`qwen3` with routed experts is not served"),
    ({**EXPERTS, "num_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok", "3 of 2 experts"),
    ({**EXPERTS, "num_local_experts": 5}, "num_local_experts", "5 contradicts 4 in `num_experts`"),
    ({**EXPERTS, "num_experts": 5000}, "num_experts", "5000 are more than 4096"),
    ({**EXPERTS, "moe_intermediate_size": 0}, "moe_intermediate_size", "Expected `int` >= 1"),
    ({**EXPERTS, "architectures": ["Qwen3ForCausalLM"]}, "architectures", "only Qwen3MoeForCausalLM is served"),
    ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures", "only Qwen3ForCausalLM is served"),
    ({"hidden_act": "gelu"}, "hidden_act", "only `silu` is served"),
    ({"quantization_config": {"bits": 4}}, "quantization_config", "not served"),
    ({"num_key_value_heads": 3}, "num_key_value_heads", "4 query heads are not a multiple of 3"),
    ({"head_dim": 7}, "head_dim", "even head_dim"),
    ({"max_position_embeddings": 63}, "max_position_embeddings", "take 64"),
    ({"use_sliding_window": True, "sliding_window": 63, "max_window_layers": 1}, "use_sliding_window", "window of 63"),
    ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "layer_types", "window of 8"),
    ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None}, "layer_types", "window of None"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types", "`linear_attention` is not served"),
    ({"layer_types": ["full_attention"]}, "layer_types", "1 entry for 2 layers"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type", "`yarn`"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.rope_type", "`dynamic`"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "rope_parameters.rope_type", "`llama3`"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_parameters.factor", "no positive number"),
    ({"num_hidden_layers": 4097}, "num_hidden_layers", "Expected `int` <= 4096"),
    ({"head_dim": 2**16 + 2}, "head_dim", "Expected `int` <= 65536"),
    ({"rope_parameters": {"rope_theta": 1e6, "rope_type": ["linear"]}}, "rope_parameters.rope_type", "`['linear']`"),
    ({"rope_parameters": {"rope_theta": 10**400}}, "rope_parameters.rope_theta", "no positive number"),
    ({"rope_parameters": {"rope_theta": "big"}}, "rope_parameters.rope_theta", "no positive number"),
    ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4}, "rope_theta", "contradicts"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.full_attention", "not known"),
    ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "linear"}}, "rope_scaling", "contradicts"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor", "only 1 is served"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor", "only 1 is served"),
]


@pytest.mark.parametrize(("changes", "field", "message"), FAULTS)
def test_a_configuration_that_is_not_served_is_refused_with_its_field(changes, field, message):
    with pytest.raises(Rejected) as caught:
        read(**changes)
    assert caught.value.location == f"config.json: {field}"
    assert message in caught.value.message


def test_qwen2_without_its_biases_is_refused():
    with pytest.raises(Rejected, match="contradicts that") as caught:
        read("qwen2", attention_bias=False)
    assert caught.value.location == "config.json: attention_bias"
