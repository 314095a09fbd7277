"""What precision does to the survivors: overlap@K of a whole search with the one in float32.

    python -m bench.fp8 --out bench/results/fp8.json

Models: the demo's (trained), and a random Qwen3 whose logits are as flat as untrained ones are. Each root is answered
by `widebeam recommend` in float32, bfloat16 and fp8 on a CPU, where fp8 is emulated: rows and weights are
rounded as on a GPU and multiplied in float32. Overlap@K: items of the first K of float32's list that are among the
first K here, as a share; `first`: lists whose first item is the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.vocab.artifact import open_vocab
from bench._report import commit, cpu_model
from bench._setting import Setting, make_catalogue, make_histories, make_model, write_root

PRECISIONS = ("float32", "bfloat16", "fp8")
SIZES = (1, 10, 50)
HERE = Path(__file__).parents[1]
RANDOM = Setting(sizes=(256, 256, 256), items=10_000, history=8, layers=4, hidden=128)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=32)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        roots = {"demo": _demo(Path(folder) / "demo", asked.requests), "random": _random(Path(folder), asked.requests)}
        found = {name: _compared(*root) for name, root in roots.items()}
    command = f"python -m bench.fp8 --requests {asked.requests} --out bench/results/fp8.json"
    result = {"command": command, "commit": commit(), "cpu": cpu_model(), "requests": asked.requests, "models": found}
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def _demo(root: Path, requests: int) -> tuple[Path, list[list[str]], str]:
    for name in ("weights", "vocab", "policies"):
        shutil.copytree(HERE / name, root / name)
    shutil.copy(HERE / "deployment.toml", root)
    vocab = open_vocab(next((root / "vocab").iterdir()))
    generator = np.random.default_rng(0)
    histories = [vocab.ids(generator.choice(len(vocab.codes), 20, replace=False)) for _ in range(requests)]
    return root, [list(one) for one in histories], "narrow"


def _random(folder: Path, requests: int) -> tuple[Path, list[list[str]], str]:
    exported, catalogue = folder / "exported", make_catalogue(RANDOM)
    make_model(RANDOM).save_pretrained(exported)
    root = write_root(folder / "random", RANDOM, exported, catalogue, [64], batch=8, threads=2)
    return root, [[f"i{item}" for item in one] for one in make_histories(RANDOM, requests)], "w64"


def _compared(root: Path, histories: Sequence[Sequence[str]], policy: str) -> dict[str, Any]:
    lists = {precision: _answers(root, histories, policy, precision) for precision in PRECISIONS}
    expected = lists.pop("float32")
    return {precision: _overlap(expected, found) for precision, found in lists.items()}


def _answers(
    root: Path, histories: Sequence[Sequence[str]], policy: str, precision: str
) -> list[list[tuple[str, float]]]:
    text = (root / "deployment.toml").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith(("precision", "device"))]
    (root / "deployment.toml").write_text(f'precision = "{precision}"\ndevice = "cpu"\n' + "\n".join(lines) + "\n")
    bodies = [{"context": {"history": list(one)}, "k": max(SIZES), "policy": policy} for one in histories]
    (root / "in.jsonl").write_text("\n".join(map(json.dumps, bodies)))
    subprocess.run(
        [sys.executable, "-m", "app", "recommend", "--root", root, "--in", root / "in.jsonl", "--out", root / "out"],
        check=True, cwd=HERE, capture_output=True,
    )  # fmt: skip
    answers = [json.loads(line) for line in (root / "out").read_text("utf-8").splitlines()]
    return [[(item["id"], item["score"]) for item in one["items"]] for one in answers]


def _overlap(expected: list[list[tuple[str, float]]], found: list[list[tuple[str, float]]]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for size in SIZES:
        kept = [
            len({i for i, _ in one[:size]} & {i for i, _ in other[:size]}) / max(1, min(size, len(one)))
            for one, other in zip(expected, found, strict=True)
        ]
        shares["first" if size == 1 else f"overlap@{size}"] = round(float(np.mean(kept)), 4)
    apart = [
        abs(score - dict(one)[item])
        for one, other in zip(expected, found, strict=True)
        for item, score in other
        if item in dict(one)
    ]
    return {**shares, "score_median": round(float(np.median(apart)), 5), "score_most": round(float(np.max(apart)), 4)}


if __name__ == "__main__":
    main()
