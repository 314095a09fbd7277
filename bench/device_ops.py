"""The trie's and the transition's operators on a GPU: ours against torch's own, medians of graph replays.

python -m bench.device_ops --out bench/results/device_ops.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from app.ops import transition, trie
from app.ops.trie import reference
from bench._graph_time import graph_time
from bench._report import Shown, commit, save, table
from bench.attention import BANDWIDTH

ROWS = 16384
WIDTH = 512


def pair(name: str, ours: Callable[[], Any], torchs: Callable[[], Any], size: int) -> dict[str, Any]:
    """One operator both ways; size: bytes that its output has."""
    return {
        "operator": name, "ms": graph_time([ours] * 3), "torch_ms": graph_time([torchs] * 3),
        "floor_ms": 1e3 * size / BANDWIDTH,
    }  # fmt: skip


def walks(nodes: int, fan: int, codes: int) -> list[dict[str, Any]]:
    """Children, codes and sets over a random tree whose nodes have up to `fan` children."""
    generator = torch.Generator("cuda").manual_seed(fan)
    count = torch.randint(1, fan + 1, (nodes,), device="cuda", generator=generator)
    first = torch.cat([count.new_zeros(1), count.cumsum(0)]).to(torch.int32)
    edges = int(first[-1])
    code = torch.randint(0, codes, (edges,), device="cuda", generator=generator, dtype=torch.int32)
    node = torch.randint(0, nodes, (ROWS,), device="cuda", generator=generator)
    some = trie.children(first, code, node, fan)
    keys = torch.randint(0, 32 * edges, (3200,), device="cuda", generator=generator).sort().values
    request = torch.arange(ROWS, device="cuda") // WIDTH
    sized = f"{ROWS} rows, {fan} children"
    return [
        pair(
            f"children, {sized}", lambda: trie.children(first, code, node, fan),
            lambda: reference.children(first, code, node, fan), ROWS * fan * 17,
        ),
        pair(
            f"contains, {sized}", lambda: trie.contains(keys, some.node, request, edges),
            lambda: reference.contains(keys, some.node, request, edges), ROWS * fan * 9,
        ),
        pair(
            f"dense, {sized}, {codes} codes", lambda: trie.dense(first, code, node, fan, codes),
            lambda: reference.dense(first, code, node, fan, codes), ROWS * codes * 8,
        ),
    ]  # fmt: skip


def moves() -> list[dict[str, Any]]:
    """The ancestry update, and the compaction of one layer's keys (16 heads of 64, bf16) by torch's gather."""
    parent = torch.randint(0, WIDTH, (ROWS // WIDTH, WIDTH), device="cuda").sort(1).values
    parent = (parent + torch.arange(0, ROWS, WIDTH, device="cuda").unsqueeze(1)).flatten()
    index = torch.zeros(ROWS, 2, dtype=torch.int32, device="cuda")
    active, standby = (torch.randn(3, ROWS, 16, 64, device="cuda").bfloat16() for _ in range(2))
    size = 3 * ROWS * 16 * 64 * 2 * 2
    found = []
    for name, call, moved in (
        ("extend_ancestry", lambda: transition.extend_ancestry(index, parent), ROWS * 5 * 4),
        ("compact, 3 steps", lambda: transition.compact(active, standby, parent, 3), size),
    ):
        found.append({"operator": name, "torch_ms": graph_time([call] * 8), "floor_ms": 1e3 * moved / BANDWIDTH})
    return found


def shown(document: dict[str, Any], stem: str) -> Shown:
    """What was measured, and the table."""
    del stem  # there is no plot
    lines = []
    for one in document["ms"]:
        ours, torchs, floor = one.get("ms"), one["torch_ms"], one["floor_ms"]
        own = ["-", "-"] if ours is None else [f"{ours:.4f}", f"{torchs / ours:.1f}"]
        lines.append([one["operator"], own[0], f"{torchs:.4f}", own[1], f"{floor:.4f}"])
    head = ["operator", "ours", "by torch's operators", "times", "floor"]
    text = (
        "# The trie's and the transition's operators on a GPU\n\n"
        f"{document['device']}, torch {document['torch']}, commit {document['commit']}. Milliseconds, graph-captured "
        "medians. Floor: what must be moved once, at "
        f"{BANDWIDTH / 1e12:.1f} TB/s. `-`: torch's operators were all that there was. "
        "Of what: [README](../README.md).\n\n"
        f"{table(head, lines)}\n"
    )
    return Shown(text, {})


def main() -> None:
    """Time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = [*walks(100_000, 64, 8192), *walks(100_000, 512, 8192), *moves()]
    for one in found:
        print(json.dumps(one), flush=True)
    if args.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit()}
        document = {**about, "ms": found}
        save(args.out, document, shown(document, args.out.stem))


if __name__ == "__main__":
    main()
