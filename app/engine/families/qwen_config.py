"""A checkpoint of Qwen2ForCausalLM, Qwen3ForCausalLM or Qwen3MoeForCausalLM: its tensors, and its config.json, of which
every value that changes the computation is read or refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta
from torch import Tensor

from app.engine.families.base import fields_of
from app.engine.families.qwen_moe import expert_parts, read_experts
from app.engine.moe import Routing
from app.errors import Rejected, counted

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Layers = Annotated[int, Meta(ge=1, le=4096)]  # modules are made of every one before a tensor is looked for
Head = Annotated[int, Meta(ge=1, le=2**16)]  # a table of rotary positions is, too
_FULL, _SLIDING = "full_attention", "sliding_attention"
_CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_TYPES = {"qwen2": ("qwen2",), "qwen3": ("qwen3", "qwen3_moe")}
"""model_type of the checkpoints that a family takes."""


class RawConfig(msgspec.Struct, frozen=True):
    """The fields as transformers 4 and 5 write them; other fields (dropout, initialisation, dates) change nothing."""

    model_type: str
    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Layers
    num_attention_heads: Positive
    num_key_value_heads: Positive | None
    head_dim: Head | None = None
    architectures: list[str] | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Annotated[float, Meta(gt=0, lt=1)] = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool | None = None
    max_position_embeddings: Positive = 32768
    rope_theta: Annotated[float, Meta(gt=0)] | None = None
    rope_scaling: dict[str, object] | None = None
    rope_parameters: dict[str, object] | None = None
    partial_rotary_factor: float = 1.0
    use_sliding_window: bool = False
    sliding_window: Positive | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    quantization_config: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class QwenConfig:
    """What the computation needs. theta, rope_factor: see `layers.rotary_table`; experts: of each layer, None: a dense
    one."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    heads: int
    kv_heads: int
    dim: int
    eps: float
    theta: float
    rope_factor: float
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    experts: tuple[Routing | None, ...]


class Part(NamedTuple):
    """A checkpoint's tensor and the parameter of `qwen.Block` that holds it or `rows` of it, `times` times in a row."""

    parameter: str
    source: str
    shape: tuple[int, ...]
    times: int = 1
    rows: Tensor | None = None


def block_parts(c: QwenConfig, i: int) -> list[Part]:
    """Layer i of the checkpoint, in the order in which the parts of a parameter lie in it."""
    d, f, q, kv = c.hidden_size, c.intermediate_size, c.heads * c.dim, c.kv_heads * c.dim
    layer, sizes = f"model.layers.{i}", {"q": q, "k": kv, "v": kv}
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    parts = [
        Part("input_norm", f"{layer}.input_layernorm.weight", (d,)),
        *(Part("qkv", f"{attention}.{x}_proj.weight", (size, d)) for x, size in sizes.items()),
        Part("out", f"{attention}.o_proj.weight", (d, q)),
        Part("post_norm", f"{layer}.post_attention_layernorm.weight", (d,)),
    ]
    routing = c.experts[i]
    if routing is None:
        parts += [Part("gate_up", f"{mlp}.{x}_proj.weight", (f, d)) for x in ("gate", "up")]
        parts.append(Part("down", f"{mlp}.down_proj.weight", (d, f)))
    else:
        parts += [
            Part(f"experts.{piece.parameter}", source, piece.shape, rows=piece.rows)
            for source, piece in expert_parts(routing, d, mlp)
        ]
    if c.qkv_bias:
        parts += [Part("qkv_bias", f"{attention}.{x}_proj.bias", (size,)) for x, size in sizes.items()]
    if c.out_bias:
        parts.append(Part("out_bias", f"{attention}.o_proj.bias", (d,)))
    if c.qk_norm:
        parts.append(Part("qk_norm", f"{attention}.q_norm.weight", (c.dim,), c.heads))
        parts.append(Part("qk_norm", f"{attention}.k_norm.weight", (c.dim,), c.kv_heads))
    return parts


