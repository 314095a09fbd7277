"""Random Qwen checkpoints written by transformers, and beam search over the engine's seam in NumPy.

`Case` says everything a search needs. `search` drives any object with the engine's methods; the served runtime goes
through the same cases by giving another function with its signature.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from app.config import Limits, SidConfig
from app.core import Arena, Ragged, Rows, TokenIds
from app.engine.engine import Engine

Normalize = Literal["full", "valid"]
BOS = 1
FAMILIES = {"qwen3": "qwen3", "qwen2": "qwen2", "qwen3_moe": "qwen3"}
"""The family that serves a kind of model."""
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class Case:
    """tokens: token id of every code, per step; items [n, L] the catalogue, distinct and sorted."""

    name: str
    sizes: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    items: np.ndarray
    vocabulary: int

    @property
    def sid(self) -> SidConfig:
        return SidConfig(sizes=self.sizes, tokens="file", prefix=(BOS,))


def make_case(name: str, sizes: tuple[int, ...], items: int, *, contiguous: bool, seed: int) -> Case:
    """A catalogue of distinct SIDs. Not contiguous: only codes in use have tokens, sorted as text (MiniOneRec)."""
    rng = np.random.default_rng(seed)
    whole = int(np.prod(sizes))
    picked = rng.choice(whole, size=min(items, whole), replace=False)
    table = np.unique(np.stack(np.unravel_index(picked, sizes), 1), axis=0)
    first = 5
    if contiguous:
        ends = np.cumsum((first, *sizes))
        tokens = tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends[1:], strict=True))
        last = int(ends[-1])
    else:
        used = sorted(f"{t}_{code}" for t in range(len(sizes)) for code in np.unique(table[:, t]))
        number = {text: first + place for place, text in enumerate(used)}
        tokens = tuple(tuple(number.get(f"{t}_{code}", -1) for code in range(size)) for t, size in enumerate(sizes))
        last = first + len(used)
    return Case(name, sizes, tokens, table, last + 7)


def make_model(kind: str, case: Case, *, seed: int, **config: Any) -> Any:
    """A random transformers model of a kind of `FAMILIES`, in eval mode. Layer 0 of one with experts is dense."""
    import transformers

    torch.manual_seed(seed)
    classes = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }
    settings = {
        "vocab_size": case.vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.3,  # far from uniform, so that searches have something to decide
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind != "qwen2":
        settings["head_dim"] = 16
    if kind == "qwen3_moe":
        settings |= EXPERTS | {"num_hidden_layers": 3, "mlp_only_layers": [0]}
    config_class, model_class = classes[kind]
    model = model_class(config_class(**(settings | config)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def save(model: Any, case: Case, directory: Path, **how: Any) -> Path:
    """A weights version: what save_pretrained writes, and sid_tokens.json."""
    model.save_pretrained(directory, **how)
    (directory / "sid_tokens.json").write_text(json.dumps(case.tokens))
    return directory


def make_limits(case: Case, width: int, batch: int, context: int = 40) -> Limits:
    return Limits(widths=(width,) * len(case.sizes), rows=max(width * batch, 1), batch=batch, context=context)


def ragged(engine: Engine, prompts: list[tuple[int, ...]]) -> dict[str, Ragged]:
    """Prompts through `prepare`, laid end to end."""
    inputs = [engine.prepare(TokenIds(prompt)) for prompt in prompts]
    packed = {}
    for spec in engine.input_specs():
        arrays = [one[spec.name] for one in inputs]
        start = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int32)
        packed[spec.name] = Ragged(torch.from_numpy(np.concatenate(arrays)), torch.from_numpy(start))
    return packed


Beams = list[tuple[tuple[int, ...], float]]


def search(
    engine: Engine, case: Case, prompts: list[tuple[int, ...]], widths: list[int], normalize: Normalize, arena: Arena
) -> list[Beams]:
    """Beam search of all prompts in one batch; request r keeps widths[r] beams. Best first, legal SIDs only."""
    output = engine.encode(ragged(engine, prompts), arena)
    beams: list[Beams] = [[((), 0.0)] for _ in prompts]
    slots: list[list[tuple[int, ...]]] = [[()] for _ in prompts]  # ancestry of each beam, physical rows
    for t in range(1, engine.steps + 1):
        if t > 1:
            output = engine.step(t, rows_of(t, beams, slots, full=normalize == "full"), arena)
        assert output is not None
        row = 0
        for r, width in enumerate(widths):
            ways = []
            for (sid, score), ancestry in zip(beams[r], slots[r], strict=True):
                legal = np.unique(case.items[(case.items[:, : t - 1] == sid).all(1), t - 1])
                logits = output.logits[row].numpy().astype(np.float64)[legal]
                norm = float(output.log_norm[row]) if normalize == "full" else np.logaddexp.reduce(logits)
                ways += [
                    ((*sid, int(code)), score + value - norm, (*ancestry, row))
                    for code, value in zip(legal, logits, strict=True)
                ]
                row += 1
            ways = sorted(ways, key=lambda way: (-way[1], way[0]))[:width]
            beams[r] = [(sid, score) for sid, score, _ in ways]
            slots[r] = [ancestry for *_, ancestry in ways]
    return beams


def rows_of(t: int, beams: list[Beams], slots: list[list[tuple[int, ...]]], *, full: bool) -> Rows:
    counts = [len(beam) for beam in beams]
    return Rows(
        codes=torch.tensor([sid[-1] for beam in beams for sid, _ in beam], dtype=torch.int32),
        request=torch.tensor([r for r, count in enumerate(counts) for _ in range(count)], dtype=torch.int32),
        row_start=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        ancestry=torch.tensor([way for slot in slots for way in slot], dtype=torch.int32).view(-1, t - 1),
        compact=False,
        full=full,
    )
