"""What is measured: one random Qwen3 checkpoint, one catalogue, one deployment root, the same for every contestant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.vocab.artifact import save_vocab
from app.vocab.items import Strings, Table
from app.vocab.publish import commit, draft
from app.vocab.vocab import arrange

SPECIAL = 3
"""Token ids in front of the SID tokens."""

POLICY = """widebeam: 1
steps:
  all:
    normalize: full
    mask: trie
    score: parent + logp
    select: top()
widths: {widths}
"""


@dataclass(frozen=True)
class Setting:
    """sizes: codes of each step; history: items of a prompt; the rest is the model's shape."""

    sizes: tuple[int, ...] = (256, 256, 256)
    items: int = 10_000
    history: int = 32
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 512
    seed: int = 1

    @property
    def token_base(self) -> tuple[int, ...]:
        """The token id of code 0 of each step."""
        return tuple(SPECIAL + sum(self.sizes[:t]) for t in range(len(self.sizes)))

    @property
    def vocabulary(self) -> int:
        """Special tokens and all codes."""
        return SPECIAL + sum(self.sizes)

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return self.history * len(self.sizes)


TOY = Setting(sizes=(8, 8, 8), items=200, history=4, layers=2, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=32)


def make_model(setting: Setting) -> Any:
    """A random Qwen3ForCausalLM; weights large enough that a search has something to decide."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415  only the bench's own needs it

    torch.manual_seed(setting.seed)
    config = Qwen3Config(
        vocab_size=setting.vocabulary,
        hidden_size=setting.hidden,
        intermediate_size=setting.ffn,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.kv_heads,
        head_dim=setting.head_dim,
        max_position_embeddings=4 * setting.prompt,
        initializer_range=0.08,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def make_catalogue(setting: Setting) -> npt.NDArray[np.int32]:
    """Distinct random SIDs [items, L] in SID order; item n is called "i<n>"."""
    generator = np.random.default_rng(setting.seed)
    flat = np.sort(generator.choice(int(np.prod(setting.sizes)), size=setting.items, replace=False))
    return np.stack(np.unravel_index(flat, setting.sizes), axis=1).astype(np.int32)


def make_histories(setting: Setting, count: int) -> list[list[int]]:
    """Item numbers of each request's history."""
    generator = np.random.default_rng(setting.seed + 1)
    return [generator.integers(0, setting.items, setting.history).tolist() for _ in range(count)]


def make_prompts(setting: Setting, catalogue: npt.NDArray[np.int32], histories: list[list[int]]) -> torch.Tensor:
    """The same histories as token ids [B, prompt], as Widebeam makes them from items."""
    base = np.array(setting.token_base)
    return torch.from_numpy(np.stack([(catalogue[history] + base).reshape(-1) for history in histories])).long()


def policy_name(width: int) -> str:
    """The policy of one width."""
    return f"w{width}"


def policy_text(setting: Setting, width: int) -> str:
    """Plain beam search of one width."""
    return POLICY.format(widths=[width] * len(setting.sizes))


def parameters(setting: Setting) -> int:
    """Numbers in the model."""
    s, own = setting, (setting.heads + 2 * setting.kv_heads) * setting.head_dim
    block = s.hidden * (own + s.heads * s.head_dim + 3 * s.ffn + 2) + 2 * s.head_dim
    return 2 * s.vocabulary * s.hidden + s.layers * block + s.hidden


def write_root(
    root: Path,
    setting: Setting,
    exported: Path,
    catalogue: npt.NDArray[np.int32],
    widths: list[int],
    batch: int,
    threads: int,
) -> Path:
    """A deployment root with the model as transformers exported it, the catalogue, and one policy a width."""
    most = [max(widths)] * len(setting.sizes)
    (root / "policies").mkdir(parents=True)
    (root / "deployment.toml").write_text(
        f'family = "qwen3"\ndevice = "cpu"\n[sid]\nsizes = {list(setting.sizes)}\n'
        f"token_base = {list(setting.token_base)}\n[limits]\nwidths = {most}\nrows = {max(widths) * batch}\n"
        f"batch = {batch}\ncontext = {setting.prompt}\n[server]\nport = 0\nadmin_port = 0\n"
        f'admin_auth = "none"\npolicy_override = true\nthreads = {threads}\n[log]\nlevel = "info"\n'
    )
    for width in widths:
        (root / "policies" / f"{policy_name(width)}.yaml").write_text(policy_text(setting, width))
    (root / "policies" / "base.yaml").write_text(policy_text(setting, min(widths)))
    with draft(root, "weights") as made:
        for file in sorted(exported.iterdir()):
            made.copy(file, file.name)
        commit(made, "weights", "v1", "bench", {})
    names = Strings.of([f"i{n}".encode() for n in range(len(catalogue))])
    table = Table(names, catalogue, {})
    save_vocab(arrange(table, setting.sizes), setting.sizes, root, "v1", made_by="bench")
    return root
