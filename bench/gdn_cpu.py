"""Beams of a Qwen3.5-like model on a CPU: Widebeam's front door against transformers' `generate`, and a fair peer.

    python -m bench.gdn_cpu                 under 4 minutes on 2 quiet cores; writes bench/results/gdn_cpu.json

One random checkpoint (3 Gated DeltaNet layers and 1 full attention layer, d 128, 96 prompt tokens, 3 x 256 codes,
10,000 items), the same catalogue and normalisation for everybody. Contestants take turns in one process and one thread
count; reported are medians and their quotients. The fair peer is an own loop over transformers' model that runs the
prompt once and repeats its cache for the beams: what a careful user of transformers would write.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import _report, _served
from bench._peers import Catalogue, Found, Generate, Repeated
from bench._setting import Setting, make_catalogue, make_histories, make_prompts, policy_name, write_root
from bench.cpu import PROCESS, THREADS

EPS = 3e-4
RESULTS = Path(__file__).parent / "results" / "gdn_cpu.json"
LEAST = 3
"""Rounds of a case that are run however long they take."""
CASES = ((8, 50), (1, 256))


class HybridLoop(Repeated):
    """`Repeated` for caches with recurrent states: a reorder repeats them, which `batch_repeat_interleave` cannot."""

    def _decode(
        self, cache: Any, tokens: Tensor, prompt: int, t: int, parent: Tensor, carried: Any
    ) -> tuple[Tensor, Any]:
        batch, width = tokens.shape
        rows = torch.arange(batch).repeat_interleave(width)
        if t > 1:
            rows = (parent + carried * torch.arange(batch).unsqueeze(1)).reshape(-1)
        cache.reorder_cache(rows)
        position = torch.full((1, 1), prompt + t - 1)
        out = self._model.model(tokens.reshape(-1, 1), position_ids=position, cache=cache, use_cache=True)
        return out.last_hidden_state[:, -1], width


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


def search(runtime: _served.InProcess, histories: list[list[int]], width: int) -> Found:
    """The answers of requests that arrive at once."""
    asked = [_served.request([f"i{item}" for item in one], width, policy_name(width)) for one in histories]
    outcomes = runtime.ask(asked)
    assert {one.batch_requests for one in outcomes} == {len(histories)}, "they were not one batch"
    return _served.found(outcomes)


def check(ours: Found, theirs: Found) -> None:
    """The same scores place by place, up to near-ties."""
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose([score for _, score in mine], [score for _, score in other], atol=EPS, rtol=0)


def measure(rounds: int, seconds: float, setting: Setting, root: Path, save: Callable[[list[Any]], None]) -> None:
    """All cases; contestants take turns inside a round. Each case has its share of the seconds; `save` gets what is
    done."""
    model, sids = make_model(setting), make_catalogue(setting)
    model.save_pretrained(root / "exported")
    widths, most = [width for _, width in CASES], max(count for count, _ in CASES)
    write_root(root / "root", setting, root / "exported", sids, widths, most, THREADS)
    file = root / "root" / "deployment.toml"
    file.write_text(file.read_text().replace('"qwen3"', '"qwen3_5"'))
    catalogue = Catalogue(sids, setting.sizes, setting.token_base)
    results: list[dict[str, Any]] = []
    with _served.in_process(root / "root") as runtime:
        torch.set_num_threads(THREADS)
        for count, width in CASES:
            histories = make_histories(setting, count)
            prompts = make_prompts(setting, sids, histories)
            peers = {peer.name: peer for peer in (Generate(model, catalogue), HybridLoop(model, catalogue))}
            everybody: dict[str, Callable[[], Found]] = {
                "widebeam": lambda h=histories, w=width: search(runtime, h, w),  # type: ignore[misc]
                **{n: (lambda p=p, x=prompts, w=width: p.search(x, w)) for n, p in peers.items()},
            }
            results.append({"B": count, "W": width, **contest(everybody, rounds, seconds / len(CASES))})
            print(json.dumps(results[-1]), flush=True)
            save(results)


def contest(everybody: dict[str, Callable[[], Found]], rounds: int, seconds: float) -> dict[str, Any]:
    """Medians of rounds in which all run in turn: at least `LEAST`, no new one behind `seconds`. A first one warms up
    and is compared."""
    times: dict[str, list[float]] = {name: [] for name in everybody}
    expected: Found | None = None
    begun = time.monotonic()
    for turn in range(rounds + 1):
        if turn > LEAST and time.monotonic() - begun > seconds:
            break
        for name, run in everybody.items():
            begin = time.perf_counter()
            found = run()
            times[name].append(1e3 * (time.perf_counter() - begin))
            if not turn:
                check(expected or found, found)
                expected = found
    median = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {
        "rounds": len(times["widebeam"]) - 1,
        "median_ms": {name: round(value, 2) for name, value in median.items()},
        "fastest_ms": {name: round(min(values[1:]), 2) for name, values in times.items()},
        "times_faster": {name: round(value / median["widebeam"], 2) for name, value in median.items()},
    }


def main() -> None:
    """Measure under `bench.cpu`'s process settings and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=180, help="no round begins behind that")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in PROCESS.items()):
        os.execve(sys.executable, [sys.executable, "-m", "bench.gdn_cpu", *sys.argv[1:]], os.environ | PROCESS)
    about = _report.settings(PROCESS, THREADS)

    def save(results: list[Any]) -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"settings": about, "cases": results}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as root:
        measure(args.rounds, args.seconds, Setting(), Path(root), save)


if __name__ == "__main__":
    main()
