"""Qwen3 and Qwen2 language models whose vocabulary holds SID tokens (MiniOneRec, OpenOneRec, LC-Rec and the like).

The prompt's keys and values are computed once per request, whatever its beams (RecoGEM 3.2); the last prompt position
predicts c1, so `encode` gives step 1's output. Step t >= 2 feeds one token a row: it attends to its request's prompt
and, through its ancestry, to the slots of steps 2..t-1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from app.config import Limits, SidConfig
from app.core import (
    Arena,
    Context,
    Contexts,
    History,
    Inputs,
    InputSpec,
    Rows,
    StateSpec,
    StepOutput,
    TokenIds,
    WeightSpec,
)
from app.engine import layers
from app.engine.families.base import Binding, Family, ModelFiles
from app.engine.families.qwen_config import QwenConfig, block_parts, read_config
from app.engine.tokens import Ids, sid_tokens
from app.errors import Fault, InvalidRequest, Rejected
from app.ops.attention import causal_attention, context_attention, merge, prefix_attention


class Block(nn.Module):
    """One layer's parameters: q, k and v are one product, gate and up another; the head norms lie head by head."""

    def __init__(self, c: QwenConfig) -> None:
        super().__init__()
        heads = c.heads + 2 * c.kv_heads
        self.input_norm = nn.Parameter(torch.empty(c.hidden_size))
        self.qkv = nn.Parameter(torch.empty(heads * c.dim, c.hidden_size))
        self.qkv_bias = nn.Parameter(torch.empty(heads * c.dim)) if c.qkv_bias else None
        self.qk_norm = nn.Parameter(torch.empty((c.heads + c.kv_heads) * c.dim)) if c.qk_norm else None
        self.out = nn.Parameter(torch.empty(c.hidden_size, c.heads * c.dim))
        self.out_bias = nn.Parameter(torch.empty(c.hidden_size)) if c.out_bias else None
        self.post_norm = nn.Parameter(torch.empty(c.hidden_size))
        self.gate_up = nn.Parameter(torch.empty(2 * c.intermediate_size, c.hidden_size))
        self.down = nn.Parameter(torch.empty(c.hidden_size, c.intermediate_size))


