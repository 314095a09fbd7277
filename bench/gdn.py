"""Gated DeltaNet decode on a GPU: projection replay against a state for every beam (OneLA's figures 6, 7 and 8).

    widebeam bench gdn                                    all parts; needs fla-core and Triton beside CuPy
    widebeam bench gdn operator --out bench/results/gdn   JSON and a table

* check      errors of the kernel against a float32 state for every beam
* operator   R 4, 8, 16 x W 128, 256, 512 x nine geometries x T 2..6 calls: our kernel against fla's with states
             re-ordered between calls, and against a ReplaySSM-like path (`_gdn_paths`). Everything is captured into
             CUDA graphs. Ours: one graph over several input sets that together exceed the L2 cache, over their number.
             The peers: one set, whose states alone exceed it, and events inside of the graph behind every call.
* traffic    DRAM bytes of R = 4, W = 512 by Nsight Compute's counters, where the host lets it read them
* model      decode forwards of a 0.8B model (`_gdn_model`)

Shapes whose states do not fit the GPU are left out of the peers' columns, and the table says how many ran.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from bench._gdn_kernel import BAR, Inputs, check_all, floor, make_inputs
from bench._gdn_model import Setting, compare
from bench._gdn_paths import PATHS, counted, graph_time, onela, staged_times, unmarked
from bench._report import commit
from bench.gdn_accuracy import GEOMETRIES, Geometry

PARTS = ("check", "operator", "model", "traffic")
CALLS = 6
SHAPES = tuple(product((4, 8, 16), (128, 256, 512)))
SET_BYTES = 128 << 20
MOST_SETS = 24
SETTINGS = (Setting(4, 256, 1024), Setting(4, 256, 5120))


def batch(g: Geometry, requests: int, width: int, calls: int, seed: int) -> Inputs:
    """bfloat16, uniform parents sorted by parent."""
    return make_inputs(g, [width] * requests, calls, seed=seed, dtype=torch.bfloat16)


def own_times(g: Geometry, requests: int, width: int) -> list[float]:
    """Milliseconds of T = 2..CALLS calls of our kernel."""
    each = counted("onela", g, requests, requests * width, 2).traffic
    sets = max(2, min(MOST_SETS, -(-SET_BYTES // each)))
    inputs = [batch(g, requests, width, CALLS, seed) for seed in range(sets)]
    onela(inputs[0], CALLS)(unmarked)
    return [graph_time([onela(x, calls) for x in inputs], 8) for calls in range(2, CALLS + 1)]


def peer_times(name: str, g: Geometry, requests: int, width: int) -> list[float] | None:
    """Milliseconds of T = 2..CALLS calls of a peer; None where its states do not fit."""
    PATHS[name](batch(g, 1, 16, 2, 0), 2)(unmarked)  # compiles
    states = (3 if name == "full" else 1) * counted("full", g, requests, requests * width, 1).state
    if states > 0.93 * torch.cuda.mem_get_info()[0]:
        return None
    run = PATHS[name](batch(g, requests, width, CALLS, 0), CALLS)
    return staged_times(run, CALLS, 3 if states > 4 << 30 else 6)[1:]


def operator(peers: tuple[Geometry, ...], deadline: float, earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a (R, W, geometry): times of T = 2..CALLS by every path.

    peers    the geometries that the peers run; none starts behind the deadline (monotonic)
    earlier  a table whose peers' times stay where they do not run
    """
    table = []
    known = {tuple(line[x] for x in ("R", "W", *Geometry._fields)): line for line in earlier}
    for g, (requests, width) in product(GEOMETRIES, SHAPES):
        line: dict[str, Any] = {"R": requests, "W": width, **g._asdict(), "T": list(range(2, CALLS + 1))}
        line["onela_ms"] = own_times(g, requests, width)
        rows = requests * width
        line["floor_ms"] = [floor(g, rows, requests, calls) for calls in line["T"]]
        for name in ("full", "replayssm"):
            clean()
            late = g not in peers or time.monotonic() > deadline
            try:
                line[f"{name}_ms"] = None if late else peer_times(name, g, requests, width)
            except RuntimeError as error:  # out of memory, or a shape that the peer does not take
                line[f"{name}_ms"], line[f"{name}_error"] = None, str(error).splitlines()[0]
            if line[f"{name}_ms"] is None:
                line[f"{name}_ms"] = known.get((requests, width, *g), {}).get(f"{name}_ms")
        clean()
        table.append(line)
        shown = {name: line[f"{name}_ms"] and [round(line[f"{name}_ms"][i], 4) for i in (0, -1)] for name in PATHS}
        print(f"R={requests} W={width} {tuple(g)}: {shown}", flush=True)
    return table


def clean() -> None:
    """Give the memory of what is gone back."""
    gc.collect()
    torch.cuda.empty_cache()


