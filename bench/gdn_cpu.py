"""Beams of a Qwen3.5-like model on a CPU: Widebeam's front door against transformers' `generate`, and a fair peer.

    python -m bench.gdn_cpu                 under 4 minutes on 2 quiet cores; writes bench/results/gdn_cpu.json

One random checkpoint (3 Gated DeltaNet layers and 1 full attention layer, d 128, 96 prompt tokens, 3 x 256 codes,
10,000 items), the same catalogue and normalisation for everybody. Contestants take turns, transformers' in a process of
their own as in `bench.cpu` (two pools of OpenMP threads in one process slow each other down), all with as many threads
and the same settings; reported are medians and their quotients. The fair peer is an own loop over transformers' model
that runs the prompt once and repeats its cache for the beams: what a careful user of transformers would write.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.core import Outcome
from bench import _report, _served
from bench._peers import Found, Generate, Repeated, peers
from bench._setting import Setting, make_catalogue, make_histories, policy_name, write_root
from bench.cpu import PAUSE_S, PROCESS, THREADS

EPS = 3e-4
RESULTS = Path(__file__).parent / "results" / "gdn_cpu.json"
LEAST = 3
"""Rounds of a case that are run however long they take."""
OFTEN = 3
"""The quick contestants run so many times a round, `generate` once."""
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


class Contestant(NamedTuple):
    """find() gives its items; time() runs the same once more and gives milliseconds."""

    find: Callable[[], Found]
    time: Callable[[], float]


def widebeam(runtime: _served.InProcess, histories: list[list[int]], width: int) -> Contestant:
    """Requests that arrive at once and are one batch."""

    def ask() -> list[Outcome]:
        asked = [_served.request([f"i{item}" for item in one], width, policy_name(width)) for one in histories]
        outcomes = runtime.ask(asked)
        assert {one.batch_requests for one in outcomes} == {len(histories)}, "they were not one batch"
        return outcomes

    def milliseconds() -> float:
        begin = time.perf_counter()
        ask()
        return 1e3 * (time.perf_counter() - begin)

    return Contestant(lambda: _served.found(ask()), milliseconds)


def check(ours: Found, theirs: Found) -> None:
    """The same scores place by place, up to near-ties."""
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose([score for _, score in mine], [score for _, score in other], atol=EPS, rtol=0)


def measure(rounds: int, seconds: float, setting: Setting, root: Path, save: Callable[[list[Any]], None]) -> None:
    """All cases; contestants take turns inside a round. Each case has its share of the seconds; `save` gets what is
    done."""
    sids, kinds = make_catalogue(setting), (Generate, HybridLoop)
    widths, most = [width for _, width in CASES], max(count for count, _ in CASES)
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        others = stack.enter_context(peers(setting, most, THREADS, root / "exported", make=make_model, kinds=kinds))
        write_root(root / "root", setting, root / "exported", sids, widths, most, THREADS)
        file = root / "root" / "deployment.toml"
        file.write_text(file.read_text().replace('"qwen3"', '"qwen3_5"'))
        runtime = stack.enter_context(_served.in_process(root / "root"))
        for count, width in CASES:
            everybody = {"widebeam": widebeam(runtime, make_histories(setting, count), width)}
            for name in (kind.name for kind in kinds):
                asked = name, count, width
                everybody[name] = Contestant(partial(others.search, *asked), partial(others.milliseconds, *asked))
            results.append({"B": count, "W": width, **contest(everybody, rounds, seconds / len(CASES))})
            print(json.dumps(results[-1]), flush=True)
            save(results)


def contest(everybody: Mapping[str, Contestant], rounds: int, seconds: float) -> dict[str, Any]:
    """Medians of rounds in which all run in turn: at least `LEAST`, no new one behind `seconds`. A first run of each
    warms up and is compared."""
    begun, found = time.monotonic(), {name: one.find() for name, one in everybody.items()}
    for theirs in found.values():
        check(found["widebeam"], theirs)
    times: dict[str, list[float]] = {name: [] for name in everybody}
    for turn in range(rounds):
        if turn >= LEAST and time.monotonic() - begun > seconds:
            break
        for inner in range(OFTEN):
            for name, one in everybody.items():
                if inner == 0 or name != Generate.name:
                    time.sleep(PAUSE_S)
                    times[name].append(one.time())
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "runs": {name: len(values) for name, values in times.items()},
        "median_ms": {name: round(value, 2) for name, value in median.items()},
        "fastest_ms": {name: round(min(values), 2) for name, values in times.items()},
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