class Qwen(Family):
    """What Qwen2 and Qwen3 share. tokens[t - 1] [C_t] int64: the token ids of step t's codes, -1 = none."""

    contexts: ClassVar[tuple[type, ...]] = (History, TokenIds)
    log_norm = True
    angles: Tensor

    def __init__(
        self, config: QwenConfig, tokens: tuple[Ids, ...], prefix: tuple[int, ...], limits: Limits, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config, self.tokens, self.context, self.dtype = config, tokens, limits.context, dtype
        self.steps = len(tokens)
        self.prefix = np.array(prefix, dtype=np.int32)
        self.positions = limits.context + len(prefix)
        with torch.device("meta"):
            vocabulary = (config.vocab_size, config.hidden_size)
            self.embed = nn.Parameter(torch.empty(vocabulary))
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
            self.norm = nn.Parameter(torch.empty(config.hidden_size))
            self.head = None if config.tie_word_embeddings else nn.Parameter(torch.empty(vocabulary))
            self.heads = nn.ParameterList(torch.empty(len(ids), config.hidden_size) for ids in tokens)
        self.to(dtype)
        table = layers.rotary_table(self.positions + self.steps, config.dim, config.theta, config.rope_factor)
        self.register_buffer("angles", table, persistent=False)
        for t, ids in enumerate(tokens, 1):
            self.register_buffer(f"token_{t}", torch.from_numpy(ids.clip(0)), persistent=False)
            self.register_buffer(f"none_{t}", torch.from_numpy(np.flatnonzero(ids < 0)), persistent=False)

    @classmethod
    def build(cls, files: ModelFiles, sid: SidConfig, limits: Limits, dtype: torch.dtype) -> Self:
        """See `Family.build`."""
        steps, prefix = len(sid.sizes), sid.prefix
        config = read_config(files.config, cls.name, limits.context + len(prefix) + steps - 1)
        for token in prefix:
            if token >= config.vocab_size:
                message = f"token {token} is outside of the model's {config.vocab_size} tokens"
                raise Rejected("token_out_of_range", message, location="deployment.toml: sid.prefix")
        if len(prefix) + steps > limits.context:
            message = (
                f"{limits.context} positions do not hold one item of {steps} codes and {len(prefix)} prefix tokens"
            )
            raise Rejected("context_too_short", message, location="deployment.toml: limits.context")
        return cls(config, sid_tokens(sid, files.directory, config.vocab_size), prefix, limits, dtype)

    # ---- what the artifact holds -----------------------------------------------------------------------------------

    def bindings(self) -> Mapping[str, Binding]:
        """See `Family.bindings`."""
        head = "model.embed_tokens.weight" if self.head is None else "lm_head.weight"
        bindings = {
            "embed": Binding(("model.embed_tokens.weight",)),
            "norm": Binding(("model.norm.weight",)),
            **{f"heads.{t}": Binding((head,), torch.from_numpy(ids)) for t, ids in enumerate(self.tokens)},
        }
        if self.head is not None:
            bindings["head"] = Binding((head,))
        for i in range(len(self.blocks)):
            for part in block_parts(self.config, i):
                name = f"blocks.{i}.{part.parameter}"
                before = bindings[name].sources if name in bindings else ()
                bindings[name] = Binding(before + (part.source,) * part.times)
        return bindings

    def weight_specs(self) -> tuple[WeightSpec, ...]:
        """See `Family.weight_specs`."""
        c = self.config
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
        for i in range(c.num_hidden_layers):
            shapes |= {part.source: part.shape for part in block_parts(c, i)}
        shapes["model.norm.weight"] = (c.hidden_size,)
        if self.head is not None:
            shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
        return tuple(WeightSpec(name, shape) for name, shape in shapes.items())

    def tied(self) -> Mapping[str, str]:
        """See `Family.tied`: some exporters write a tied head twice."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.head is None else {}

    def ignored(self) -> tuple[str, ...]:
        """See `Family.ignored`: old exporters wrote the rotary frequencies, which config.json gives."""
        return tuple(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(len(self.blocks)))

    def missing_tokens(self) -> tuple[tuple[int, ...], ...]:
        """See `Family.missing_tokens`."""
        return tuple(tuple(np.flatnonzero(ids < 0).tolist()) for ids in self.tokens)

    # ---- inputs and state ------------------------------------------------------------------------------------------

    def input_specs(self) -> tuple[InputSpec, ...]:
        """`tokens`: the prompt with the prefix behind it."""
        return (InputSpec("tokens", (), torch.int32, self.positions),)

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Keys and values of the prompt per request, and of one position per row slot; step 1's slots stay unused."""
        heads = (self.config.kv_heads, self.config.dim)
        specs = [StateSpec("prompt_length", (), torch.int32, "request")]
        for i in range(len(self.blocks)):
            specs += [StateSpec(f"prompt_{x}.{i}", (self.positions, *heads), self.dtype, "request") for x in "kv"]
            specs += [StateSpec(f"{x}.{i}", heads, self.dtype, "row") for x in "kv"]
        return tuple(specs)

    def prepare(self, context: Context) -> Inputs:
        """A prompt as it is, or the newest items that fit as the SID tokens of each in time order; then the prefix."""
        match context:
            case TokenIds(ids):
                prompt = self._prompt(ids)
            case History(codes):
                newest = codes[max(0, len(codes) - (self.context - len(self.prefix)) // self.steps) :]
                columns = [ids[newest[:, t]] for t, ids in enumerate(self.tokens)]
                prompt = np.stack(columns, 1).reshape(-1).astype(np.int32)
                if prompt.size and prompt.min() < 0:
                    raise Fault("a history holds a code without a token: the gate let its vocab through")
            case _:
                raise InvalidRequest("this model takes `history` or `tokens`", path="$.context")
        prompt = np.concatenate([prompt, self.prefix])
        if not prompt.size:
            raise InvalidRequest("the context is empty: there is nothing to predict from", path="$.context")
        return {"tokens": prompt}

    def _prompt(self, ids: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        if len(ids) > self.context:
            message = f"{len(ids)} tokens; the model takes {self.context}"
            raise InvalidRequest(message, path="$.context.tokens")
        vocabulary = self.config.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
            place = next(i for i, token in enumerate(ids) if not 0 <= token < vocabulary)
            message = f"{ids[place]} is outside of the model's {vocabulary} tokens"
            raise InvalidRequest(message, path=f"$.context.tokens[{place}]")
        return np.array(ids, dtype=np.int32)

    # ---- computation -----------------------------------------------------------------------------------------------

    def encode(self, contexts: Contexts, arena: Arena) -> StepOutput:
        """See `Family.encode`. Prompts lie end to end; behind the last attention only last positions are computed."""
        tokens, start = contexts["tokens"]
        length, count = start.diff(), start.numel() - 1
        request = torch.repeat_interleave(torch.arange(count, device=start.device), length, output_size=len(tokens))
        position = torch.arange(len(tokens), device=start.device) - start[request]
        place, angles = request * self.positions + position, self.angles[position]
        arena["prompt_length"][:count] = length
        x = functional.embedding(tokens, self.embed)
        for i, block in enumerate(self._blocks()):
            q, k, v = self._qkv(block, x, angles)
            keys, values = arena[f"prompt_k.{i}"], arena[f"prompt_v.{i}"]
            keys.flatten(0, 1).index_copy_(0, place, k)
            values.flatten(0, 1).index_copy_(0, place, v)
            if i < len(self.blocks) - 1:
                attended = causal_attention(q, k, v, start, self.scale)
            else:
                last, each = start[1:] - 1, torch.arange(count + 1, device=start.device)
                x, q = x[last], q[last]
                attended, _ = context_attention(q, keys[:count], values[:count], length, each, scale=self.scale)
            x = self._after(block, x, attended)
        return self._output(1, x, full=True)

    def step(self, t: int, rows: Rows, arena: Arena) -> StepOutput:
        """See `Family.step`; t >= 2. The token of step t - 1 stands at position length + t - 2."""
        n, count = rows.codes.numel(), rows.row_start.numel() - 1
        length = arena["prompt_length"][:count]
        angles = self.angles[length[rows.request] + (t - 2)]
        token = self.get_buffer(f"token_{t - 1}")
        x = functional.embedding(token[rows.codes.clamp(0, len(token) - 1)], self.embed)
        for i, block in enumerate(self._blocks()):
            q, k, v = self._qkv(block, x, angles)
            keys, values = arena[f"prompt_k.{i}"][:count], arena[f"prompt_v.{i}"][:count]
            slots_k, slots_v = arena[f"k.{i}"], arena[f"v.{i}"]
            shared = context_attention(q, keys, values, length, rows.row_start, scale=self.scale)
            own = prefix_attention(
                q, k, v, slots_k, slots_v, ancestry=rows.ancestry, scale=self.scale, first=1, compact=rows.compact
            )
            if t < self.steps:
                slots_k[t - 1, :n] = k
                slots_v[t - 1, :n] = v
            x = self._after(block, x, merge(*shared, *own)[0])
        return self._output(t, x, full=rows.full)

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
        qkv = functional.linear(normed, block.qkv, block.qkv_bias).view(len(x), -1, c.dim)
        qk, v = torch.split(qkv, [c.heads + c.kv_heads, c.kv_heads], 1)
        if block.qk_norm is not None:
            qk = layers.rms_norm(qk, block.qk_norm.view(-1, c.dim), c.eps)
        qk = layers.rotate(qk, angles)
        return qk[:, : c.heads], qk[:, c.heads :], v

    def _after(self, block: Block, x: Tensor, attended: Tensor) -> Tensor:
        """Everything of a layer that follows its attention: x [N, d], attended [N, H, D] -> [N, d]."""
        x = x + functional.linear(attended.flatten(1), block.out, block.out_bias)
        normed = layers.rms_norm(x, block.post_norm, self.config.eps)
        return x + layers.swiglu(normed, block.gate_up, block.down)

    def _output(self, t: int, x: Tensor, *, full: bool) -> StepOutput:
        hidden = layers.rms_norm(x, self.norm, self.config.eps)
        logits = functional.linear(hidden, self.heads[t - 1])
        logits = logits.index_fill_(1, self.get_buffer(f"none_{t}"), float("-inf"))
        if x.device.type == "cpu":
            logits = logits.float()  # 16-bit arithmetic is no gain there, and the selection computes in fp32
        head = self.embed if self.head is None else self.head
        return StepOutput(logits, layers.log_norm(hidden, head) if full else None, {})


class Qwen3(Qwen):
    """Qwen3ForCausalLM: a norm on every query and key head, biases only where config.json says so."""

    name = "qwen3"


class Qwen2(Qwen):
    """Qwen2ForCausalLM (Qwen2, Qwen2.5): biases on q, k and v, no head norms."""

    name = "qwen2"
