"""Qwen3 (dense, or with experts) and Qwen2 language models whose vocabulary holds SID tokens (MiniOneRec, OpenOneRec,
LC-Rec and the like).

The prompt's keys and values are computed once per request, whatever its beams (RecoGEM 3.2); the last prompt position
predicts c1, so `encode` gives step 1's output. Step t >= 2 feeds one token a row: it attends to its request's prompt
and, through its ancestry, to the slots of steps 2..t-1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.config import Limits, SidConfig
from app.core import Arena, Contexts, Rows, StateSpec, StepOutput, WeightSpec
from app.engine import layers
from app.engine.families.base import Binding, ModelFiles
from app.engine.families.qwen_config import QwenConfig, block_parts, read_config
from app.engine.families.token_model import TokenModel
from app.engine.fp8 import product
from app.engine.moe import Mixture, Routing
from app.engine.tokens import Ids, sid_tokens
from app.ops.attention import beam_attention, causal_attention, context_attention


class Block(nn.Module):
    """One layer's parameters: q, k and v are one product, gate and up another; the head norms lie head by head."""

    def __init__(self, c: QwenConfig, routing: Routing | None) -> None:
        super().__init__()
        heads = c.heads + 2 * c.kv_heads
        self.input_norm = nn.Parameter(torch.empty(c.hidden_size))
        self.qkv = nn.Parameter(torch.empty(heads * c.dim, c.hidden_size))
        self.qkv_bias = nn.Parameter(torch.empty(heads * c.dim)) if c.qkv_bias else None
        self.qk_norm = nn.Parameter(torch.empty((c.heads + c.kv_heads) * c.dim)) if c.qk_norm else None
        self.out = nn.Parameter(torch.empty(c.hidden_size, c.heads * c.dim))
        self.out_bias = nn.Parameter(torch.empty(c.hidden_size)) if c.out_bias else None
        self.post_norm = nn.Parameter(torch.empty(c.hidden_size))
        self.experts = Mixture(routing, c.hidden_size) if routing is not None else None
        if routing is None:
            self.gate_up = nn.Parameter(torch.empty(2 * c.intermediate_size, c.hidden_size))
            self.down = nn.Parameter(torch.empty(c.hidden_size, c.intermediate_size))


