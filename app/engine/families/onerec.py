"""OneRec-V2's lazy decoder behind the engine seam (arXiv 2508.20900; RecoGEM figure 3). `onerec_reference.py` is the
same model without caches.

The context processor runs once a request and leaves its K/V sets in request-scoped state; every step's cross-attention
reads them where they lie. A row's self-attention K/V are written once into its slot and found through the ancestry:
by the product itself, whose output is the slot, where every query head has a key and a value of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from app.config import Limits, SidConfig
from app.core import (
    Arena,
    Context,
    Contexts,
    Embeddings,
    History,
    Inputs,
    InputSpec,
    Ragged,
    Rows,
    StateSpec,
    StepOutput,
    WeightSpec,
)
from app.engine import layers
from app.engine.families import onerec_config
from app.engine.families.base import Binding, Family, ModelFiles
from app.engine.families.onerec_config import ExpertsConfig, FeatureConfig, HistoryConfig, OneRecConfig
from app.engine.families.onerec_inputs import HISTORY_LONG, HISTORY_SHORT, OneRecInputs
from app.engine.fp8 import gated_product_for, normed_after, normed_for, product_into, product_onto
from app.engine.layers import Linear
from app.engine.moe import Mixture, Piece, Routing, pieces
from app.errors import Rejected
from app.ops.attention import context_attention, prefix_attention


class Layout(NamedTuple):
    """Where the context positions of R requests lie: T rows end to end, a request's rows together.

    request, slot  [T] int64: row i is position slot[i] of request[i]
    start          [R + 1] int64
    length         [R] int64, start's differences, but for pad requests (`Family.contexts_on_device`)
    """

    request: Tensor
    slot: Tensor
    start: Tensor
    length: Tensor


class Feed(nn.Module):
    """SwiGLU. gate_up: gate and up are one product."""

    def __init__(self, config: OneRecConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.d_model, 2 * config.ffn)
        self.down = Linear(config.ffn, config.d_model)

    @property
    def entry(self) -> Tensor:
        """What normed rows are multiplied by."""
        return self.gate_up.weight

    def onto(self, x: Tensor, normed: Tensor) -> Tensor:
        """x [N, d_model] with the output for `normed` [N, d_model] added, in its memory."""
        down = self.down.weight
        return product_onto(x, gated_product_for(normed, self.gate_up.weight, down), down)


class Experts(Mixture):
    """The experts of a block."""

    def __init__(self, config: OneRecConfig, experts: ExpertsConfig) -> None:
        routing = Routing(
            experts.routed, experts.top, experts.hidden, shared=experts.shared * experts.hidden,
            sigmoid=experts.scores == "sigmoid", normalise=experts.normalise, factor=experts.factor, bias=experts.bias,
        )  # fmt: skip
        super().__init__(routing, config.d_model)

    @property
    def entry(self) -> Tensor:
        """See `Feed.entry`."""
        return self.router

    def onto(self, x: Tensor, normed: Tensor) -> Tensor:
        """See `Feed.onto`."""
        out: Tensor = self(normed, x)
        return out


def experts_source(piece: Piece) -> str:
    """The tensor of an artifact that a piece of a block's experts is, behind `blocks.i.ffn.`."""
    if piece.part in {"router", "bias"}:
        return "router.weight" if piece.part == "router" else "bias"
    owner = f"experts.{piece.expert}" if piece.expert >= 0 else "shared"
    return f"{owner}.{piece.part}.weight"


