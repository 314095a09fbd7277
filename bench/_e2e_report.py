"""What `bench e2e` found, as tables and as plots like RecoGEM's figures 15 and 16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench import _plots
from bench._kernels import KINDS
from bench._plots import Panel, Series
from bench._report import Shown
from bench._synthetic import FORMULA

ORDER = ("step", "homogeneous", "general", "eager")
COLOURS = {
    "step bfloat16": _plots.BLUE, "step fp8": _plots.GREEN, "homogeneous bfloat16": _plots.ORANGE,
    "general bfloat16": _plots.RED, "eager bfloat16": _plots.PURPLE,
}  # fmt: skip
Row = dict[str, Any]
FIGURES = {"0.2b": "16", "4b-moe": "15"}
"""RecoGEM's, of a shape."""


def key(run: Row) -> tuple[int, str, int]:
    """What a run is one of."""
    return ORDER.index(run["mode"]), run["precision"], run["batch"]


def merged(known: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Runs by mode, precision and batch, the newer ones."""
    by_key = {key(one): one for one in (*known, *new)}
    return [by_key[one] for one in sorted(by_key)]


def replaced(known: Sequence[Row], runs: Sequence[Row]) -> list[Row]:
    """Of runs of `step` that others have taken the place of: the means that other modes' `runs` of the same commit are
    compared with. known: earlier runs, and such means."""
    wanted = {_same(one) for one in runs if one["mode"] != "step"} - {_same(x) for x in runs if x["mode"] == "step"}
    by_key = {_same(one): one for one in known if one["mode"] == "step" and _same(one) in wanted}
    names = ("mode", "precision", "batch", "commit", "mean_ms", "batches")
    return [{name: one[name] for name in names if name in one} for one in by_key.values()]


def _same(run: Row) -> tuple[str, int, str | None]:
    """What two modes must have in common to be compared."""
    return run["precision"], run["batch"], run.get("commit")


def shown(document: Row, stem: str) -> Shown:
    """A result's tables, and its plot for STEM.svg."""
    picture = f"{stem}.svg"
    return Shown(markdown(document, picture), {picture: plot(document)})


def markdown(document: Row, picture: str = "") -> str:
    """The tables of a result. picture: the plot beside it."""
    figure = f"RecoGEM's figure {FIGURES[document['shape']]}"
    lines = [
        "# Whole batches on a GPU", "",
        f"{document['device']}, torch {document['torch']}, CUDA {document['cuda']}, commit {document['commit']}; "
        f"{document['shape']}, {document['parameters'] / 1e6:.0f} M parameters. Of what: [README](../README.md).", "",
        *(f"Of commit {of}, by batch size: {runs}.\n" for of, runs in older(document).items()),
        *([f"![QPS and p99 by batch size, as in {figure}]({picture})", ""] if picture else []),
        f"Model FLOP: {FORMULA}. MFU over 768 TFLOP/s (989 in brackets), whatever the precision.", "",
        "`p99` is of so many `batches`; of up to 100 it is the slowest.", "",
        "| mode | precision | batch | mean ms | p99 ms | batches | latency, mean | p99 | QPS | MFU "
        "| MFU of the decode steps | GPU busy ms | seconds |",
        "| --- | --- " + "| ---: " * 11 + "|",
    ]  # fmt: skip
    rows = document["runs"]
    for one in rows:
        mfu, decode = ("{measured:.1%} ({datasheet:.1%})".format(**one[name]) for name in ("mfu", "mfu_decode"))
        latency = one["latency_ms"]
        lines.append(
            f"| {_cells(one)} | {one['mean_ms']:.2f} | {one['p99_ms']:.2f} | {one['batches']} "
            f"| {latency['mean']:.2f} | {latency['p99']:.2f} | {one['qps']:.0f} | {mfu} | {decode} "
            f"| {_shown(one['phases'].get('busy_ms'), 2)} | {one['seconds']:.1f} |"
        )
    return "\n".join([*lines, *_times(rows), *ratios(rows, document.get("replaced", ()))]) + "\n"


def _times(rows: Sequence[Row]) -> list[str]:
    """Where the time goes."""
    labels = sorted({label for one in rows for label in one["steps_ms"]}, key=lambda x: (x != "context", x))
    kinds = [*KINDS, "rest"]
    head = " | ".join([*(f"step {x}" if x != "context" else x for x in labels), *kinds])
    lines = [
        "", "## Where the time goes", "",
        "Milliseconds a batch: between the marks of the step loop in the GPU's queue, and of kernels by kind "
        "(torch.profiler).", "",
        f"| mode | precision | batch | {head} |", "| --- | --- " + "| ---: " * (1 + len(labels) + len(kinds)) + "|",
    ]  # fmt: skip
    for one in rows:
        cells = [one["steps_ms"].get(x) for x in labels] + [one["phases"].get("kinds_ms", {}).get(x) for x in kinds]
        lines.append(f"| {_cells(one)} | {' | '.join(_shown(x, 3) for x in cells)} |")
    return lines


def _cells(run: Row) -> str:
    return f"{run['mode']} | {run['precision']} | {run['batch']}"


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def older(document: Row) -> dict[str, str]:
    """Which runs are of other commits than the document, by commit."""
    found: dict[str, dict[str, list[str]]] = {}
    for one in document["runs"]:
        if (of := _commit(one, document)) != document["commit"]:
            found.setdefault(of, {}).setdefault(f"{one['mode']} {one['precision']}", []).append(str(one["batch"]))
    return {of: "; ".join(f"{name} {', '.join(some)}" for name, some in runs.items()) for of, runs in found.items()}


def ratios(rows: Sequence[Row], before: Sequence[Row] = ()) -> list[str]:
    """How many times the other modes' batches take as long as those of `step` at the same commit. before: `replaced`
    ones."""
    step = {_same(one): one["mean_ms"] for one in (*before, *rows) if one["mode"] == "step"}
    others = [one for one in rows if one["mode"] != "step" and _same(one) in step]
    if not others:
        return []
    lines = [f"| {_cells(one)} | {one.get('commit', '')} | {one['mean_ms']:.2f} | {step[_same(one)]:.2f} "
             f"| {one['mean_ms'] / step[_same(one)]:.2f} |" for one in others]  # fmt: skip
    return ["", "## Against `step`", "",
            "Mean time of a batch over that of `step` at the same commit, which the tables above do not show where a "
            "newer one has taken its place.", "",
            "| mode | precision | batch | commit | mean ms | `step` ms | times |", "| --- | --- | ---: | --- "
            "| ---: | ---: | ---: |", *lines]  # fmt: skip


def plot(document: Row) -> str:
    """p99 and QPS by batch size, a line a mode and precision; hollow: of another commit."""
    runs = document["runs"]
    batches = sorted({one["batch"] for one in runs})
    places = tuple(map(str, batches))
    panels = [
        Panel(f"({letter}) {title}", "batch size, requests", y, places, tuple(_series(runs, batches, value, document)),
              log=True)
        for letter, title, y, value in (("a", "Latency", "p99 of a batch, ms", "p99_ms"),
                                        ("b", "Throughput", "requests a second", "qps"))
    ]  # fmt: skip
    notes = [
        f"{document['device']}, {document['shape']}, {document['parameters'] / 1e6:.0f} M parameters; "
        f"commit {document['commit'][:7]}.",
        *(f"Hollow, by batch size: of commit {of[:7]}: {names}." for of, names in older(document).items()),
        f"p99 is of {min(one['batches'] for one in runs)} to {max(one['batches'] for one in runs)} batches "
        f"({min(one['seconds'] for one in runs):.1f} to {max(one['seconds'] for one in runs):.1f} s back to back): "
        "of up to 100 it is the slowest.",
    ]
    title = f"Whole batches: p99 and QPS by batch size (as RecoGEM's figure {FIGURES[document['shape']]})"
    return _plots.figure(title, panels, columns=2, height=330, notes=notes)


def _series(runs: Sequence[Row], batches: Sequence[int], value: str, document: Row) -> Iterator[Series]:
    for mode, precision in dict.fromkeys((one["mode"], one["precision"]) for one in runs):
        own = {one["batch"]: one for one in runs if (one["mode"], one["precision"]) == (mode, precision)}
        at = [own.get(batch) for batch in batches]
        hollow = frozenset(n for n, one in enumerate(at) if one and _commit(one, document) != document["commit"])
        name, values = f"{mode} {precision}", tuple(None if one is None else float(one[value]) for one in at)
        yield Series(name, values, COLOURS.get(name, _plots.GREY), older=hollow)


def _commit(run: Row, document: Row) -> str:
    return str(run.get("commit", document["commit"]))
