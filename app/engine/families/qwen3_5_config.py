"""A checkpoint of Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration (its text model) or Qwen3NextForCausalLM:
its tensors, and its config.json, of which every value that changes the computation is read or refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from app.engine.families.base import fields_of
from app.engine.families.qwen_moe import expert_parts, read_experts
from app.engine.moe import Routing
from app.errors import Rejected, counted

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Layers = Annotated[int, Meta(ge=1, le=4096)]  # modules are made of every one before a tensor is looked for
Head = Annotated[int, Meta(ge=1, le=2**16)]  # a table of rotary positions is, too
Share = Annotated[float, Meta(gt=0, le=1)]
LINEAR, FULL = "linear_attention", "full_attention"
_CLASSES = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_next": "Qwen3NextForCausalLM",
}


class RawConfig(msgspec.Struct, frozen=True):
    """The fields as transformers writes them, with its defaults; other fields (dropout, initialisation, the vision
    tower, multi-token prediction) change nothing."""

    model_type: str
    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Layers
    num_attention_heads: Positive
    num_key_value_heads: Positive
    linear_num_key_heads: Positive = 16
    linear_num_value_heads: Positive = 32
    linear_key_head_dim: Positive = 128
    linear_value_head_dim: Positive = 128
    linear_conv_kernel_dim: Positive = 4
    head_dim: Head = 256
    architectures: list[str] | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Annotated[float, Meta(gt=0, lt=1)] = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attn_output_gate: bool = True
    max_position_embeddings: Positive = 32768
    rope_theta: Annotated[float, Meta(gt=0)] | None = None
    rope_scaling: dict[str, object] | None = None
    rope_parameters: dict[str, object] | None = None
    partial_rotary_factor: Share | None = None
    layer_types: list[str] | None = None
    full_attention_interval: Positive = 4
    quantization_config: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """What the computation needs.

    kinds     of each layer, `LINEAR` or `FULL`
    experts   of each layer, None: a dense one
    fused     whether the projections of the linear layers are stored as Qwen3-Next has them
    trunk     the name in front of the text model's tensors
    rotary    dims of a head that rotate; theta, rope_factor: see `layers.rotary_table`
    key_heads, value_heads, key_dim, value_dim, kernel   of the linear layers: HK, HV, K, V, and the convolution's size
    """

    kinds: tuple[str, ...]
    experts: tuple[Routing | None, ...]
    fused: bool
    trunk: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    dim: int
    rotary: int
    theta: float
    rope_factor: float
    eps: float
    tie_word_embeddings: bool
    bias: bool
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """HK * K, the size of all keys of a position."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """HV * V."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What the convolution runs over: q, k and v."""
        return 2 * self.keys + self.values


class Part(NamedTuple):
    """A checkpoint's tensor and the parameter of a block that holds it (or `rows` of it), `times` times in a row."""

    parameter: str
    source: str
    shape: tuple[int, ...]
    times: int = 1
    rows: Tensor | None = None


def block_parts(c: HybridConfig, i: int) -> list[Part]:
    """Layer i of the checkpoint, in the order in which the parts of a parameter lie in it."""
    d, f = c.hidden_size, c.intermediate_size
    layer = f"{c.trunk}.layers.{i}"
    routing, mlp = c.experts[i], f"{layer}.mlp"
    feed = [
        Part("gate_up", f"{mlp}.gate_proj.weight", (f, d)),
        Part("gate_up", f"{mlp}.up_proj.weight", (f, d)),
        Part("down", f"{mlp}.down_proj.weight", (d, f)),
    ]
    if routing is not None:
        feed = [
            Part(f"experts.{piece.parameter}", source, piece.shape, rows=piece.rows)
            for source, piece in expert_parts(routing, d, mlp)
        ]
    mixer = _linear_parts(c, f"{layer}.linear_attn") if c.kinds[i] == LINEAR else _full_parts(c, f"{layer}.self_attn")
    return [
        Part("input_norm", f"{layer}.input_layernorm.weight", (d,)),
        *mixer,
        Part("post_norm", f"{layer}.post_attention_layernorm.weight", (d,)),
        *feed,
    ]


