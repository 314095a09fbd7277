"""OneRec-V2's lazy decoder in plain torch: what is trained, and what the served family is tested against.

No cache, no beams, no ragged batches: dense padded contexts, whole SIDs. `onerec.py` computes the same, one step at a
time behind the engine seam, from a state dict with the same names.

Shapes: B contexts, M SIDs that share a context, P context positions, S short and U long positions, L steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.engine.families.onerec_config import ExpertsConfig, FeatureConfig, HistoryConfig, OneRecConfig


class PaddedContexts(NamedTuple):
    """B contexts, newest first, padded at the end. Codes of -1 are no item; None = the input is not given.

    short, long                             [B, S, L], [B, U, pool, L] int64
    static                                  [B, d_static] float32
    short_features, long_features           [B, S, d_short], [B, U, d_long] float32
    short_present, long_present             [B, S], [B, U] bool: which feature positions are there
    """

    short: Tensor | None = None
    long: Tensor | None = None
    static: Tensor | None = None
    short_features: Tensor | None = None
    long_features: Tensor | None = None
    short_present: Tensor | None = None
    long_present: Tensor | None = None


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Mixture(nn.Module):
    """Experts by their definition: each computes every row, and counts by the row's weight for it, which is 0 where the
    row has not chosen it (arXiv 2508.20900: top k of routed experts, and shared ones)."""

    def __init__(self, width: int, experts: ExpertsConfig) -> None:
        super().__init__()
        self.config = experts
        self.router = nn.Linear(width, experts.routed, bias=False)
        self.bias = nn.Parameter(torch.empty(experts.routed)) if experts.bias else None
        self.experts = nn.ModuleList(SwiGLU(width, experts.hidden) for _ in range(experts.routed))
        self.shared = SwiGLU(width, experts.shared * experts.hidden) if experts.shared else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        weights = self.weights(self.router(x).float()).to(x.dtype)
        out = torch.zeros_like(x) if self.shared is None else self.shared(x)
        for number, expert in enumerate(self.experts):
            out = out + weights[..., number : number + 1] * expert(x)
        return out

    def weights(self, logits: Tensor) -> Tensor:
        """logits [..., routed] -> the weight of each expert, 0 for all but the chosen ones."""
        scores = logits.sigmoid() if self.config.scores == "sigmoid" else logits.softmax(-1)
        compared = scores if self.bias is None else scores + self.bias
        chosen = torch.zeros_like(scores).scatter(-1, compared.topk(self.config.top, -1).indices, 1.0)
        weights = scores * chosen
        if self.config.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.config.factor


class SelfAttention(nn.Module):
    """Grouped-query self-attention: causal in the decoder, over all present positions in the context processor."""

    def __init__(self, config: OneRecConfig, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = config.heads, groups, config.head_dim
        self.q = nn.Linear(config.d_model, config.heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.d_model, groups * config.head_dim, bias=False)
        self.v = nn.Linear(config.d_model, groups * config.head_dim, bias=False)
        self.o = nn.Linear(config.heads * config.head_dim, config.d_model, bias=False)

    def forward(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """x [B, S, d_model]; present [B, S] bool, or None = causal."""
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim))
        k = self.k(x).unflatten(-1, (self.groups, self.head_dim))
        v = self.v(x).unflatten(-1, (self.groups, self.head_dim))
        out: Tensor = self.o(attend(q, k, v, present))
        return out


class CrossAttention(nn.Module):
    """Lazy cross-attention: the context's K/V are used as they are, so there is no K or V projection here."""

    def __init__(self, config: OneRecConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.q = nn.Linear(config.d_model, config.heads * config.head_dim, bias=False)
        self.o = nn.Linear(config.heads * config.head_dim, config.d_model, bias=False)

    def forward(self, x: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        """x [B, M * L, d_model]; k, v [B, P, G, D]; present [B, P] bool."""
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim))
        out: Tensor = self.o(attend(q, k, v, present))
        return out


def attend(q: Tensor, k: Tensor, v: Tensor, present: Tensor | None) -> Tensor:
    """Softmax attention, scale 1/sqrt(D): q [B, Q, H, D], k and v [B, P, G, D] -> [B, Q, H * D].

    Query head h reads K/V head h // (H / G). present [B, P] masks keys; None = causal.
    """
    repeat = q.shape[2] // k.shape[2]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if present is None else present[:, None, None, :],
        is_causal=present is None,
    )
    return out.transpose(1, 2).flatten(2)


class ContextBlock(nn.Module):
    """A pre-norm transformer block over the context positions."""

    def __init__(self, config: OneRecConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, config.eps)
        self.attention = SelfAttention(config, config.heads)
        self.ffn_norm = nn.RMSNorm(config.d_model, config.eps)
        self.ffn = SwiGLU(config.d_model, config.ffn)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        """[B, P, d_model] -> the same."""
        x = x + self.dropout(self.attention(self.attention_norm(x), present))
        out: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return out


