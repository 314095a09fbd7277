"""The experts of Qwen3MoeForCausalLM and Qwen3NextForCausalLM: which layers have them, and their tensors' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from app.engine.families.base import fields_of
from app.engine.moe import Piece, Routing, pieces
from app.errors import Rejected

Count = Annotated[int, Meta(ge=0, le=2**24)]
Some = Annotated[int, Meta(ge=1, le=2**24)]
MOST: Final = 4096
"""Experts: a parameter is bound to three tensors of each before one is looked for."""


class RawExperts(msgspec.Struct, frozen=True):
    """The fields as transformers writes them; `num_local_experts` is what version 5 calls `num_experts`."""

    num_experts: Count | None = None
    num_local_experts: Count | None = None
    num_experts_per_tok: Some | None = None
    moe_intermediate_size: Some | None = None
    shared_expert_intermediate_size: Count | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: Some = 1
    mlp_only_layers: list[int] | None = None


_DEFAULTS: Final = {
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
    "qwen3_next": {
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512,
    },
}  # fmt: skip
"""What transformers takes where config.json does not say it."""


def read_experts(config: Mapping[str, object], model_type: str, layers: int) -> tuple[Routing | None, ...]:
    """The experts of each layer, None: a dense one.

    Raises Rejected("bad_config" | "unsupported_config") with location "config.json: field".
    """
    try:
        raw = msgspec.convert(fields_of(config, RawExperts), RawExperts)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise _bad(path.rstrip("`") or "$", message) from error
    if model_type not in _DEFAULTS:
        if raw.num_experts or raw.num_local_experts:
            message = f"`{model_type}` with routed experts is not served"
            raise _bad("num_experts", message, code="unsupported_config")
        return (None,) * layers
    dense = set(raw.mlp_only_layers or ())
    sparse = [i not in dense and (i + 1) % raw.decoder_sparse_step == 0 for i in range(layers)]
    routing = _routing(raw, model_type) if any(sparse) else None
    return tuple(routing if one else None for one in sparse)


def _routing(raw: RawExperts, model_type: str) -> Routing | None:
    default, own = _DEFAULTS[model_type], msgspec.structs.asdict(raw)
    if raw.num_experts is None:
        own["num_experts"] = raw.num_local_experts
    elif raw.num_local_experts not in {None, raw.num_experts}:
        raise _bad("num_local_experts", f"{raw.num_local_experts} contradicts {raw.num_experts} in `num_experts`")
    value = {name: own[name] if own[name] is not None else default.get(name, 0) for name in own}
    experts, top = int(value["num_experts"]), int(value["num_experts_per_tok"])
    if not experts:
        return None
    if experts > MOST:
        raise _bad("num_experts", f"{experts} are more than {MOST}", code="unsupported_config")
    if top > experts:
        raise _bad("num_experts_per_tok", f"{top} of {experts} experts")
    following = model_type == "qwen3_next"
    shared = int(value["shared_expert_intermediate_size"]) if following else 0
    if following and not shared:
        raise _bad("shared_expert_intermediate_size", "0; a shared expert is expected", code="unsupported_config")
    return Routing(
        experts=experts, top=top, hidden=int(value["moe_intermediate_size"]), shared=shared, shared_gate=following,
        normalise=bool(value["norm_topk_prob"]),
    )  # fmt: skip


def expert_parts(of: Routing, width: int, mlp: str) -> Iterator[tuple[str, Piece]]:
    """The tensors of the layer that begin with `mlp`, in the order in which the parts of a parameter lie in it."""
    for piece in pieces(of, width):
        yield f"{mlp}.{_name(piece)}.weight", piece


def _name(piece: Piece) -> str:
    if piece.part == "router":
        return "gate"
    if piece.part == "shared_weight":
        return "shared_expert_gate"
    owner = f"experts.{piece.expert}" if piece.expert >= 0 else "shared_expert"
    return f"{owner}.{piece.part}_proj"


def _bad(field: str, message: str, *, code: str = "bad_config") -> Rejected:
    return Rejected(code, message, location=f"config.json: {field}")
