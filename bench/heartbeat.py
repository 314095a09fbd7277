"""Does preparing a version hold up the event loop? A heartbeat every millisecond while catalogues and weights are read.

    python -m bench.heartbeat [--items 1000000 10000000] [--gigabytes 1.0] [--json FILE]

Work runs where a server runs it: in a background thread of low priority, beside the loop. Lateness is how much longer
than asked a sleep of one millisecond took. `idle` is the machine's own: what stands out against it is ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from app.cli.loop import run
from app.config import Limits, SidConfig
from app.engine.registry import family
from app.engine.slots import Slots
from app.engine.weights import load
from app.runtime.background import Background
from app.runtime.reading import read_vocab
from app.vocab.artifact import save_vocab
from app.vocab.items import Strings, Table
from bench._cutover_root import SMALL, _make_weights
from bench._report import settings, table

BEAT_S = 0.001
SIZES = (8192, 8192, 8192)
Row = dict[str, object]


async def beaten(work: Callable[[], Awaitable[object]]) -> Row:
    """The lateness of heartbeats while something runs."""
    late: list[float] = []
    done = False

    async def beat() -> None:
        while not done:
            before = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            late.append(time.perf_counter() - before - BEAT_S)

    task = asyncio.create_task(beat())
    await asyncio.sleep(0.05)
    late.clear()
    began = time.perf_counter()
    await work()
    seconds = time.perf_counter() - began
    done = True
    await task
    ordered = 1e3 * np.sort(late)
    return {
        "seconds": round(seconds, 3), "beats": len(ordered), "p50_ms": round(float(np.quantile(ordered, 0.5)), 3),
        "p99_ms": round(float(np.quantile(ordered, 0.99)), 3), "max_ms": round(float(ordered[-1]), 3),
    }  # fmt: skip


def make_vocab(root: Path, items: int) -> Path:
    flat = np.unique(np.random.default_rng(5).integers(0, int(np.prod(SIZES)), items))
    sids = np.stack(np.unravel_index(flat, SIZES), axis=1).astype(np.int32)
    text = np.char.mod(b"item-%011d", np.arange(len(sids)))  # ids of sixteen bytes
    strings = Strings(np.frombuffer(text.tobytes(), np.uint8), (16 * np.arange(len(sids) + 1)).astype(np.int64))
    save_vocab(Table(strings, sids, {}), SIZES, root, f"v{items}", made_by="bench")
    return root / "vocab" / f"v{items}"


async def measure(root: Path, items: list[int], gigabytes: float) -> dict[str, Row]:
    background = Background("artifacts", heavy=True)
    found = {"idle": await beaten(lambda: asyncio.sleep(3))}
    for count in items:
        place = make_vocab(root, count)
        kept: list[object] = []

        async def read(place: Path = place, kept: list[object] = kept) -> None:
            kept.append(await background.run(lambda: read_vocab(place, SIZES)))

        found[f"reading {count:,} items"] = await beaten(read)
        found[f"freeing {count:,} items"] = await beaten(lambda kept=kept: background.run(kept.clear))
    setting, slots = replace(SMALL, gigabytes=gigabytes), Slots()
    _make_weights(root / "store", setting, 0)
    place = root / "store" / "weights" / "a"
    sid, limits = SidConfig(sizes=setting.sizes, token_base=setting.token_base), Limits(context=96)

    def read_weights() -> object:
        return load(place, family("qwen3"), sid, limits, device=torch.device("cpu"), slots=slots)

    for what in ("a new slot", "a used slot"):
        found[f"reading {gigabytes:g} GB of weights into {what}"] = await beaten(lambda: background.run(read_weights))
    background.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--items", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = settings({}, 1)
    with tempfile.TemporaryDirectory() as scratch:
        found = run(measure(Path(scratch), arguments.items, arguments.gigabytes))
    columns = ["seconds", "p50_ms", "p99_ms", "max_ms"]
    print(table(["", *columns], [[name, *(str(row[c]) for c in columns)] for name, row in found.items()]))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": before, "lateness": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