def _full_parts(c: HybridConfig, name: str) -> list[Part]:
    d, q, kv = c.hidden_size, c.heads * c.dim, c.kv_heads * c.dim
    sizes = {"q": 2 * q, "k": kv, "v": kv}  # each query head has its gate beside it
    parts = [Part("qkv", f"{name}.{x}_proj.weight", (size, d)) for x, size in sizes.items()]
    parts.append(Part("out", f"{name}.o_proj.weight", (d, q)))
    parts.append(Part("qk_norm", f"{name}.q_norm.weight", (c.dim,), c.heads))
    parts.append(Part("qk_norm", f"{name}.k_norm.weight", (c.dim,), c.kv_heads))
    if c.bias:
        parts += [Part("qkv_bias", f"{name}.{x}_proj.bias", (size,)) for x, size in sizes.items()]
        parts.append(Part("out_bias", f"{name}.o_proj.bias", (d,)))
    return parts


def _linear_parts(c: HybridConfig, name: str) -> list[Part]:
    d, hv = c.hidden_size, c.value_heads
    parts = [
        Part("kernel", f"{name}.conv1d.weight", (c.channels, 1, c.kernel)),
        Part("a_log", f"{name}.A_log", (hv,)),
        Part("dt_bias", f"{name}.dt_bias", (hv,)),
        Part("o_norm", f"{name}.norm.weight", (c.value_dim,)),
        Part("out", f"{name}.out_proj.weight", (d, c.values)),
    ]
    if c.fused:
        group, k = hv // c.key_heads, c.key_dim
        qkvz = _unwoven(c.key_heads, (k, k, group * c.value_dim, group * c.value_dim))
        ba = _unwoven(c.key_heads, (group, group))
        parts.append(Part("qkvz", f"{name}.in_proj_qkvz.weight", (len(qkvz), d), rows=qkvz))
        parts.append(Part("ba", f"{name}.in_proj_ba.weight", (len(ba), d), rows=ba))
    else:
        parts.append(Part("qkvz", f"{name}.in_proj_qkv.weight", (c.channels, d)))
        parts.append(Part("qkvz", f"{name}.in_proj_z.weight", (c.values, d)))
        parts += [Part("ba", f"{name}.in_proj_{x}.weight", (hv, d)) for x in "ba"]
    return parts


def _unwoven(groups: int, sizes: tuple[int, ...]) -> Tensor:
    """Qwen3-Next stores a projection key head by key head, each with its own q, k, v and z: the rows in the order in
    which all q come first, then all k, and so on."""
    rows = torch.arange(groups * sum(sizes)).view(groups, -1)
    return torch.cat([part.reshape(-1) for part in torch.split(rows, list(sizes), 1)])


def read_config(config: Mapping[str, object], positions: int) -> HybridConfig:
    """Read and check; positions = the longest sequence that will be computed.

    Raises Rejected("bad_config" | "unsupported_config") with location "config.json: field".
    """
    place = "text_config." if config.get("model_type") == "qwen3_5" else ""
    raw = _convert(_text_config(config) if place else config, place)
    _check_model(raw, str(config.get("model_type")), config.get("architectures"))
    if positions > raw.max_position_embeddings:
        most = raw.max_position_embeddings
        message = f"{most} positions are too few: `limits.context`, the prefix and the SID take {positions}"
        raise _bad(f"{place}max_position_embeddings", message)
    if raw.num_attention_heads % raw.num_key_value_heads:
        message = f"{raw.num_attention_heads} query heads are not a multiple of {raw.num_key_value_heads}"
        raise _bad(f"{place}num_key_value_heads", message, code="bad_config")
    if raw.linear_num_value_heads % raw.linear_num_key_heads:
        message = f"{raw.linear_num_value_heads} value heads are not a multiple of {raw.linear_num_key_heads}"
        raise _bad(f"{place}linear_num_key_heads", message, code="bad_config")
    theta, factor, share = _rope(raw, place)
    rotary = int(raw.head_dim * share)
    if rotary < 2 or rotary % 2:
        message = f"{share} of a head of {raw.head_dim} are {rotary} dims; rotary positions need an even number"
        raise _bad(f"{place}partial_rotary_factor", message, code="bad_config")
    return HybridConfig(
        kinds=_kinds(raw, place),
        experts=read_experts(_text_config(config) if place else config, raw.model_type, raw.num_hidden_layers),
        fused=raw.model_type == "qwen3_next",
        trunk="model.language_model" if place else "model",
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        heads=raw.num_attention_heads,
        kv_heads=raw.num_key_value_heads,
        dim=raw.head_dim,
        rotary=rotary,
        theta=theta,
        rope_factor=factor,
        eps=raw.rms_norm_eps,
        tie_word_embeddings=raw.tie_word_embeddings or bool(config.get("tie_word_embeddings")),
        bias=raw.attention_bias,
        key_heads=raw.linear_num_key_heads,
        value_heads=raw.linear_num_value_heads,
        key_dim=raw.linear_key_head_dim,
        value_dim=raw.linear_value_head_dim,
        kernel=raw.linear_conv_kernel_dim,
    )


