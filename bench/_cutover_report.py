"""From the samples of `bench cutover` to a table and a plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from app.errors import counted
from bench._cutover_answers import mixed
from bench._cutover_plot import plot
from bench._cutover_samples import Samples
from bench._report import table

Floats = npt.NDArray[np.float64]
Row = dict[str, Any]
QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
RESAMPLES = 1000
AIM = 1.1
"""The p99 of requests during updates is to be at most so many times the steady one, or no further from it than one
steady stretch is from another."""
ALIKE = 1.25
"""Steady stretches that may be further apart than that say nothing."""


def quantile(blocks: Sequence[Floats], q: float) -> float:
    """The smallest value with at least that share at or below it."""
    values = np.sort(np.concatenate(blocks))
    return float(values[max(0, int(np.ceil(q * len(values))) - 1)])


class Ordered:
    """Values in blocks, sorted once, so that a draw of blocks is a count of each."""

    def __init__(self, blocks: Sequence[Floats]) -> None:
        values = np.concatenate(blocks)
        order = np.argsort(values, kind="stable")
        self._values = values[order]
        self._block = np.repeat(np.arange(len(blocks)), [len(one) for one in blocks])[order]
        self._blocks = len(blocks)

    def drawn(self, random: np.random.Generator) -> Floats:
        """The QUANTILES of as many blocks as there are, drawn with replacement."""
        counts = np.bincount(random.integers(0, self._blocks, self._blocks), minlength=self._blocks)
        upto = np.cumsum(counts[self._block])
        wanted = np.maximum(1, np.ceil(np.array(list(QUANTILES.values())) * upto[-1]))
        return self._values[np.searchsorted(upto, wanted)]


def ratios(above: Sequence[Floats], below: Sequence[Floats], resamples: int = RESAMPLES) -> Row:
    """above / below at each of QUANTILES, with the 2.5 % and 97.5 % points of a bootstrap over blocks; {}
    where one of them has none."""
    if not above or not below:
        return {}
    random, upper, lower = np.random.default_rng(0), Ordered(above), Ordered(below)
    found = np.array([upper.drawn(random) / lower.drawn(random) for _ in range(resamples)])
    return {
        name: (quantile(above, q) / quantile(below, q), *map(float, np.quantile(found[:, n], (0.025, 0.975))))
        for n, (name, q) in enumerate(QUANTILES.items())
    }


def summary(parts: Sequence[Row]) -> Row:
    """The figures of one mode."""
    found = [Samples.of(part) for part in parts]
    steady = [[b for s in found for b in s.blocks(s.stretch == n)] for n in (1, 3)]
    during = [b for s in found for b in s.blocks(s.overlaps(s.windows) & (s.stretch == 2))]
    between = [b for s in found for b in s.blocks(~s.overlaps(s.windows) & (s.stretch == 2))]
    first = [b for s in found for b in s.blocks(s.overlaps(s.first) & (s.stretch == 0))]
    both = steady[0] + steady[1]
    updates = [one for part in parts for one in part["updates"]]
    kinds = {kind: [u for u in updates if u["kind"] == kind] for kind in dict.fromkeys(u["kind"] for u in updates)}
    holds = [one["hold_ms"] for one in updates if one["hold_ms"] is not None]
    batches = np.concatenate([s.batch for s in found])
    clients = [client for part in parts for client in part["clients"]]
    return {
        "updates": len(updates),
        "asked": sum(part["asked"] for part in parts),
        "parts": len(parts),
        "seconds": {name: round(sum(float(s.marks[n + 1] - s.marks[n]) for s in found for n in which), 1)
                    for name, which in (("steady", (0, 2)), ("updates", (1,)))},
        "trouble": [one for part in parts for one in part["trouble"]],
        "requests": {"sent": sum(c["sent"] for c in clients), "steady": sum(map(len, both)),
                     "overlapping": sum(map(len, during))},
        "failed": sum(c["sent"] - c["answered"] for c in clients),
        "mixed": mixed(parts),
        "rate_per_s": [round(part["rate_per_s"], 1) for part in parts],
        "saturation_per_s": [round(part["saturation_per_s"], 1) for part in parts],
        "late_p99_ms": quantile([np.array(c["columns"]["late_ms"]) for c in clients if c["columns"]], 0.99),
        "steady_ms": {name: quantile(both, q) for name, q in QUANTILES.items()},
        "during_ms": {name: quantile(during, q) for name, q in QUANTILES.items()} if during else {},
        "between_ms": {name: quantile(between, q) for name, q in QUANTILES.items()} if between else {},
        "ratio": ratios(during, both),
        "to_between": ratios(during, between),
        "aa": ratios(steady[1], steady[0]),
        "p99_by_part": [_of_part(one, 0.99) for one in found],
        "first_ms": {name: quantile(first, q) for name, q in QUANTILES.items()} if first else {},
        "hold_ms": {name: float(np.quantile(holds, q)) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1))}
        if holds else {},
        "batch_ms": {name: float(np.quantile(batches, q)) for name, q in (("p50", 0.5), ("p99", 0.99))},
        "prepare_ms": {kind: round(float(np.median([u["prepare_ms"] for u in some if u["prepare_ms"]] or [0])))
                       for kind, some in kinds.items()},
        "serves_s": {kind: round(float(np.median([u["active"] - u["published"] for u in some])), 2)
                     for kind, some in kinds.items()},
        "apart_s": round(float(np.median(np.diff([u["published"] for u in updates]))), 2) if len(updates) > 1 else 0.0,
    }  # fmt: skip


def _of_part(samples: Samples, q: float) -> float:
    """During / steady of one part alone; 0 where it has no updates."""
    during = samples.latency[samples.overlaps(samples.windows) & (samples.stretch == 2)]
    steady = samples.latency[(samples.stretch == 1) | (samples.stretch == 3)]
    return quantile([during], q) / quantile([steady], q) if len(during) else 0.0


def verdict(found: Row) -> str:
    """Whether the updates of one mode show in the p99, in words."""
    if not found["ratio"] or not found["aa"]:
        return "not known: a stretch is missing"
    ratio, (_, low, high) = found["ratio"]["p99"], found["aa"]["p99"]
    apart = max(high, 1 / low)  # which of the two comes first says nothing
    if apart > ALIKE:
        return f"not known: steady stretches may be {apart:.2f} apart (A/A)"
    words = "{:.2f} ({:.2f}..{:.2f})".format(*ratio)
    met = "met" if ratio[0] <= max(AIM, apart) else "missed"
    return f"{met}: {words}; the aim is {AIM}, or {apart:.2f}, the farthest that steady stretches may be apart (A/A)"


def write_report(parts: Sequence[Row], out: Path) -> str:
    """Write OUT.json, OUT.svg and OUT.md; the text of the last. Raises SystemExit where the parts are not of one
    setting and one commit."""
    if any(part["setting"] != parts[0]["setting"] for part in parts):
        raise SystemExit("parts of different settings are not pooled")
    commits = sorted({part["machine"]["commit"] or "unknown" for part in parts})
    if len(commits) > 1:
        raise SystemExit(f"parts of different commits are not pooled: {', '.join(commits)}")
    modes = {mode: [part for part in parts if part["mode"] == mode] for mode in ("live", "naive")}
    found = {mode: summary(some) for mode, some in modes.items() if some}
    out.with_suffix(".json").write_text(json.dumps(
        {"summary": found, "setting": parts[0]["setting"], "machine": parts[0]["machine"],
         "kernels": parts[0]["kernels"], "graphs": [part["graphs"] for part in parts],
         "notes": sorted({part["note"] for part in parts if part["note"]})}, indent=1) + "\n")  # fmt: skip
    out.with_suffix(".svg").write_text(plot({mode: some[0] for mode, some in modes.items() if some}))
    text = markdown(parts, found, out.name)
    out.with_suffix(".md").write_text(text)
    return text


def markdown(parts: Sequence[Row], found: Row, name: str) -> str:
    """The report."""
    s, m = parts[0]["setting"], parts[0]["machine"]
    versions = ", ".join(f"{key} {value}" for key, value in m["versions"].items() if value != "none")
    notes = sorted({part["note"] for part in parts if part["note"]})
    lines = [
        "# Cutovers under load\n",
        f"Made by `widebeam bench cutover`. qwen3, {s['layers']} layers, d {s['hidden']}, {s['gigabytes']} GB of\n"
        f"float32 weights on the disk, {s['items']:,} items, W {s['width']}, device {s['device']}"
        f"{_http(s.get('front_ends', 0))}.\n"
        f"{_device(m)}kernels: {parts[0]['kernels']}; CUDA graphs {_graphs(parts)}.\n"
        f"{m['cpu']}, {m['cores']} cores a part, load before {m['load_before']}; {versions}.\n"
        f"{_pooled(found)}, all of commit {m['commit'] or 'unknown'}.\n",
        *(f"**{note}**\n" for note in notes),
        *(f"**Cut short: {one}**\n" for mode in found.values() for one in mode["trouble"]),
        *(f"**{mode}: p99 during updates / steady: {verdict(one)}**\n" for mode, one in found.items()),
        _figures(found),
        "\nRatios at a quantile, with 95 % of a bootstrap over blocks of three seconds. During: requests that overlap\n"
        "an update, from its publication to a quarter of a second after the version before gave its memory back.\n"
        "Between: requests of the same minutes that overlap none; who waits long is likelier to meet an update, so\n"
        "that ratio says rather too much. A/A: the second steady stretch against the first. The first updates of a\n"
        "server fill its weight slots and, on a GPU, capture their graphs; the last of them comes under load, and is\n"
        "in no other row.\n",
        f"![p99 over time]({name}.svg)\n",
    ]
    return "\n".join(lines)


def _pooled(found: Row) -> str:
    return "; ".join(
        f"{mode}: {one['updates']} cutovers in {one['seconds']['updates']:.0f} s and {one['seconds']['steady']:.0f} s "
        f"steady, in {one['parts']} part{'s' if one['parts'] > 1 else ''}"
        for mode, one in found.items()
    )


def _http(front_ends: int) -> str:
    return (
        f";\nHTTP in {counted(front_ends, 'process')} of {'its' if front_ends == 1 else 'their'} own"
        if front_ends
        else ""
    )


def _device(found: Row) -> str:
    return f"{found['gpu']}, " if found.get("gpu") else ""


def _graphs(parts: Sequence[Row]) -> str:
    taken = [line["graphs"] for part in parts for line in part["graphs"]]
    return f"{max(taken)} a slot" if taken else "none"


def _pair(values: Sequence[float]) -> str:
    return ", ".join(f"{one:.3g}" for one in values)


def _figures(found: Row) -> str:
    def three(values: Sequence[float]) -> str:
        return "{:.2f} ({:.2f}..{:.2f})".format(*values)

    def row(title: str, cell: Callable[[Row], str]) -> list[str]:
        return [title, *(cell(one) for one in found.values())]

    rows = [
        row("parts, updates", lambda f: f"{f['parts']}, {f['updates']} of {f['asked']}"),
        row("seconds between updates, median", lambda f: str(f["apart_s"])),
        row("preparing, median ms", lambda f: ", ".join(f"{k} {v}" for k, v in f["prepare_ms"].items())),
        row("from publication until it serves, median s",
            lambda f: ", ".join(f"{k} {v:.2f}" for k, v in f["serves_s"].items())),
        row("saturation, requests/s", lambda f: ", ".join(map(str, f["saturation_per_s"]))),
        row("offered, requests/s", lambda f: ", ".join(map(str, f["rate_per_s"]))),
        row("requests steady, during updates", lambda f: f"{f['requests']['steady']}, {f['requests']['overlapping']}"),
        row("failed, refused, or without an answer in the end", lambda f: str(f["failed"])),
        row("answers with items of another vocab, or too few", lambda f: str(f["mixed"]["wrong_items"])),
        row("answers nearer to other weights than to those that they name",
            lambda f: f"{f['mixed']['nearer']} of {f['mixed']['judged']}"),
        row("by how much nearer to those named: least, 1 in 1000", lambda f: _pair(f["mixed"]["margin"])),
        row("scores: largest spread in a content, least distance of contents",
            lambda f: _pair([v for v in (f["mixed"]["spread"], f["mixed"]["apart"]) if v is not None])),
        row("requests whose scores do not follow the contents' scale",
            lambda f: f"{f['mixed']['out_of_order']} of {f['mixed']['ordered']}"),
        row("snapshots named, with two meanings; sets of rules",
            lambda f: f"{f['mixed']['snapshots']}, {f['mixed']['ambiguous']}; {f['mixed']['policies']}"),
        *(row(f"steady {q} ms", lambda f, q=q: f"{f['steady_ms'][q]:.2f}") for q in QUANTILES),
        *(row(f"during {q} ms", lambda f, q=q: f"{f['during_ms'].get(q, 0):.2f}") for q in QUANTILES),
        *(row(f"during / steady, {q}", lambda f, q=q: three(f["ratio"][q]) if f["ratio"] else "") for q in QUANTILES),
        *(row(f"between updates {q} ms", lambda f, q=q: f"{f['between_ms'].get(q, 0):.2f}") for q in QUANTILES),
        *(row(f"during / between, {q}", lambda f, q=q: three(f["to_between"][q]) if f["to_between"] else "")
          for q in QUANTILES),
        *(row(f"A/A, {q}", lambda f, q=q: three(f["aa"][q]) if f["aa"] else "") for q in QUANTILES),
        row("during / steady p99 of each part", lambda f: ", ".join(f"{v:.2f}" for v in f["p99_by_part"])),
        row("first updates p50, p99, p99.9 ms", lambda f: ", ".join(f"{v:.2f}" for v in f["first_ms"].values())),
        row("hold p50, p99, max ms", lambda f: ", ".join(f"{v:.2f}" for v in f["hold_ms"].values())),
        row("batch p50, p99 ms", lambda f: ", ".join(f"{v:.2f}" for v in f["batch_ms"].values())),
        row("clients sent late, p99 ms", lambda f: f"{f['late_p99_ms']:.2f}"),
    ]  # fmt: skip
    return table(["", *found], rows)