def read_config(config: Mapping[str, object], family: str, positions: int) -> QwenConfig:
    """Read and check.

    family      "qwen2" or "qwen3"
    positions   the longest sequence that will be computed
    Raises Rejected("bad_config" | "unsupported_config") with location "config.json: field".
    """
    try:
        raw = msgspec.convert(fields_of(config, RawConfig), RawConfig)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        missing = re.search(r"missing required field `(\w+)`", message)
        raise _bad(path.rstrip("`") or (missing[1] if missing else "$"), message, code="bad_config") from error
    _check_model(raw, family)
    _check_positions(raw, positions)
    theta, factor = _rope(raw)
    heads, kv_heads = raw.num_attention_heads, raw.num_key_value_heads or raw.num_attention_heads
    if heads % kv_heads:
        raise _bad("num_key_value_heads", f"{heads} query heads are not a multiple of {kv_heads}", code="bad_config")
    qwen3 = family == "qwen3"
    if raw.head_dim is None and raw.model_type != "qwen3" and raw.hidden_size % heads:
        message = f"hidden_size {raw.hidden_size} is not a multiple of {heads} heads"
        raise _bad("num_attention_heads", message, code="bad_config")
    dim = raw.head_dim or (128 if raw.model_type == "qwen3" else raw.hidden_size // heads)  # as transformers
    if dim % 2:
        raise _bad("head_dim", f"rotary positions need an even head_dim, not {dim}", code="bad_config")
    return QwenConfig(
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_hidden_layers=raw.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        eps=raw.rms_norm_eps,
        theta=theta,
        rope_factor=factor,
        tie_word_embeddings=raw.tie_word_embeddings,
        qkv_bias=bool(raw.attention_bias) if qwen3 else True,
        out_bias=bool(raw.attention_bias) if qwen3 else False,
        qk_norm=qwen3,
        experts=read_experts(config, raw.model_type, raw.num_hidden_layers),
    )


def _bad(field: str, message: str, *, code: str = "unsupported_config") -> Rejected:
    return Rejected(code, message, location=f"config.json: {field}")


def _check_model(raw: RawConfig, family: str) -> None:
    if raw.model_type not in _TYPES[family]:
        raise _bad("model_type", f"`{raw.model_type}`; the family of this deployment is `{family}`")
    wanted = _CLASSES[raw.model_type]
    if raw.architectures is not None and wanted not in raw.architectures:
        raise _bad("architectures", f"{raw.architectures}; only {wanted} is served")
    if raw.hidden_act != "silu":
        raise _bad("hidden_act", f"`{raw.hidden_act}`; only `silu` is served")
    if raw.quantization_config is not None:
        raise _bad("quantization_config", "quantised checkpoints are not served")
    if family == "qwen2" and raw.attention_bias is False:
        raise _bad("attention_bias", "Qwen2 has biases on q, k and v; `false` contradicts that")


def _check_positions(raw: RawConfig, positions: int) -> None:
    if positions > raw.max_position_embeddings:
        most = raw.max_position_embeddings
        message = f"{most} positions are too few: `limits.context`, the prefix and the SID take {positions}"
        raise _bad("max_position_embeddings", message)
    kinds = raw.layer_types
    if kinds is None:
        sliding = raw.use_sliding_window and raw.max_window_layers < raw.num_hidden_layers
        field = "use_sliding_window"
    elif len(kinds) != raw.num_hidden_layers:
        message = f"{counted(len(kinds), 'entry', 'entries')} for {counted(raw.num_hidden_layers, 'layer')}"
        raise _bad("layer_types", message, code="bad_config")
    elif unknown := set(kinds) - {_FULL, _SLIDING}:
        raise _bad("layer_types", f"`{min(unknown)}` is not served")
    else:
        sliding, field = _SLIDING in kinds, "layer_types"
    if sliding and (raw.sliding_window is None or positions > raw.sliding_window):
        message = f"a sliding window of {raw.sliding_window} is shorter than the {positions} positions of a sequence"
        raise _bad(field, message)


def _rope(raw: RawConfig) -> tuple[float, float]:
    """(theta, factor) from transformers 5's `rope_parameters` or transformers 4's `rope_theta` and `rope_scaling`."""
    if raw.partial_rotary_factor != 1.0:
        raise _bad("partial_rotary_factor", f"{raw.partial_rotary_factor}; only 1 is served")
    if raw.rope_parameters is not None and raw.rope_scaling is not None and raw.rope_parameters != raw.rope_scaling:
        raise _bad("rope_scaling", "contradicts `rope_parameters`", code="bad_config")
    field = "rope_scaling" if raw.rope_parameters is None else "rope_parameters"
    values = dict(raw.rope_parameters or raw.rope_scaling or {})
    theta = _positive(values.pop("rope_theta", raw.rope_theta or 10000.0), field, "rope_theta")
    if raw.rope_theta is not None and theta != raw.rope_theta:
        raise _bad("rope_theta", f"{raw.rope_theta} contradicts {theta} in `{field}`", code="bad_config")
    kind = values.pop("rope_type", values.pop("type", "default"))
    values.pop("type", None)
    factor = values.pop("factor", 1.0)
    if kind not in ("default", "linear"):  # no set: it may be a list
        raise _bad(f"{field}.rope_type", f"`{kind}`; `default` and `linear` are served")
    if values.pop("partial_rotary_factor", 1.0) != 1.0:
        raise _bad(f"{field}.partial_rotary_factor", "only 1 is served")
    values.pop("original_max_position_embeddings", None)  # read by other rope types only
    if values:
        raise _bad(f"{field}.{min(values)}", "is not known")
    return theta, _positive(factor, field, "factor") if kind == "linear" else 1.0


def _positive(value: object, field: str, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
        raise _bad(f"{field}.{name}", f"{value!r} is no positive number", code="bad_config")
    return float(value)