def _bad(field: str, message: str, *, code: str = "unsupported_config") -> Rejected:
    return Rejected(code, message, location=f"config.json: {field}")


def _text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise _bad("text_config", "is no object", code="bad_config")
    return {"model_type": "qwen3_5_text", **text}


def _convert(config: Mapping[str, object], place: str) -> RawConfig:
    try:
        return msgspec.convert(fields_of(config, RawConfig), RawConfig)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        missing = re.search(r"missing required field `(\w+)`", message)
        field = path.rstrip("`") or (missing[1] if missing else "$")
        raise _bad(f"{place}{field}", message, code="bad_config") from error


def _check_model(raw: RawConfig, model_type: str, architectures: object) -> None:
    if model_type not in _CLASSES:
        known = ", ".join(f"`{name}`" for name in _CLASSES)
        raise _bad("model_type", f"`{model_type}`; the family of this deployment takes {known}")
    if raw.model_type not in {model_type, "qwen3_5_text"}:
        raise _bad("text_config.model_type", f"`{raw.model_type}`; only `qwen3_5_text` is served")
    wanted = _CLASSES[model_type]
    if architectures is not None and not (isinstance(architectures, list) and wanted in architectures):
        raise _bad("architectures", f"{architectures}; only {wanted} is served for `{model_type}`")
    if raw.hidden_act != "silu":
        raise _bad("hidden_act", f"`{raw.hidden_act}`; only `silu` is served")
    if not raw.attn_output_gate:
        raise _bad("attn_output_gate", "attention without its output gate is not served")
    if raw.quantization_config is not None:
        raise _bad("quantization_config", "quantised checkpoints are not served")


def _kinds(raw: RawConfig, place: str) -> tuple[str, ...]:
    """What each layer is."""
    layers, every = range(raw.num_hidden_layers), raw.full_attention_interval
    if raw.layer_types is None:
        return tuple(LINEAR if (i + 1) % every else FULL for i in layers)
    if len(raw.layer_types) != raw.num_hidden_layers:
        message = f"{counted(len(raw.layer_types), 'entry', 'entries')} for {counted(raw.num_hidden_layers, 'layer')}"
        raise _bad(f"{place}layer_types", message, code="bad_config")
    if unknown := set(raw.layer_types) - {LINEAR, FULL}:
        raise _bad(f"{place}layer_types", f"`{min(unknown)}` is not served")
    return tuple(raw.layer_types)


def _rope(raw: RawConfig, place: str) -> tuple[float, float, float]:
    """(theta, factor, share of a head's dims). The sections of multimodal positions change nothing: all three positions
    of a text token are equal."""
    if raw.rope_parameters is not None and raw.rope_scaling is not None and raw.rope_parameters != raw.rope_scaling:
        raise _bad(f"{place}rope_scaling", "contradicts `rope_parameters`", code="bad_config")
    field = place + ("rope_scaling" if raw.rope_parameters is None else "rope_parameters")
    values = dict(raw.rope_parameters or raw.rope_scaling or {})
    for name in ("mrope_section", "mrope_interleaved", "original_max_position_embeddings"):
        values.pop(name, None)
    theta = _number(values.pop("rope_theta", raw.rope_theta or 10000.0), f"{field}.rope_theta")
    if raw.rope_theta is not None and theta != raw.rope_theta:
        raise _bad(f"{place}rope_theta", f"{raw.rope_theta} contradicts {theta} in `{field}`", code="bad_config")
    share = _number(
        values.pop("partial_rotary_factor", raw.partial_rotary_factor or 0.25), f"{field}.partial_rotary_factor"
    )
    if share > 1 or raw.partial_rotary_factor not in {None, share}:
        message = f"{share}, and {raw.partial_rotary_factor} beside it"
        raise _bad(f"{field}.partial_rotary_factor", message, code="bad_config")
    kind = values.pop("rope_type", values.pop("type", "default"))
    values.pop("type", None)
    factor = values.pop("factor", 1.0)
    if kind not in ("default", "linear"):  # no set: it may be a list
        raise _bad(f"{field}.rope_type", f"`{kind}`; `default` and `linear` are served")
    if values:
        raise _bad(f"{field}.{min(values)}", "is not known")
    return theta, _number(factor, f"{field}.factor") if kind == "linear" else 1.0, share


def _number(value: object, field: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
        raise _bad(field, f"{value!r} is no positive number", code="bad_config")
    return float(value)
