"""What was measured, where and under which settings, as a table to read."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

Row = dict[str, Any]
OURS = ("Widebeam, in process", "Widebeam, REST")


def settings(process: Mapping[str, str], threads: int) -> Row:
    """CPU, versions, commit and the environment of the run."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": gpu_model(),
        "load_before": round(os.getloadavg()[0], 2),
        "threads": threads,
        "environment": dict(process),
        "versions": {name: _version(name) for name in ("widebeam", "torch", "transformers", "numpy", "uvloop")}
        | {"python": platform.python_version()},
        "commit": commit(),
    }


class Shown(NamedTuple):
    """A result to read: Markdown, and pictures by the names of their files."""

    text: str
    pictures: Mapping[str, str]


def save(out: Path, document: Row, shown: Shown) -> None:
    """A result as JSON, and beside it as it is shown."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    out.with_suffix(".md").write_text(shown.text, "utf-8")
    for name, picture in shown.pictures.items():
        out.with_name(name).write_text(picture, "utf-8")


def cpu_model() -> str:
    """As the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def gpu_model() -> str:
    """As its driver names it; empty where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def commit() -> str:
    """The clone's commit, with "+" where files differ from it. A copy without its history says which it is of in
    WIDEBEAM_COMMIT."""
    told = os.environ.get("WIDEBEAM_COMMIT")
    if told:
        return told

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    if shutil.which("git") is None:
        return ""
    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head}+" if head and git("status", "--porcelain", "--untracked-files=no", "--", "../app", ".") else head


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def markdown(result: Row) -> str:
    """The whole report."""
    parts = ["# Widebeam on a CPU\n", "Made by `make bench-cpu`; [README](../README.md) says what is compared.\n"]
    for half, show in (("search", _search), ("demo", _demo)):
        if half in result:
            parts += [show(result[half]), _settings(result[half]["settings"])]
    return "\n".join(parts)


def _settings(found: Row) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    environment = " ".join(f"{name}={value}" for name, value in found["environment"].items())
    return (
        f"{found['cpu']}, {found['cores']} cores, {found['threads']} threads for everybody; "
        f"load average before the run {found['load_before']}.\n{versions}; commit {found['commit'] or 'unknown'}.\n"
        f"Every process ran under `{environment}`.\n"
    )


def _search(found: Row) -> str:
    s = found["setting"]
    head = (
        f"\n## The same search\n\nqwen3, {s['layers']} layers, d {s['hidden']}, {s['heads']} query and {s['kv_heads']} "
        f"key/value heads of {s['head_dim']}, FFN {s['ffn']}, {s['parameters'] / 1e6:.2f} M random parameters in "
        f"float32; {s['items']:,} items, {len(s['sizes'])} codes of {s['sizes'][0]}; prompts of {s['prompt_tokens']} "
        f"tokens ({s['history']} items); scores normalised over the whole vocabulary.\n"
        "Milliseconds a batch: median (minimum).\n"
    )
    cells, names = found["cells"], list(found["cells"][0]["median_ms"])
    titles = [f"batch {cell['batch']}, W {cell['width']}" for cell in cells]
    rows = [
        [name, *(f"{cell['median_ms'][name]:.1f} ({cell['min_ms'][name]:.1f})" for cell in cells)] for name in names
    ]
    rows.append(["runs of each (`generate`)", *(_runs(cell) for cell in cells)])
    rows.append(["places swapped by near-ties", *(str(max(cell["near_ties_swapped"].values())) for cell in cells)])
    peers = [name for name in names if name.startswith("own loop")]
    ratios = []
    for ours in OURS:
        for label, theirs in (("generate", ["generate"]), ("the best own loop", peers)):
            ratios.append([f"{label} / {ours}", *(_ratio(cell, theirs, ours) for cell in cells)])
    return "\n".join(
        [head, table(["", *titles], rows), "\nRatios of medians (of minima): above 1, Widebeam is quicker.\n",
         table(["", *titles], ratios)]
    )  # fmt: skip


def _runs(cell: Row) -> str:
    return f"{max(cell['runs'].values())} ({cell['runs']['generate']})"


def _ratio(cell: Row, theirs: list[str], ours: str) -> str:
    medians, least = (min(cell[kind][name] for name in theirs) / cell[kind][ours] for kind in ("median_ms", "min_ms"))
    return f"{medians:.2f} ({least:.2f})"


def _demo(found: Row) -> str:
    open_loop = found["open_loop"]
    latency, late = open_loop["latency_ms"], open_loop["sent_late_ms"]
    rest = table(
        ["policy", "k", "REST ms", "runtime in this process ms", "difference of medians ms", "around its runtime ms"],
        [
            [r["policy"], str(r["k"]), f"{r['rest_ms']:.2f}", f"{r['in_process_ms']:.2f}",
             f"{r['difference_of_medians_ms']:.2f}", f"{r['around_the_runtime_ms']:.2f}"]
            for r in found["rest_adds"]
        ],
    )  # fmt: skip
    closed = table(
        ["clients", "requests/s", "median ms"],
        [[str(r["connections"]), f"{r['per_s']:.1f}", f"{r['p50_ms']:.1f}"] for r in found["closed_loop"]],
    )
    opened = table(
        ["requests/s", "sent", "answered", "p50 ms", "p90 ms", "p99 ms", "max ms", "sent late p99 ms"],
        [[f"{open_loop['rate_per_s']:.1f}", str(open_loop["sent"]), str(open_loop["answered"]),
          *(f"{latency[name]:.1f}" for name in ("p50", "p90", "p99", "max")), f"{late['p99']:.1f}"]],
    )  # fmt: skip
    return (
        "\n## The demo root\n\nThe server is a process of its own over loopback; the client shares its cores.\n"
        f"\nWhat REST adds, one request at a time:\n\n{rest}\n"
        f"\nClosed loop, default policy, k 10:\n\n{closed}\n"
        "\nOpen loop (Poisson) at 70 % of the most requests a second above, latency from the intended time:\n"
        f"\n{opened}\n"
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
