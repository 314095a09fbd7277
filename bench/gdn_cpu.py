"""Beams of a Qwen3.5-like model on a CPU: Widebeam's front door against transformers' `generate`, and a fair peer.

    python -m bench.gdn_cpu --rounds 7 --out bench/results/gdn_cpu.json

One random checkpoint (3 Gated DeltaNet layers and 1 full attention layer, d 128, 96 prompt tokens, 3 x 256 codes,
10,000 items), the same catalogue and normalisation for everybody. Contestants take turns in one process and one thread
count; what is reported are medians, and their quotients. The fair peer is an own loop over transformers' model that
runs the prompt once and repeats its cache: what a careful user of transformers would write.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.cli.compose import Overrides, compose
from app.core import HistoryIds, Request
from app.runtime.runtime import Runtime
from bench.peers import Catalogue, Found, Generate, Repeated
from bench.setting import Setting, make_catalogue, make_histories, make_prompts, policy_name, write_root

EPS = 3e-4
CASES = ((8, 50), (1, 256))


def make_model(setting: Setting) -> Any:
    """A random Qwen3_5ForCausalLM; weights large enough that a search has something to decide."""
    from transformers.models import qwen3_5  # noqa: PLC0415  only the bench's own needs it

    torch.manual_seed(setting.seed)
    config = qwen3_5.Qwen3_5TextConfig(
        vocab_size=setting.vocabulary, hidden_size=setting.hidden, intermediate_size=setting.ffn,
        num_hidden_layers=setting.layers, num_attention_heads=setting.heads, num_key_value_heads=setting.kv_heads,
        head_dim=setting.head_dim, linear_num_key_heads=setting.heads, linear_num_value_heads=setting.heads,
        linear_key_head_dim=setting.head_dim, linear_value_head_dim=setting.head_dim,
        max_position_embeddings=4 * setting.prompt, initializer_range=0.08, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return qwen3_5.Qwen3_5ForCausalLM(config).eval()


class HybridLoop(Repeated):
    """`Repeated` for caches with recurrent states: a reorder repeats them, which `batch_repeat_interleave` cannot."""

    def _decode(
        self, cache: Any, tokens: torch.Tensor, prompt: int, t: int, parent: torch.Tensor, carried: Any
    ) -> tuple[torch.Tensor, Any]:
        batch, width = tokens.shape
        rows = torch.arange(batch).repeat_interleave(width) if t == 1 else None
        cache.reorder_cache((parent + carried * torch.arange(batch).unsqueeze(1)).reshape(-1) if rows is None else rows)
        position = torch.full((1, 1), prompt + t - 1)
        out = self._model.model(tokens.reshape(-1, 1), position_ids=position, cache=cache, use_cache=True)
        return out.last_hidden_state[:, -1], width


async def search(runtime: Runtime, histories: list[list[int]], width: int, sids: list[tuple[int, ...]]) -> Found:
    """The answers of requests that arrive at once, as the peers give theirs."""
    tickets = [
        runtime.admit(
            Request(str(n), HistoryIds(tuple(f"i{item}" for item in history)), width, policy=policy_name(width),
                    received=time.monotonic())
        )
        for n, history in enumerate(histories)
    ]  # fmt: skip
    outcomes = [await ticket.outcome() for ticket in tickets]
    assert {one.batch_requests for one in outcomes} == {len(histories)}, "they were not one batch"
    return [[(sids[int(item.id[1:])], item.score) for item in one.items] for one in outcomes]


def check(ours: Found, theirs: Found) -> None:
    """The same scores place by place, up to near-ties."""
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose([score for _, score in mine], [score for _, score in other], atol=EPS, rtol=0)


async def measure(args: argparse.Namespace, setting: Setting, root: Path) -> list[dict[str, Any]]:
    """All cases; contestants take turns inside a round."""
    model, sids = make_model(setting), make_catalogue(setting)
    write_root(root, setting, model, sids, [width for _, width in CASES], max(count for count, _ in CASES))
    file = root / "deployment.toml"
    file.write_text(file.read_text().replace('"qwen3"', '"qwen3_5"'))
    log = io.BytesIO()
    service = compose(root, Overrides(), log)
    runtime, named = service.build(), [tuple(sid) for sid in sids.tolist()]
    await runtime.start(service.load)
    assert not runtime.reasons(), log.getvalue().decode()
    torch.set_num_threads(args.threads)
    catalogue = Catalogue(sids, setting.sizes, setting.token_base)
    peers = [Generate(model, catalogue), HybridLoop(model, catalogue)]
    results = []
    for count, width in CASES:
        histories = make_histories(setting, count)
        prompts = make_prompts(setting, sids, histories)
        times: dict[str, list[float]] = {"widebeam": [], **{peer.name: [] for peer in peers}}
        for turn in range(args.rounds + 1):  # the first one warms up and is checked
            begin = time.perf_counter()
            ours = await search(runtime, histories, width, named)
            times["widebeam"].append(time.perf_counter() - begin)
            for peer in peers:
                spent, theirs = timed(partial(peer.search, prompts, width))
                times[peer.name].append(spent)
                if not turn:
                    check(ours, theirs)
        median = {name: statistics.median(values[1:]) for name, values in times.items()}
        results.append({
            "B": count, "W": width, "median_ms": {name: 1e3 * value for name, value in median.items()},
            "fastest_ms": {name: 1e3 * min(values[1:]) for name, values in times.items()},
            "times_faster": {peer.name: median[peer.name] / median["widebeam"] for peer in peers},
        })  # fmt: skip
        print(json.dumps(results[-1]), flush=True)
    await runtime.drained(10)
    return results


def timed(call: Callable[[], Found]) -> tuple[float, Found]:
    """Seconds, and what came back."""
    begin = time.perf_counter()
    found = call()
    return time.perf_counter() - begin, found


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    setting = Setting()
    with tempfile.TemporaryDirectory() as root:
        results = asyncio.run(measure(args, setting, Path(root)))
    if args.out:
        about = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": args.threads,
                 "rounds": args.rounds, "setting": setting.__dict__}  # fmt: skip
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**about, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