class Qwen(TokenModel):
    """What Qwen2 and Qwen3 share."""

    contexts_on_device = True
    angles: Tensor

    def __init__(
        self, config: QwenConfig, tokens: tuple[Ids, ...], prefix: tuple[int, ...], limits: Limits, dtype: torch.dtype
    ) -> None:
        vocabulary = (config.vocab_size, config.hidden_size)
        super().__init__(vocabulary, tokens, prefix, limits, dtype, tied=config.tie_word_embeddings)
        self.config = config
        with torch.device("meta"):
            self.blocks = nn.ModuleList(Block(config, routing) for routing in config.experts)
        self.to(dtype)
        table = layers.rotary_table(self.positions + self.steps, config.dim, config.theta, config.rope_factor)
        self.register_buffer("angles", table, persistent=False)

    @classmethod
    def build(cls, files: ModelFiles, sid: SidConfig, limits: Limits, dtype: torch.dtype) -> Self:
        """See `Family.build`."""
        config = read_config(files.config, cls.name, limits.context + len(sid.prefix) + len(sid.sizes) - 1)
        cls.check_fit(sid, limits, config.vocab_size)
        return cls(config, sid_tokens(sid, files.directory, config.vocab_size), sid.prefix, limits, dtype)

    # ---- what the artifact holds, and state ------------------------------------------------------------------------

    def bindings(self) -> Mapping[str, Binding]:
        """See `Family.bindings`."""
        bindings = self.token_bindings()
        for i in range(len(self.blocks)):
            for part in block_parts(self.config, i):
                name = f"blocks.{i}.{part.parameter}"
                before = bindings[name].sources if name in bindings else ()
                bindings[name] = Binding(before + (part.source,) * part.times, part.rows)
        return bindings

    def weight_specs(self) -> tuple[WeightSpec, ...]:
        """See `Family.weight_specs`."""
        shapes = self.token_shapes()
        for i in range(len(self.blocks)):
            shapes |= {part.source: part.shape for part in block_parts(self.config, i)}
        return tuple(WeightSpec(name, shape) for name, shape in shapes.items())

    def projections(self) -> tuple[str, ...]:
        """See `Family.projections`."""
        found: list[str] = []
        for i, block in enumerate(self._blocks()):
            own = dict(block.named_parameters())
            found += [f"blocks.{i}.{name}" for name in ("qkv", "out", "gate_up", "down") if name in own]
            if block.experts is not None:
                found += [f"blocks.{i}.experts.{name}" for name in block.experts.projections()]
        return tuple(found)

    def ignored(self) -> tuple[str, ...]:
        """See `Family.ignored`: old exporters wrote the rotary frequencies, which config.json gives."""
        return tuple(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(len(self.blocks)))

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Keys and values of the prompt per request, and of one position per row slot; step 1's slots stay unused."""
        heads = (self.config.kv_heads, self.config.dim)
        specs = [StateSpec("prompt_length", (), torch.int32, "request")]
        for i in range(len(self.blocks)):
            specs += [StateSpec(f"prompt_{x}.{i}", (self.positions, *heads), self.dtype, "request") for x in "kv"]
            specs += [StateSpec(f"{x}.{i}", heads, self.dtype, "row") for x in "kv"]
        return tuple(specs)

    # ---- computation -----------------------------------------------------------------------------------------------

    def encode(self, contexts: Contexts, arena: Arena) -> StepOutput:
        """See `Family.encode`. Prompts lie end to end; behind the last attention only last positions are computed."""
        tokens, start, _ = contexts["tokens"]
        length, count = start.diff(), start.numel() - 1
        request = torch.repeat_interleave(torch.arange(count, device=start.device), length, output_size=tokens.shape[0])
        position = torch.arange(tokens.shape[0], device=start.device) - start[request]
        place, angles = request * self.positions + position, self.angles[position]
        arena["prompt_length"][:count] = length
        x = functional.embedding(tokens, self.embed)
        for i, block in enumerate(self._blocks()):
            q, k, v = self._qkv(block, x, angles)
            keys, values = arena[f"prompt_k.{i}"], arena[f"prompt_v.{i}"]
            keys.flatten(0, 1).index_copy_(0, place, k)
            values.flatten(0, 1).index_copy_(0, place, v)
            if i < len(self.blocks) - 1:
                attended = causal_attention(q, k, v, start, longest=self.positions, scale=self.scale)
            else:
                last, each = start[1:] - 1, torch.arange(count + 1, device=start.device)
                x, q = x[last], q[last]
                attended, _ = context_attention(
                    q, keys[:count], values[:count], length, each, widest=1, scale=self.scale
                )
            x = self._after(block, x, attended)
        return self.output(1, layers.rms_norm(x, self.norm, self.config.eps), full=True)

    def step(self, t: int, rows: Rows, arena: Arena) -> StepOutput:
        """See `Family.step`; t >= 2. The token of step t - 1 stands at position length + t - 2."""
        count = rows.row_start.numel() - 1
        length = arena["prompt_length"][:count]
        angles = self.angles[length[rows.request] + (t - 2)]
        x = self.embedded(t, rows.codes)
        for i, block in enumerate(self._blocks()):
            q, k, v = self._qkv(block, x, angles)
            keys, values = arena[f"prompt_k.{i}"][:count], arena[f"prompt_v.{i}"][:count]
            slots_k, slots_v = arena[f"k.{i}"], arena[f"v.{i}"]
            attended = beam_attention(
                q, k, v, (keys, values), length, rows.row_start, slots_k, slots_v, ancestry=rows.ancestry,
                widest=self.limits.widest, scale=self.scale, first=1, compact=rows.compact,
            )  # fmt: skip
            if t < self.steps:
                layers.keep(slots_k[t - 1], k)
                layers.keep(slots_v[t - 1], v)
            x = self._after(block, x, attended)
        return self.output(t, layers.rms_norm(x, self.norm, self.config.eps), full=rows.full)

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return float(self.config.dim**-0.5)

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def _qkv(self, block: Block, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, d] -> q [N, H, D], k, v [N, Hkv, D], q and k at their positions."""
        c = self.config
        normed = layers.rms_norm(x, block.input_norm, c.eps)
        qkv = product(normed, block.qkv, block.qkv_bias).view(x.shape[0], -1, c.dim)
        qk, v = qkv.split_with_sizes([c.heads + c.kv_heads, c.kv_heads], 1)
        if block.qk_norm is not None:
            qk = layers.rms_norm(qk, block.qk_norm.view(-1, c.dim), c.eps)
        qk = layers.rotate(qk, angles)
        return qk[:, : c.heads], qk[:, c.heads :], v

    def _after(self, block: Block, x: Tensor, attended: Tensor) -> Tensor:
        """Everything of a layer that follows its attention: x [N, d], attended [N, H, D] -> [N, d]."""
        x = x + product(attended.flatten(1), block.out, block.out_bias)
        normed = layers.rms_norm(x, block.post_norm, self.config.eps)
        if block.experts is not None:
            return block.experts(normed, x)  # type: ignore[no-any-return]
        return x + layers.swiglu(normed, block.gate_up, block.down)


class Qwen3(Qwen):
    """Qwen3ForCausalLM, Qwen3MoeForCausalLM: a norm on every query and key head, biases only where config.json says
    so."""

    name = "qwen3"


class Qwen2(Qwen):
    """Qwen2ForCausalLM (Qwen2, Qwen2.5): biases on q, k and v, no head norms."""

    name = "qwen2"