def speedups(table: list[dict[str, Any]], name: str) -> list[float]:
    """Peer over ours, one for each (R, W, geometry, T) that both ran."""
    return [
        peer / own for line in table if line[f"{name}_ms"]
        for own, peer in zip(line["onela_ms"], line[f"{name}_ms"], strict=True)
    ]  # fmt: skip


def summary(table: list[dict[str, Any]]) -> dict[str, Any]:
    """Figure 7: quartiles of the ratios of time and of persistent state."""
    found: dict[str, Any] = {"shapes": len(table) * (CALLS - 1)}
    for name in ("full", "replayssm"):
        ratios = speedups(table, name)
        states = []
        for line in table:
            g = Geometry(*(line[x] for x in Geometry._fields))
            for calls in line["T"]:
                sizes = [counted(path, g, line["R"], line["R"] * line["W"], calls).state for path in (name, "onela")]
                states.append(sizes[0] / sizes[1])
        found[name] = {"ran": len(ratios), "median": median(ratios) if ratios else None, "state": median(states)}
        if len(ratios) > 1:
            found[name]["quartiles"] = quantiles(ratios, n=4)
    return found


# ---- DRAM traffic ----------------------------------------------------------------------------------------------------


def child(calls: int, paths: list[str]) -> None:
    """What Nsight Compute watches: the paths' calls at R = 4, W = 512, a marker kernel in front of each path."""
    for name in paths:
        run = PATHS[name](batch(GEOMETRIES[0], 4, 512, calls, 0), calls)
        run(unmarked)
        flush = torch.empty(64 << 20, device="cuda")
        flush.sum()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.arange(7 + len(name), device="cuda")
        run(unmarked)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del run
        clean()


