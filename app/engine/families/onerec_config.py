"""config.json of the `onerec` family: all hyperparameters of OneRec-V2's lazy decoder (arXiv 2508.20900)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from app.errors import Rejected

Positive = Annotated[int, Meta(ge=1, le=2**24)]
Natural = Annotated[int, Meta(ge=0, le=2**24)]
MAX_LAYERS = 4096  # modules are made of every one before a tensor is looked for

MAX_PREFIX_ROWS = 2**22


class HistoryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contexts given as the SIDs of the user's items.

    short   the newest items, one context position each
    long    positions for the items before those; 0 = none
    pool    items averaged into one long position
    prefix  an item's vector is the sum of one embedding a level and, where this is above 0, one of its first `prefix`
            codes together
    """

    short: Positive
    long: Natural = 0
    pool: Positive = 1
    prefix: Natural = 0

    @property
    def positions(self) -> int:
        """Context positions of the longest history, without the static one."""
        return self.short + self.long


class FeatureConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contexts given as named tensors: `static` [1, static], `short` [n, short], `long` [n, long]; a width of 0 = no
    such input. `short_positions`, `long_positions` are the largest n."""

    static: Natural = 0
    short: Natural = 0
    long: Natural = 0
    short_positions: Natural = 0
    long_positions: Natural = 0

    @property
    def positions(self) -> int:
        """Context positions of the longest input, without the static one."""
        return self.short_positions + self.long_positions


class ExpertsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A mixture of experts in the place of the SwiGLU of decoder blocks `dense`, `dense` + 1, ..

    routed, top, hidden  experts with a hidden width, of which a row goes to `top`
    shared     experts of the same width that every row goes through
    dense      the first blocks, which keep their SwiGLU
    scores     what a routed expert's output is multiplied by: softmax over all of them, or the sigmoid of each
    normalise  divided by the sum over the chosen ones
    factor     and multiplied by this
    bias       a number for each expert, added to sigmoids where they are compared (balance without a loss)
    """

    routed: Annotated[int, Meta(ge=1, le=4096)]
    top: Positive
    hidden: Positive
    shared: Annotated[int, Meta(ge=0, le=4096)] = 0
    dense: Natural = 0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    factor: Annotated[float, Meta(gt=0, lt=1e6)] = 1.0
    bias: bool = False


class OneRecConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The lazy decoder and its context processor.

    sizes           codes of each step, C_1..C_L
    d_model         width of the residual stream
    layers          decoder blocks: lazy cross-attention, causal self-attention, SwiGLU
    heads, head_dim query heads of every attention and their width
    cross_groups    G_kv: K/V heads of a context position
    kv_sets         L_kv: sets of context K/V; block l reads set floor(l * L_kv / layers)
    kv_split        S_kv: 1 = a set's V is its K; 2 = both are there
    self_groups     K/V heads of the self-attention
    ffn             hidden width of the SwiGLU
    eps             of every RMSNorm
    experts         a mixture of experts in decoder blocks; none: every block is dense
    context_layers  transformer blocks over the context positions before they are projected (0: as in the paper)
    history, features  what a context may be; at least one
    dropout         in training only
    """

    family: Literal["onerec"]
    architectures: tuple[Literal["OneRecLazyDecoder"]] = ("OneRecLazyDecoder",)
    sizes: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=16)]
    d_model: Positive
    layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    heads: Positive
    head_dim: Positive
    cross_groups: Positive
    kv_sets: Positive = 1
    kv_split: Annotated[int, Meta(ge=1, le=2)] = 1
    self_groups: Positive
    ffn: Positive
    eps: Annotated[float, Meta(gt=0, lt=1)] = 1e-6
    experts: ExpertsConfig | None = None
    context_layers: Annotated[int, Meta(ge=0, le=MAX_LAYERS)] = 0
    history: HistoryConfig | None = None
    features: FeatureConfig | None = None
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    @property
    def steps(self) -> int:
        """L."""
        return len(self.sizes)

    @property
    def d_context(self) -> int:
        """d_ctx = L_kv * S_kv * G_kv * d_head."""
        return self.kv_sets * self.kv_split * self.cross_groups * self.head_dim

    @property
    def positions(self) -> int:
        """Context positions of the longest context: the static one, short and long."""
        return 1 + max(part.positions for part in (self.history, self.features) if part is not None)

    def mixed(self, layer: int) -> bool:
        """Whether block `layer` (from 0) has experts."""
        return self.experts is not None and layer >= self.experts.dense

    def kv_set(self, layer: int) -> int:
        """Which set block `layer` (from 0) reads."""
        return layer * self.kv_sets // self.layers


def parse(values: Mapping[str, object]) -> OneRecConfig:
    """config.json as a OneRecConfig. Raises Rejected(location="config.json: field") for unknown fields, wrong types and
    values that contradict each other."""
    try:
        config = msgspec.convert(dict(values), OneRecConfig)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        raise _bad(message, path.rstrip("`").removeprefix("$.")) from error
    for field, message in _contradictions(config):
        raise _bad(message, field)
    return config


def _bad(message: str, field: str) -> Rejected:
    return Rejected("bad_config", message, location=f"config.json: {field}" if field else "config.json")


def _contradictions(config: OneRecConfig) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for field, groups in (("cross_groups", config.cross_groups), ("self_groups", config.self_groups)):
        if config.heads % groups:
            found.append((field, f"{groups} K/V heads do not divide {config.heads} query heads"))
    if config.kv_sets > config.layers:
        found.append(("kv_sets", f"{config.kv_sets} K/V sets for {config.layers} blocks: some would never be read"))
    if config.experts is not None:
        found.extend(_expert_contradictions(config.experts, config.layers))
    if config.history is None and config.features is None:
        found.append(
            ("history", "give `history`, `features` or both: a model without a context has no requests to serve")
        )
    if config.history is not None:
        found.extend(_history_contradictions(config.history, config.sizes))
    if config.features is not None:
        found.extend(_feature_contradictions(config.features))
    return found


def _expert_contradictions(experts: ExpertsConfig, layers: int) -> list[tuple[str, str]]:
    found = []
    if experts.top > experts.routed:
        found.append(("experts.top", f"{experts.top} of {experts.routed} experts"))
    if experts.dense >= layers:
        found.append(("experts.dense", f"{experts.dense} dense blocks of {layers}: no block has experts"))
    if experts.bias and experts.scores != "sigmoid":
        found.append(("experts.bias", "is added to sigmoids, and `scores` is `softmax`"))
    return found


def _history_contradictions(history: HistoryConfig, sizes: tuple[int, ...]) -> list[tuple[str, str]]:
    if history.pool > 1 and not history.long:
        return [("history.pool", f"pools {history.pool} items into long positions, of which there are none")]
    if history.prefix == 1 or history.prefix > len(sizes):
        return [("history.prefix", f"{history.prefix} is neither 0 nor between 2 and the {len(sizes)} steps")]
    rows = prod(sizes[: history.prefix])
    if history.prefix and rows > MAX_PREFIX_ROWS:
        return [("history.prefix", f"{rows} prefixes need a table above {MAX_PREFIX_ROWS} rows")]
    return []


def _feature_contradictions(features: FeatureConfig) -> list[tuple[str, str]]:
    if not (features.static or features.short or features.long):
        return [("features", "declares no input")]
    pairs = (("short", features.short, features.short_positions), ("long", features.long, features.long_positions))
    return [
        (f"features.{name}_positions", f"{positions} positions for an input of width {width}")
        for name, width, positions in pairs
        if bool(width) != bool(positions)
    ]