class HistoryEmbedding(nn.Module):
    """SIDs of items to vectors, and how old they are."""

    def __init__(self, config: OneRecConfig, history: HistoryConfig) -> None:
        super().__init__()
        self.sizes, self.prefix_levels = config.sizes, history.prefix
        self.codes = nn.ModuleList(nn.Embedding(size, config.d_model) for size in config.sizes)
        rows = torch.tensor(config.sizes[: history.prefix]).prod() if history.prefix else 0
        self.prefix = nn.Embedding(int(rows), config.d_model) if history.prefix else None
        self.short_age = nn.Embedding(history.short, config.d_model)
        self.long_age = nn.Embedding(history.long, config.d_model) if history.long else None

    def items(self, codes: Tensor) -> Tensor:
        """[..., L] codes -> [..., d_model]."""
        out: Tensor = torch.stack([table(codes[..., t]) for t, table in enumerate(self.codes)]).sum(0)
        if self.prefix is not None:
            row = torch.zeros_like(codes[..., 0])
            for t in range(self.prefix_levels):
                row = row * self.sizes[t] + codes[..., t]
            out = out + self.prefix(row)
        return out

    def short(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, L] -> vectors [B, S, d_model], present [B, S]."""
        return self.items(codes.clamp_min(0)) + self.short_age.weight[: codes.shape[1]], codes[..., 0] >= 0

    def long(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """[B, U, pool, L] -> means of the items that are there [B, U, d_model], present [B, U]."""
        assert self.long_age is not None
        there = codes[..., :1] >= 0
        mean = (self.items(codes.clamp_min(0)) * there).sum(2) / there.sum(2).clamp_min(1)
        return mean + self.long_age.weight[: codes.shape[1]], there.any(2).squeeze(-1)


class FeatureEmbedding(nn.Module):
    """Named feature tensors to vectors."""

    def __init__(self, config: OneRecConfig, features: FeatureConfig) -> None:
        super().__init__()
        d = config.d_model
        self.static = nn.Linear(features.static, d, bias=False) if features.static else None
        self.short = nn.Linear(features.short, d, bias=False) if features.short else None
        self.long = nn.Linear(features.long, d, bias=False) if features.long else None
        self.short_age = nn.Embedding(features.short_positions, d) if features.short else None
        self.long_age = nn.Embedding(features.long_positions, d) if features.long else None


class ContextProcessor(nn.Module):
    """Static, short-term and long-term context to K/V sets (section 2.2 of the paper). A learned static position is
    always there, so that an empty history has something to attend to."""

    def __init__(self, config: OneRecConfig) -> None:
        super().__init__()
        self.config = config
        self.static = nn.Parameter(torch.empty(config.d_model))
        self.history = HistoryEmbedding(config, config.history) if config.history else None
        self.features = FeatureEmbedding(config, config.features) if config.features else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(ContextBlock(config) for _ in range(config.context_layers))
        self.project = nn.Linear(config.d_model, config.d_context, bias=False)
        width = config.cross_groups * config.head_dim
        self.norms = nn.ModuleList(nn.RMSNorm(width, config.eps) for _ in range(config.kv_sets * config.kv_split))

    def forward(self, contexts: PaddedContexts) -> tuple[Tensor, Tensor]:
        """K and V of every set [L_kv, 2, B, P, G, D] and which positions are there [B, P] bool."""
        x, present = self.positions(contexts)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, present)
        config = self.config
        parts = self.project(x).chunk(config.kv_sets * config.kv_split, -1)
        normed = [
            norm(part).unflatten(-1, (config.cross_groups, -1)) for norm, part in zip(self.norms, parts, strict=True)
        ]
        split = config.kv_split
        sets = [torch.stack((normed[s * split], normed[s * split + split - 1])) for s in range(config.kv_sets)]
        return torch.stack(sets), present

    def positions(self, contexts: PaddedContexts) -> tuple[Tensor, Tensor]:
        """The context positions [B, P, d_model] and which are there [B, P]: static, short, long."""
        parts: list[Tensor] = []
        there: list[Tensor] = []
        if self.history is not None and contexts.short is not None:
            made = [self.history.short(contexts.short)]
            made += [self.history.long(contexts.long)] if contexts.long is not None else []
            parts, there = [x for x, _ in made], [mask for _, mask in made]
        features = self.features
        if features is not None:
            for project, age, values, mask in (
                (features.short, features.short_age, contexts.short_features, contexts.short_present),
                (features.long, features.long_age, contexts.long_features, contexts.long_present),
            ):
                if project is not None and age is not None and values is not None and mask is not None:
                    parts.append(project(values) + age.weight[: values.shape[1]])
                    there.append(mask)
        batch = next(value.shape[0] for value in contexts if value is not None)
        static = self.static.expand(batch, 1, -1)
        if features is not None and features.static is not None and contexts.static is not None:
            static = static + features.static(contexts.static)[:, None]
        one = torch.ones(batch, 1, dtype=torch.bool, device=static.device)
        return torch.cat([static, *parts], 1), torch.cat([one, *there], 1)


class DecoderBlock(nn.Module):
    """Lazy cross-attention, causal self-attention, SwiGLU or experts, each after an RMSNorm and added to the stream."""

    def __init__(self, config: OneRecConfig, layer: int) -> None:
        super().__init__()
        self.cross_norm = nn.RMSNorm(config.d_model, config.eps)
        self.cross = CrossAttention(config)
        self.self_norm = nn.RMSNorm(config.d_model, config.eps)
        self.self = SelfAttention(config, config.self_groups)
        self.ffn_norm = nn.RMSNorm(config.d_model, config.eps)
        experts = config.experts if config.mixed(layer) else None
        self.ffn = SwiGLU(config.d_model, config.ffn) if experts is None else Mixture(config.d_model, experts)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, kv: Tensor, present: Tensor) -> Tensor:
        """x [B, M, S, d_model]; kv [2, B, P, G, D]; present [B, P]."""
        batch, sids, length, _ = x.shape
        cross = self.cross(self.cross_norm(x).flatten(1, 2), kv[0], kv[1], present)
        x = x + self.dropout(cross.unflatten(1, (sids, length)))
        own = self.self(self.self_norm(x).flatten(0, 1))
        x = x + self.dropout(own.unflatten(0, (batch, sids)))
        out: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return out


class OneRecReference(nn.Module):
    """The whole model. `forward` gives the logits of every step of given SIDs, teacher-forced."""

    def __init__(self, config: OneRecConfig) -> None:
        super().__init__()
        self.config = config
        self.processor = ContextProcessor(config)
        self.bos = nn.Parameter(torch.empty(config.d_model))
        self.codes = nn.ModuleList(nn.Embedding(size, config.d_model) for size in config.sizes[:-1])
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(DecoderBlock(config, layer) for layer in range(config.layers))
        self.norms = nn.ModuleList(nn.RMSNorm(config.d_model, config.eps) for _ in config.sizes)
        self.heads = nn.ModuleList(nn.Linear(config.d_model, size, bias=False) for size in config.sizes)

    def forward(self, contexts: PaddedContexts, sids: Tensor) -> list[Tensor]:
        """Logits of steps 1..S+1 after the prefixes sids[..., :0] .. sids[..., :S].

        sids  [B, M, S] int64, 0 <= S <= L - 1: M prefixes for each context
        Returns S + 1 tensors [B, M, C_t].
        """
        kv, present = self.processor(contexts)
        return self.decode(kv, present, sids)

    def decode(self, kv: Tensor, present: Tensor, sids: Tensor) -> list[Tensor]:
        """`forward` from the context processor's answer."""
        batch, count, length = sids.shape
        parts = [self.bos.expand(batch, count, -1), *(self.codes[t](sids[..., t]) for t in range(length))]
        x = self.dropout(torch.stack(parts, 2))
        for index, block in enumerate(self.blocks):
            x = block(x, kv[self.config.kv_set(index)], present)
        return [self.heads[t](self.norms[t](x[:, :, t])) for t in range(length + 1)]

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Normal weights: embeddings and the input side of blocks at 0.02 scaled by width, ones in the norms."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                nn.init.ones_(parameter)
            elif parameter.dim() == 1 or "codes" in name or "age" in name or "prefix" in name:
                parameter.data.normal_(0.0, 0.1, generator=generator)
            else:
                parameter.data.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
                if name.endswith(("o.weight", "down.weight")):
                    parameter.data.mul_((2 * (self.config.layers + self.config.context_layers)) ** -0.5)


def pad_history(histories: Sequence[Tensor], history: HistoryConfig) -> PaddedContexts:
    """Histories (each [items, L] int64, oldest first, codes >= 0) as PaddedContexts, as wide as the config allows."""
    levels = histories[0].shape[1]
    short = torch.full((len(histories), history.short, levels), -1, dtype=torch.int64)
    long = torch.full((len(histories), history.long * history.pool, levels), -1, dtype=torch.int64)
    for row, codes in enumerate(histories):
        newest = codes.flip(0)
        recent, older = newest[: history.short], newest[history.short : history.short + long.shape[1]]
        short[row, : len(recent)] = recent
        long[row, : len(older)] = older
    return PaddedContexts(
        short, long.view(len(histories), history.long, history.pool, levels) if history.long else None
    )
