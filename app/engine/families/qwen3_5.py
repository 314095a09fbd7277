"""Gated DeltaNet hybrids whose vocabulary holds SID tokens: Qwen3.5 (text), Qwen3-Next (OneLA).

The prompt is computed once per request, whatever its beams: the recurrent state S_ctx and the convolution's tail of
each Gated DeltaNet layer, keys and values of each full attention layer. A decode step writes one transition record
(alpha, delta, k) and one convolution input, or one key and value, a row and layer, into the slot of its row, once; a
later row finds those of its ancestors through the ancestry that all of them share. No beam has a recurrent state.
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
from app.engine.families.qwen3_5_blocks import Block, FullBlock, LinearBlock, Prompts, State, Step, centred_norm
from app.engine.families.qwen3_5_config import LINEAR, HybridConfig, block_parts, read_config
from app.engine.families.token_model import TokenModel
from app.engine.tokens import Ids, sid_tokens
from app.ops.gdn import plan_chunks

_UNREAD = ("model.visual.", "mtp.")
"""Beside the text model: the vision tower and the layers of multi-token prediction."""


class Qwen35(TokenModel):
    """Qwen3_5ForCausalLM, the text model of Qwen3_5ForConditionalGeneration, Qwen3NextForCausalLM."""

    name = "qwen3_5"
    angles: Tensor

    def __init__(
        self,
        config: HybridConfig,
        tokens: tuple[Ids, ...],
        prefix: tuple[int, ...],
        limits: Limits,
        dtype: torch.dtype,
        unread: tuple[str, ...] = (),
    ) -> None:
        vocabulary = (config.vocab_size, config.hidden_size)
        tied = config.tie_word_embeddings
        super().__init__(vocabulary, tokens, prefix, limits, dtype, tied=tied, trunk=config.trunk)
        self.config, self.unread = config, unread
        with torch.device("meta"):
            both = zip(config.kinds, config.experts, strict=True)
            blocks = ((LinearBlock if kind == LINEAR else FullBlock)(config, routing) for kind, routing in both)
            self.blocks = nn.ModuleList(blocks)
        self.to(dtype)
        specs = [block.states(self.positions, dtype) for block in self._blocks()]
        self.carried = [{spec.name: f"{spec.name}.{i}" for spec in own} for i, own in enumerate(specs)]
        table = layers.rotary_table(self.positions + self.steps, config.rotary, config.theta, config.rope_factor)
        self.register_buffer("angles", table, persistent=False)

    @classmethod
    def build(cls, files: ModelFiles, sid: SidConfig, limits: Limits, dtype: torch.dtype) -> Self:
        """See `Family.build`."""
        config = read_config(files.config, limits.context + len(sid.prefix) + len(sid.sizes) - 1)
        cls.check_fit(sid, limits, config.vocab_size)
        tokens = sid_tokens(sid, files.directory, config.vocab_size)
        unread = tuple(name for name in files.shapes if name.startswith(_UNREAD))
        return cls(config, tokens, sid.prefix, limits, dtype, unread)

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
            found += [f"blocks.{i}.{name}" for name in ("qkv", "qkvz", "out", "gate_up", "down") if name in own]
            if block.experts is not None:
                found += [f"blocks.{i}.experts.{name}" for name in block.experts.projections()]
        return tuple(found)

    def ignored(self) -> tuple[str, ...]:
        """See `Family.ignored`."""
        return self.unread

    def state_specs(self) -> tuple[StateSpec, ...]:
        """The prompt's length, and what each block carries as `name.i`; step 1's row slots stay unused."""
        specs = [StateSpec("prompt_length", (), torch.int32, "request")]
        for i, block in enumerate(self._blocks()):
            specs += [spec._replace(name=f"{spec.name}.{i}") for spec in block.states(self.positions, self.dtype)]
        return tuple(specs)

    # ---- computation -----------------------------------------------------------------------------------------------

    def encode(self, contexts: Contexts, arena: Arena) -> StepOutput:
        """See `Family.encode`. Prompts lie end to end; behind the last mixer only last positions are computed."""
        tokens, start, counts = contexts["tokens"]
        length, count = start.diff(), start.numel() - 1
        request = torch.repeat_interleave(torch.arange(count, device=start.device), length, output_size=tokens.shape[0])
        position = torch.arange(tokens.shape[0], device=start.device) - start[request]
        place = request * self.positions + position
        prompts = Prompts(start, position, place, self.angles[position], plan_chunks(start, counts=counts))
        arena["prompt_length"][:count] = length
        x = functional.embedding(tokens, self.embed)
        for i, block in enumerate(self._blocks()):
            x = block.encode(x, prompts, self._state(arena, i), last=i == len(self.blocks) - 1)
        return self.output(1, centred_norm(x, self.norm, self.config.eps), full=True)

    def step(self, t: int, rows: Rows, arena: Arena) -> StepOutput:
        """See `Family.step`; t >= 2. The token of step t - 1 stands at position length + t - 2."""
        length = arena["prompt_length"][: rows.row_start.numel() - 1]
        step = Step(t, t == self.steps, rows, length, self.angles[length[rows.request] + (t - 2)], self.limits.widest)
        x = self.embedded(t, rows.codes)
        for i, block in enumerate(self._blocks()):
            x = block.step(x, step, self._state(arena, i))
        return self.output(t, centred_norm(x, self.norm, self.config.eps), full=rows.full)

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def _state(self, arena: Arena, i: int) -> State:
        return {name: arena[own] for name, own in self.carried[i].items()}
