"""The whole decode forward of a Gated DeltaNet hybrid (OneLA 4.2, figure 6): our engine, and the same engine whose
Gated DeltaNet layers keep a state for every beam (controlled FullState).

Model: the shape of Qwen3.5-0.8B with random weights, bfloat16; steps of 8,192 codes. Everything but the recurrent state
is one code: projections, convolution windows by ancestry, attention over the shared prompt, gated norms, heads.
FullState's states come from S_ctx inside the first decode call (a gather), are re-ordered between calls by
index_select, and advanced by fla's kernel, which takes contiguous q, k and v (three small copies a layer) and gives a
16-bit output.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from app.config import Limits, SidConfig
from app.core import Arena, Ragged, Rows
from app.engine.engine import Engine
from app.engine.families.base import ModelFiles
from app.engine.families.qwen3_5 import Qwen35
from app.engine.families.qwen3_5_blocks import RECORD, LinearBlock, State
from app.ops import gdn
from bench._gdn_paths import staged_times, unmarked

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 248320, "hidden_size": 1024,
    "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "hidden_act": "silu",
    "tie_word_embeddings": True, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
CODES, STEPS = 8192, 7


class Setting(NamedTuple):
    """R requests of W beams behind prompts of so many tokens."""

    requests: int
    width: int
    prompt: int


class Batch(NamedTuple):
    """An engine with its prompts computed, and the rows of steps 2..STEPS."""

    engine: Engine
    family: Qwen35
    arena: Arena
    rows: list[Rows]


def random_family(limits: Limits, device: torch.device, config: dict[str, Any], steps: int, codes: int) -> Qwen35:
    """The family with random weights in bfloat16, made where they stay."""
    bases = tuple(1000 + t * codes for t in range(steps))
    sid = SidConfig(sizes=(codes,) * steps, token_base=bases)
    family = Qwen35.build(ModelFiles(config, Path(), {}), sid, limits, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(1)
    for name, parameter in list(family.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        made = torch.randn(parameter.shape, generator=generator, device=device) * (parameter.shape[-1] ** -0.5)
        if leaf == "a_log":
            made = torch.empty_like(made).uniform_(0.01, 16.0, generator=generator).log()
        elif made.dim() == 1:
            made.zero_()
            if leaf == "o_norm":
                made += 1.0
        setattr(family.get_submodule(owner), leaf, nn.Parameter(made.to(torch.bfloat16), requires_grad=False))
    return family.to(device)


def make_batch(setting: Setting, device: torch.device, config: dict[str, Any], steps: int, codes: int) -> Batch:
    """Prompts of random tokens, computed; uniform parents, sorted by parent, step after step."""
    requests, width, prompt = setting
    n = requests * width
    limits = Limits(widths=(width,) * steps, rows=n, batch=requests, context=prompt)
    family = random_family(limits, device, config, steps, codes)
    engine = Engine(family, device=device, dtype=torch.bfloat16)
    arena = engine.new_arena(limits)
    rng = np.random.default_rng(1)
    tokens = torch.from_numpy(rng.integers(0, config["vocab_size"], requests * prompt, dtype=np.int32))
    start = torch.arange(0, (requests + 1) * prompt, prompt, dtype=torch.int32)
    engine.encode({"tokens": Ragged(tokens.to(device), start.to(device))}, arena)
    rows, ancestry = [], np.empty((n, 0), np.int32)
    first = np.arange(n) // width * width
    for t in range(2, steps + 1):
        parent = first + np.sort(rng.integers(0, width, (requests, width)), 1).reshape(-1)
        ancestry = np.concatenate([ancestry[parent], parent[:, None].astype(np.int32)], 1)
        if t == 2:
            ancestry = np.arange(requests, dtype=np.int32).repeat(width)[:, None]
        arrays = (
            rng.integers(0, codes, n, dtype=np.int32),
            np.arange(requests, dtype=np.int32).repeat(width),
            np.arange(0, n + 1, width, dtype=np.int32),
            ancestry,
        )
        tensors: list[Any] = [torch.from_numpy(x.copy()).to(device) for x in arrays]
        rows.append(Rows(*tensors, compact=False, full=False))
    return Batch(engine, family, arena, rows)


class FullState:
    """What stands in for a block's replay: the states of its rows, re-ordered and advanced."""

    def __init__(self, block: LinearBlock) -> None:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule  # noqa: PLC0415  a peer: only here

        self._block, self._advance = block, fused_recurrent_gated_delta_rule
        self._state: Tensor | None = None

    def __call__(
        self, window: Tensor, key: Tensor | None, log_alpha: Tensor, beta: Tensor, rows: Rows, state: State,
        into: int | None,
    ) -> Tensor:  # fmt: skip
        """See `LinearBlock._replayed`; no record is written, and S_ctx is float32."""
        del into
        c = self._block.config
        if rows.ancestry.shape[1] == 1:
            own = state["s_ctx"].index_select(0, rows.request)
        else:
            assert self._state is not None
            own = self._state.index_select(0, rows.ancestry[:, -1])
        query, inside, value = torch.split(window, [c.keys, c.keys, c.values], 1)
        parts = (query, inside if key is None else key, value)
        q, k, v = (
            part.view(len(window), 1, heads, -1)
            for part, heads in zip(parts, (c.key_heads, c.key_heads, c.value_heads), strict=True)
        )
        o, self._state = self._advance(
            q, k, v, g=log_alpha.unsqueeze(1), beta=beta.unsqueeze(1), scale=c.key_dim**-0.5, initial_state=own,
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return o.squeeze(1).float()


class InTorch:
    """The replay by torch's operators: how far rounding alone moves the logits of so deep a random model."""

    def __init__(self, block: LinearBlock) -> None:
        self._block = block

    def __call__(
        self, window: Tensor, key: Tensor | None, log_alpha: Tensor, beta: Tensor, rows: Rows, state: State,
        into: int | None,
    ) -> Tensor:  # fmt: skip
        """See `LinearBlock._replayed`; S_ctx is float32."""
        c = self._block.config
        q, k, v = torch.split(window, [c.keys, c.keys, c.values], 1)
        q, k = (part.view(len(window), c.key_heads, -1) for part in (q, k if key is None else key))
        records, alpha = gdn.Records(*(state[name] for name in RECORD)), log_alpha.exp()
        o, delta = gdn.replay(
            gdn.unit_queries(q), gdn.unit_keys(k), v.view(len(window), c.value_heads, -1), alpha, beta,
            state["s_ctx"], records, row_start=rows.row_start, ancestry=rows.ancestry, first=1,
        )  # fmt: skip
        if into is not None:
            records.put(into, gdn.Record(alpha, delta, k, gdn.inverse_length(k)))
        return o


def swap(batch: Batch, path: type[FullState] | type[InTorch]) -> Callable[[], None]:
    """Let every Gated DeltaNet block compute by a path of its own, from S_ctx as it is before the kernel's order; the
    result takes both back."""
    blocks = {n: block for n, block in enumerate(batch.family.blocks) if isinstance(block, LinearBlock)}
    kept, method = {n: batch.arena[f"s_ctx.{n}"].clone() for n in blocks}, "_replayed"
    for n, block in blocks.items():
        if block.packs(batch.arena[f"conv_tail.{n}"]):
            batch.arena[f"s_ctx.{n}"].copy_(gdn.unpack(kept[n], torch.bfloat16))
        setattr(block, method, path(block))

    def back() -> None:
        for n, block in blocks.items():
            batch.arena[f"s_ctx.{n}"].copy_(kept[n])
            delattr(block, method)

    return back


def decode(batch: Batch, mark: Callable[[int], None]) -> list[Tensor]:
    """Steps 2..STEPS; their logits."""
    found = []
    for t, rows in enumerate(batch.rows, 2):
        found.append(batch.engine.step(t, rows, batch.arena).logits)
        mark(t - 2)
    return found


def eager_times(batch: Batch, rounds: int) -> list[float]:
    """Cumulative milliseconds without a graph."""
    calls, times = len(batch.rows), []
    for _ in range(rounds + 1):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        torch.cuda.synchronize()
        events[0].record()
        decode(batch, lambda t, events=events: events[t + 1].record())
        torch.cuda.synchronize()
        times.append([events[0].elapsed_time(event) for event in events[1:]])
    return torch.tensor(times[1:]).median(0).values.tolist()


def compare(setting: Setting, rounds: int = 5, config: dict[str, Any] = CONFIG, codes: int = CODES) -> dict[str, Any]:
    """Cumulative decode-forward times of O = 3..STEPS by both, captured and eager, and how far their logits differ."""
    batch = make_batch(setting, torch.device("cuda"), config, STEPS, codes)
    line: dict[str, Any] = {**setting._asdict(), "outputs": list(range(3, STEPS + 1))}
    logits: dict[str, list[Tensor]] = {}
    for name in ("onela", "torch", "full"):
        back = swap(batch, FullState if name == "full" else InTorch) if name != "onela" else None
        logits[name] = [x.float() for x in decode(batch, unmarked)]
        if name != "torch":
            line[f"{name}_eager_ms"] = eager_times(batch, 2)[1:]
            torch.cuda.empty_cache()
            try:
                line[f"{name}_ms"] = staged_times(lambda mark: decode(batch, mark), STEPS - 1, rounds)[1:]
            except RuntimeError as error:
                line[f"{name}_not_captured"] = str(error).splitlines()[0]
        if back is not None:
            back()
    for name in ("torch", "full"):
        pairs = zip(logits["onela"], logits[name], strict=True)
        line[f"logits_differ_from_{name}"] = max(float((a - b).std() / b.std()) for a, b in pairs)
    best = {name: line.get(f"{name}_ms", line[f"{name}_eager_ms"]) for name in ("onela", "full")}
    line["ratio"] = [full / own for own, full in zip(best["onela"], best["full"], strict=True)]
    return line