class Projections(nn.Module):
    """The projections of one attention. q, k and v are one product; the lazy one has no k and v."""

    def __init__(self, config: OneRecConfig, groups: int) -> None:
        super().__init__()
        self.groups, self.head_dim = groups, config.head_dim
        self.qkv = Linear(config.d_model, (config.heads + 2 * groups) * config.head_dim)
        self.o = Linear(config.heads * config.head_dim, config.d_model)

    def heads(self, normed: Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[N, d_model] -> q [N, heads, head_dim]; k, v [N, groups, head_dim]: views of one tensor, which is `into`
        [N, heads + 2 groups, head_dim] where that is given."""
        if into is None:
            out = self.qkv(normed)
            out = out.view(out.shape[0], -1, self.head_dim)
        else:
            out = into
            product_into(out.flatten(1), normed, self.qkv.weight)
        own = out.shape[1] - 2 * self.groups
        return out[:, :own], out[:, own : own + self.groups], out[:, own + self.groups :]

    def after(self, x: Tensor, seen: Tensor, norm: nn.RMSNorm, entry: Tensor) -> Tensor:
        """norm(x), to be multiplied by `entry`; x [N, d_model] has got the output for `seen` [N, heads, head_dim] added
        before it, in its memory."""
        return normed_after(x, seen.flatten(1), self.o.weight, norm, entry)


class HistoryTables(nn.Module):
    """Embeddings of the codes of history items, of their leading codes together, and of their age."""

    def __init__(self, config: OneRecConfig, history: HistoryConfig) -> None:
        super().__init__()
        self.sizes = config.sizes[: history.prefix]
        self.codes = nn.ModuleList(nn.Embedding(size, config.d_model) for size in config.sizes)
        if history.prefix:
            self.prefix = nn.Embedding(prod(self.sizes), config.d_model)
        self.short_age = nn.Embedding(history.short, config.d_model)
        if history.long:
            self.long_age = nn.Embedding(history.long, config.d_model)

    def forward(self, codes: Tensor) -> Tensor:
        """Codes [..., L] >= 0 -> vectors [..., d_model]."""
        columns = codes.long().unbind(-1)
        x: Tensor = self.codes[0](columns[0])
        for table, column in zip(list(self.codes)[1:], columns[1:], strict=True):
            x = x + table(column)
        if not self.sizes:
            return x
        row = columns[0]
        for size, column in zip(self.sizes[1:], columns[1 : len(self.sizes)], strict=True):
            row = row * size + column
        out: Tensor = x + self.prefix(row)
        return out


class FeatureProjections(nn.Module):
    """Named feature tensors into the model's width."""

    def __init__(self, config: OneRecConfig, features: FeatureConfig) -> None:
        super().__init__()
        if features.static:
            self.static = Linear(features.static, config.d_model)
        if features.short:
            self.short = Linear(features.short, config.d_model)
            self.short_age = nn.Embedding(features.short_positions, config.d_model)
        if features.long:
            self.long = Linear(features.long, config.d_model)
            self.long_age = nn.Embedding(features.long_positions, config.d_model)


class ContextBlock(nn.Module):
    """A block over the context positions: self-attention in both directions, SwiGLU."""

    def __init__(self, config: OneRecConfig) -> None:
        super().__init__()
        self.scale = config.head_dim**-0.5
        self.attention_norm = nn.RMSNorm(config.d_model, config.eps)
        self.attention = Projections(config, config.heads)
        self.ffn_norm = nn.RMSNorm(config.d_model, config.eps)
        self.ffn = Feed(config)

    def forward(self, x: Tensor, layout: Layout, positions: int) -> Tensor:
        """x [T, d_model] -> the same, in its memory."""
        part = self.attention
        q, own_k, own_v = part.heads(normed_for(x, self.attention_norm, part.qkv.weight))
        shape = (layout.length.shape[0], positions, part.groups, part.head_dim)
        k, v = x.new_zeros(shape), x.new_zeros(shape)
        k[layout.request, layout.slot] = own_k
        v[layout.request, layout.slot] = own_v
        seen, _ = context_attention(q, k, v, layout.length, layout.start, widest=positions, scale=self.scale)
        return self.ffn.onto(x, part.after(x, seen, self.ffn_norm, self.ffn.entry))


class Processor(nn.Module):
    """Static, short-term and long-term context to K/V sets."""

    def __init__(self, config: OneRecConfig) -> None:
        super().__init__()
        self.static = nn.Parameter(torch.empty(config.d_model))
        if config.history is not None:
            self.history = HistoryTables(config, config.history)
        if config.features is not None:
            self.features = FeatureProjections(config, config.features)
        self.blocks = nn.ModuleList(ContextBlock(config) for _ in range(config.context_layers))
        self.project = Linear(config.d_model, config.d_context)
        width = config.cross_groups * config.head_dim
        self.norms = nn.ModuleList(nn.RMSNorm(width, config.eps) for _ in range(config.kv_sets * config.kv_split))

    def rows(self, name: str, part: Ragged, age: Tensor) -> Tensor:
        """The vectors [T_part, d_model] of one ragged input; age [T_part] counts from the newest position."""
        if name == HISTORY_SHORT:
            return self.history(part.values) + _of_age(self.history.short_age, age)  # type: ignore[no-any-return]
        if name == HISTORY_LONG:
            there = (part.values[..., :1] >= 0).to(self.static.dtype)
            total = (self.history(part.values.clamp_min(0)) * there).sum(1)
            return total / there.sum(1) + _of_age(self.history.long_age, age)  # type: ignore[no-any-return]
        project, ages = getattr(self.features, name), getattr(self.features, f"{name}_age")
        return project(part.values.to(self.static.dtype)) + _of_age(ages, age)  # type: ignore[no-any-return]

    def forward(self, contexts: Contexts, positions: int) -> tuple[list[Tensor], Layout]:
        """K or V of each norm [T, G * D], and where their rows lie."""
        x, layout = self.embed(contexts, positions)
        for block in self.blocks:
            x = block(x, layout, positions)
        parts = self.project(x).chunk(len(self.norms), -1)
        return [norm(part) for norm, part in zip(self.norms, parts, strict=True)], layout

    def embed(self, contexts: Contexts, positions: int) -> tuple[Tensor, Layout]:
        """The context positions [T, d_model]: a static one, then short, then long ones, newest first. What a pad
        request (`Family.contexts_on_device`) has beyond `positions` has the place of the last of them."""
        first = next(iter(contexts.values())).start
        requests = torch.arange(first.shape[0] - 1, device=first.device)
        filled = torch.ones_like(requests)
        static = self.static.expand(requests.shape[0], -1)
        values, owners, slots = [static], [requests], [torch.zeros_like(requests)]
        for name, part in contexts.items():
            count = part.start.diff().long()
            owner = requests.repeat_interleave(count, output_size=part.values.shape[0])
            if name == "static":
                own = self.features.static(part.values.to(static.dtype))
                values[0] = static.index_add(0, owner, own)
                continue
            age = torch.arange(part.values.shape[0], device=first.device) - part.start.long()[owner]
            values.append(self.rows(name, part, age))
            owners.append(owner)
            slots.append(filled[owner] + age)
            filled = filled + count
        start = torch.cat([filled.new_zeros(1), filled.cumsum(0)])
        request, slot = torch.cat(owners), torch.cat(slots)
        # each part is in request order; the attention wants all parts of a request together
        place = torch.empty_like(request)
        place[start[request] + slot] = torch.arange(request.shape[0], device=first.device)
        slot, length = slot[place].clamp_max(positions - 1), filled.clamp_max(positions)
        return torch.cat(values)[place], Layout(request[place], slot, start, length)


def _of_age(table: nn.Embedding, age: Tensor) -> Tensor:
    """The embeddings of ages [T]; those that no request has, but a pad request may, are as the oldest."""
    out: Tensor = table(age.clamp_max(table.num_embeddings - 1))
    return out


class Cross(NamedTuple):
    """One context K/V set of requests 0..R-1: key, value [R, positions, G, D]; length [R] int32. widest: rows that ask
    for a request, at most."""

    key: Tensor
    value: Tensor
    length: Tensor
    widest: int


class Slots(NamedTuple):
    """Self-attention state of one block: key, value [L - 1, rows, G, D]. product: where they are parts of slots that
    hold q, k and v of a row as one product gives them, these: [L - 1, rows, H + 2 G, D]."""

    key: Tensor
    value: Tensor
    product: Tensor | None = None


class Block(nn.Module):
    """Lazy cross-attention, causal self-attention, SwiGLU or experts, each after an RMSNorm and added to the stream."""

    def __init__(self, config: OneRecConfig, layer: int) -> None:
        super().__init__()
        self.scale = config.head_dim**-0.5
        self.cross_norm = nn.RMSNorm(config.d_model, config.eps)
        self.cross = Projections(config, 0)
        self.self_norm = nn.RMSNorm(config.d_model, config.eps)
        self.self = Projections(config, config.self_groups)
        self.ffn_norm = nn.RMSNorm(config.d_model, config.eps)
        experts = config.experts if config.mixed(layer) else None
        self.ffn = Feed(config) if experts is None else Experts(config, experts)

    def own(self, normed: Tensor, t: int, n: int, slots: Slots) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the N rows of step t in the self-attention; in slots (t, 0..N-1) where step t has any."""
        if t > slots.key.shape[0]:
            return self.self.heads(normed)
        if slots.product is not None:
            return self.self.heads(normed, slots.product[t - 1, :n])
        q, k, v = self.self.heads(normed)
        layers.keep(slots.key[t - 1], k)
        layers.keep(slots.value[t - 1], v)
        return q, k, v

    def forward(self, x: Tensor, t: int, rows: Rows, cross: Cross, slots: Slots) -> Tensor:
        """x [N, d_model] of step t -> the same, in its memory; writes slots (t, 0..N-1) where step t has any."""
        q, _, _ = self.cross.heads(normed_for(x, self.cross_norm, self.cross.qkv.weight))
        seen, _ = context_attention(
            q, cross.key, cross.value, cross.length, rows.row_start, widest=cross.widest, scale=self.scale
        )
        normed = self.cross.after(x, seen, self.self_norm, self.self.qkv.weight)
        q, k, v = self.own(normed, t, x.shape[0], slots)
        seen = prefix_attention(
            q, k, v, slots.key, slots.value, ancestry=rows.ancestry, scale=self.scale, compact=rows.compact
        )
        return self.ffn.onto(x, self.self.after(x, seen, self.ffn_norm, self.ffn.entry))


class OneRec(Family):
    """The served family. Contexts are histories, or named feature tensors where config.json declares them."""

    name: ClassVar[str] = "onerec"
    contexts: ClassVar[tuple[type, ...]] = (History, Embeddings)
    contexts_on_device = True

    def __init__(self, config: OneRecConfig, limits: Limits) -> None:
        super().__init__()
        self.config, self.limits, self.steps = config, limits, config.steps
        self.scale = config.head_dim**-0.5
        self.positions = min(config.positions, limits.context)
        self.inputs = OneRecInputs.of(config, limits)
        self.processor = Processor(config)
        self.bos = nn.Parameter(torch.empty(config.d_model))
        self.codes = nn.ModuleList(nn.Embedding(size, config.d_model) for size in config.sizes[:-1])
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norms = nn.ModuleList(nn.RMSNorm(config.d_model, config.eps) for _ in config.sizes)
        self.heads = nn.ModuleList(Linear(config.d_model, size) for size in config.sizes)

    @classmethod
    def build(cls, files: ModelFiles, sid: SidConfig, limits: Limits, dtype: torch.dtype) -> Self:
        """See `Family.build`."""
        config = onerec_config.parse(files.config)
        if config.sizes != sid.sizes:
            message = f"the model's steps have {list(config.sizes)} codes, the deployment's {list(sid.sizes)}"
            raise Rejected("bad_config", message, location="config.json: sizes")
        for field in ("token_base", "tokens", "prefix"):
            if getattr(sid, field):
                message = "this family has code tables of its own and takes no tokens"
                raise Rejected("bad_config", message, location=f"deployment.toml: sid.{field}")
        if limits.context < min(2, config.positions):
            message = f"a context of {limits.context} positions leaves none beside the static one"
            raise Rejected("bad_config", message, location="deployment.toml: limits.context")
        with torch.device("meta"):
            return cls(config, limits).to(dtype)

    def _pieces(self) -> Iterator[tuple[str, str, tuple[int, ...], Tensor | None]]:
        """(parameter, tensor, shape, `Binding.rows`) of all that is not the tensor of its own name."""
        config = self.config
        for name, part in self.named_modules():
            if isinstance(part, Experts):
                for piece in pieces(part.of, config.d_model):
                    yield f"{name}.{piece.parameter}", f"{name}.{experts_source(piece)}", piece.shape, piece.rows
            elif isinstance(part, Feed):
                for one in ("gate", "up"):
                    yield f"{name}.gate_up.weight", f"{name}.{one}.weight", (config.ffn, config.d_model), None
            elif isinstance(part, Projections):
                groups = {"q": config.heads, **dict.fromkeys("kv" if part.groups else "", part.groups)}
                for one, count in groups.items():
                    shape = (count * config.head_dim, config.d_model)
                    yield f"{name}.qkv.weight", f"{name}.{one}.weight", shape, None

    def bindings(self) -> dict[str, Binding]:
        """See `Family.bindings`: each from the tensor of its own name, where `_pieces` do not say it."""
        found = {name: Binding((name,)) for name, _ in self.named_parameters()}
        made: dict[str, tuple[str, ...]] = {}
        for parameter, source, _, rows in self._pieces():
            made[parameter] = (*made.get(parameter, ()), source)
            found[parameter] = Binding(made[parameter], rows)
        return found

    def weight_specs(self) -> tuple[WeightSpec, ...]:
        """See `Family.weight_specs`."""
        made = [(parameter, WeightSpec(source, shape)) for parameter, source, shape, _ in self._pieces()]
        names = {parameter for parameter, _ in made}
        plain = (WeightSpec(name, tuple(one.shape)) for name, one in self.named_parameters() if name not in names)
        return (*plain, *(spec for _, spec in made))

    def projections(self) -> tuple[str, ...]:
        """See `Family.projections`: of every block, and of the context into its K/V sets."""
        blocks = [
            f"{name}.weight" for name, part in self.named_modules() if isinstance(part, nn.Linear) and "blocks." in name
        ]
        shared = [
            f"{name}.{leaf}" for name, part in self.named_modules() if isinstance(part, Experts)
            for leaf in part.projections()
        ]  # fmt: skip
        return (*blocks, *shared, "processor.project.weight")

    def input_specs(self) -> tuple[InputSpec, ...]:
        """See `Family.input_specs`."""
        return self.inputs.specs

    def state_specs(self) -> tuple[StateSpec, ...]:
        """See `Family.state_specs`: K (and V) of each set and their lengths per request; k, v of each block per row.

        With a key for every query head a slot holds q, too, so that the product is written where it stays: half as much
        memory again, and no copies. Of grouped heads it would be twice the memory or more, for smaller copies.
        """
        config, dtype = self.config, self.bos.dtype
        cross = (self.positions, config.cross_groups, config.head_dim)
        heads, groups, dim = config.heads, config.self_groups, config.head_dim
        specs = [StateSpec("cross_length", (), torch.int32, "request")]
        for index in range(config.kv_sets):
            specs += [StateSpec(f"cross_{part}.{index}", cross, dtype, "request") for part in "kv"[: config.kv_split]]
        for index in range(config.layers):
            if groups == heads:
                specs.append(StateSpec(f"qkv.{index}", (heads + 2 * groups, dim), dtype, "row", first=heads))
            else:
                specs += [StateSpec(f"{part}.{index}", (groups, dim), dtype, "row") for part in "kv"]
        return tuple(specs)

    def slots(self, arena: Arena, index: int) -> Slots:
        """The self-attention state of a block."""
        whole = arena.get(f"qkv.{index}")
        if whole is None:
            return Slots(arena[f"k.{index}"], arena[f"v.{index}"])
        heads, groups = self.config.heads, self.config.self_groups
        return Slots(whole[:, :, heads : heads + groups], whole[:, :, heads + groups :], whole)

    def prepare(self, context: Context) -> Inputs:
        """See `Family.prepare`."""
        return self.inputs.prepare(context)

    def encode(self, contexts: Contexts, arena: Arena) -> None:
        """See `Family.encode`: step 1 runs on a BOS row a request, so nothing is returned."""
        parts, layout = self.processor(contexts, self.positions)
        arena["cross_length"][: layout.length.shape[0]] = layout.length.to(torch.int32)
        for index, part in enumerate(parts):
            group, kind = divmod(index, self.config.kv_split)
            target = arena[f"cross_{'kv'[kind]}.{group}"]
            target[layout.request, layout.slot] = part.view(part.shape[0], *target.shape[2:])

    def step(self, t: int, rows: Rows, arena: Arena) -> StepOutput:
        """See `Family.step`."""
        requests = rows.row_start.shape[0] - 1
        length, widest = arena["cross_length"][:requests], self.limits.widest
        x = self.bos.repeat(rows.codes.shape[0], 1) if t == 1 else self.codes[t - 2](rows.codes)
        for index, block in enumerate(self.blocks):
            group = self.config.kv_set(index)
            key = arena[f"cross_k.{group}"][:requests]
            value = arena[f"cross_v.{group}"][:requests] if self.config.kv_split == 2 else key
            x = block(x, t, rows, Cross(key, value, length, widest), self.slots(arena, index))
        return StepOutput(self.heads[t - 1](self.norms[t - 1](x)), None, {})