def traffic(calls: int, paths: list[str], earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """DRAM bytes read and written by each path, or why they are not known; beside what was counted.

    earlier  results whose counters stay for the other paths
    """
    g, rows = GEOMETRIES[0], 4 * 512
    found: dict[str, Any] = {
        "T": calls,
        "counted": {name: counted(name, g, 4, rows, calls)._asdict() for name in PATHS},
    }
    command = [
        "ncu", "--csv", "--print-units", "base", "--metrics", "dram__bytes_read.sum,dram__bytes_write.sum",
        "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off",
        sys.executable, "-m", "bench.gdn", "--child", str(calls), "--paths", ",".join(paths),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=100, check=False, cwd=Path(__file__).parents[1]
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {**found, "counters": str(error)[:200]}
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    by_path: dict[str, dict[str, int]] = {}
    names = iter(paths)
    for line in csv.DictReader(lines):
        if "arange" in line["Kernel Name"] and line["Metric Name"].startswith("dram__bytes_read"):
            by_path[current := next(names)] = {"read": 0, "written": 0}
        elif "arange" not in line["Kernel Name"]:
            kind = "read" if "read" in line["Metric Name"] else "written"
            by_path[current][kind] += int(line["Metric Value"].replace(",", ""))
    before = [line["counters"] for line in earlier if line["T"] == calls and isinstance(line["counters"], dict)]
    kept = before[0] if by_path and before else {}
    return {**found, "counters": {**kept, **by_path} or (done.stdout + done.stderr)[-300:]}


# ---- what is written down --------------------------------------------------------------------------------------------


def about() -> dict[str, Any]:
    """The machine and what ran on it."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    for name in ("cupy-cuda13x", "triton", "fla-core"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {"device": torch.cuda.get_device_name(), **versions}


def as_table(found: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [f"`widebeam bench gdn` on {found['about']['device']}: {json.dumps(found['about'])}", ""]
    lines += _figure_6(found.get("model", [])) + _figure_7(found.get("summary")) + _figure_8(found)
    lines += _shapes(found.get("operator", []))
    return "\n".join(lines) + "\n"


def _figure_6(models: list[dict[str, Any]]) -> list[str]:
    lines = []
    for line in models:
        how = "captured" if all(f"{name}_ms" in line for name in ("onela", "full")) else "not captured"
        lines += [
            f"Decode forwards, R = {line['requests']}, W = {line['width']}, prompt {line['prompt']}, {how}; ms",
            "",
        ]
        lines += ["| O | " + " | ".join(map(str, line["outputs"])) + " |", "| --- " * (len(line["outputs"]) + 1) + "|"]
        for name in ("onela", "full"):
            times = line.get(f"{name}_ms", line[f"{name}_eager_ms"])
            lines.append(f"| {name} | " + " | ".join(f"{x:.2f}" for x in times) + " |")
        lines += ["| ratio | " + " | ".join(f"{x:.2f}" for x in line["ratio"]) + " |", ""]
    return lines


def _figure_7(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    lines = [
        "| peer | shapes that ran, of " + str(found["shapes"]) + " | time / ours, median | quartiles | state / ours |"
    ]
    lines.append("| --- " * 5 + "|")
    for name in ("full", "replayssm"):
        one = found[name]
        span = "-".join(f"{one['quartiles'][i]:.1f}" for i in (0, 2)) if "quartiles" in one else "-"
        middle = "-" if one["median"] is None else f"{one['median']:.1f}"
        lines.append(f"| {name} | {one['ran']} | {middle} | {span} | {one['state']:.1f} |")
    return [*lines, ""]


def _figure_8(found: dict[str, Any]) -> list[str]:
    lines = []
    for line in found.get("traffic", ()):
        lines += [f"R = 4, W = 512, H = 16, K = V = 128, T = {line['T']}; MiB", ""]
        lines += ["| | state | written | moved between calls | DRAM read | DRAM written | by | FLOP / byte |"]
        lines += ["| --- " * 8 + "|"]
        for name, count in line["counted"].items():
            read = isinstance(line["counters"], dict) and name in line["counters"]
            moved = line["counters"][name] if read else {"read": count["traffic"], "written": 0}
            sizes = (count["state"], count["written"], count["moved"], moved["read"], moved["written"])
            cells = [f"{x / 2**20:.1f}" for x in sizes]
            cells += ["counters" if read else "counted", f"{count['flops'] / (moved['read'] + moved['written']):.2f}"]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def _shapes(table: list[dict[str, Any]]) -> list[str]:
    if not table:
        return []
    lines = ["| R | W | HK/HV/K/V | T | onela ms | bytes at 4.3 TB/s | full ms | x | replayssm ms | x |"]
    lines += ["| --- " * 10 + "|"]
    for line in table:
        shape = "/".join(str(line[x]) for x in Geometry._fields)
        for i, calls in enumerate(line["T"]):
            own = line["onela_ms"][i]
            cells = [f"{own:.4f}", f"{line['floor_ms'][i]:.4f}"]
            for name in ("full", "replayssm"):
                peer = line[f"{name}_ms"]
                cells += [f"{peer[i]:.3f}", f"{peer[i] / own:.1f}"] if peer else ["-", "-"]
            lines.append(f"| {line['R']} | {line['W']} | {shape} | {calls} | " + " | ".join(cells) + " |")
    return lines


def compile_all() -> None:
    """Every kernel of the sweep, several at a time: NVRTC does not need Python."""
    shapes = sorted({(g.hk, g.hv, g.k, g.v) for g in GEOMETRIES if g.hk == g.hv})

    def one(shape: tuple[int, ...]) -> None:
        onela(batch(Geometry(*shape), 1, 8, 1, 0), 1)(unmarked)

    with ThreadPoolExecutor(len(shapes)) as pool:
        list(pool.map(one, shapes))


def before(out: Path | None) -> dict[str, Any]:
    """What an earlier run of other parts wrote there."""
    file = out and out.with_suffix(".json")
    return json.loads(file.read_text("utf-8")) if file and file.exists() else {}


def save(found: dict[str, Any], out: Path | None) -> None:
    """After every part: a run that is stopped keeps what it found."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(found, indent=1), "utf-8")
        out.with_suffix(".md").write_text(as_table(found), "utf-8")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help=", ".join(PARTS))
    parser.add_argument("--peers", default="0,1,2,3,4,5,6,7,8", help="geometries that the operator's peers run anew")
    parser.add_argument("--paths", default=",".join(PATHS), help="whose traffic is counted anew")
    parser.add_argument("--seconds", type=float, default=3600, help="no peer of the operator starts after that")
    parser.add_argument("--commit", default=commit(), help="noted beside the figures")
    parser.add_argument("--out", type=Path, help="without its suffix: .json and .md are written")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.child:
        child(args.child, args.paths.split(","))
        return
    begun, found = time.monotonic(), before(args.out) | {"about": {**about(), "commit": args.commit}}
    peers = tuple(GEOMETRIES[int(n)] for n in args.peers.split(",") if n)
    parts: dict[str, Callable[[], Any]] = {
        "check": check_all,
        "operator": lambda: operator(peers, begun + args.seconds, found.get("operator", [])),
        "model": lambda: [compare(setting) for setting in SETTINGS],
        "traffic": lambda: [traffic(calls, args.paths.split(","), found.get("traffic", [])) for calls in (2, CALLS)],
    }
    compile_all()
    for name in [part for part in PARTS if part in args.parts]:
        with torch.no_grad():
            found[name] = parts[name]()
        if name == "operator":
            found["summary"] = summary(found[name])
        if name != "check":
            print(json.dumps(found["summary"] if name == "operator" else found[name]), flush=True)
        clean()
        save(found, args.out)
    bounded = [line for line in found.get("check", ()) if "slow" in line["how"] or "init" in line["how"]]
    if any(line["error"] > BAR for line in bounded):
        raise SystemExit(f"an error is above {BAR}")


if __name__ == "__main__":
    main()
