"""The selection kernels on a GPU against their peers (RecoGEM 5.5: figures 19 and 8).

    widebeam bench selection --out bench/results/selection.json

Each figure is a captured graph of one call on each of several input sets that together exceed the L2 cache: the time of
one replay over the number of sets, the median of several replays. Scores: logits std 2 and beams std 1; "wide": std 1
and 1.5.

    whole    log-sum-exp, mask, score, exact top-K in T0 order, ancestry of the survivors
    bare     the same without mask and ancestry
    bent     as whole, by a rank that rewrites each candidate (class E), which the kernels compute:
             where(logp > -9, score, w * score). w lies in 0 .. 1, so that unlikely codes of few rows come first:
             they do not fit the tail and are searched by digits, the slow case
    prob     the same with an exponential a candidate: where(logp > -9, score, 2 * score) - w * prob
    program  the latter in two passes: torch's operators one by one, as the policy's program, and top-K of their ranks
    ranks    top-K of given float32 ranks, by chunk maxima
    radix    the same by the radix pair
    bitonic  the same by a bitonic top-K (bench/_bitonic.cu)
    topk     torch.topk of given 16-bit scores, flat over a request (order and ties unspecified)
    torch    torch.log_softmax, add, torch.topk
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.ops.selection import geometry, launch, radix
from bench import _bitonic, _plots
from bench._graph_time import graph_time
from bench._plots import Panel, Series
from bench._report import Shown, commit, save

CODES = 8192
BANDWIDTH = 4.3e12
"""Bytes a second that the floor is counted with: an H200's measured copy."""
SCORE = """\
#define RANK_NORMED 1
#define RANK_VALUES 1
#define RANK_COLUMNS 0
#define RANK_SCORE add(parent, logp)
"""
BENT = f"{SCORE}#define RANK (logp > -9.f ? score : mul(value(0), score))\n"
PROB = (
    f"{SCORE}#define RANK sub((logp > -9.f ? score : mul(2.f, score)), mul(value(0), prob_of(logp)))\n"
    "#define RANK_TELLS 1\n#define RANK_MASKED 1\n"
)
"""As `app/policies/generate.py` writes them."""
NAMES = ("whole", "bare", "bent", "prob", "program", "ranks", "radix", "bitonic", "topk", "torch")
IN_FLOAT32 = frozenset({"ranks", "radix", "bitonic"})
DRAWN = {
    "torch": ("log_softmax, add, topk by torch", _plots.RED),
    "topk": ("torch.topk of scores", _plots.ORANGE),
    "bitonic": ("bitonic top-K, of ranks", _plots.PURPLE),
    "radix": ("the radix pair, of ranks", _plots.BROWN),
    "ranks": ("ours, top-K of ranks", _plots.GREEN),
    "bare": ("ours, with log-sum-exp and score", _plots.BLUE),
    "whole": ("ours, with mask and ancestry too", _plots.BLACK),
}
"""What the plots show of the ways: a name and a colour."""
PICTURES = (
    "Latency by requests and beam width, as in RecoGEM's figure 19",
    "Latency by K, as in RecoGEM's figure 8",
)
KINDS = {"std": (2.0, 1.0), "wide": (1.0, 1.5)}


class Inputs(NamedTuple):
    """One set: logits [R * W, C], parents, a mask with half of its bits set, a parameter of each row, order, room for
    norms, ancestry."""

    logits: Tensor
    parent: Tensor
    mask: Tensor
    weight: Tensor
    order: Tensor
    norm: Tensor
    ancestry: Tensor


class Shape(NamedTuple):
    """R requests of W rows that keep K each."""

    requests: int
    width: int
    keep: int


def make_inputs(shape: Shape, kind: str, dtype: torch.dtype, seed: int) -> Inputs:
    """Parents fall inside a request, as beams do."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows, (spread, beams) = shape.requests * shape.width, KINDS[kind]
    logits = torch.empty(rows, CODES, dtype=dtype, device="cuda")
    for part in torch.split(logits, 8192):
        part.copy_(torch.randn(part.shape, generator=generator, device="cuda") * spread)
    parent = torch.randn(shape.requests, shape.width, generator=generator, device="cuda") * beams
    return Inputs(
        logits,
        parent.sort(descending=True).values.flatten(),
        torch.randint(0, 256, (rows, CODES // 8), generator=generator, device="cuda", dtype=torch.uint8),
        torch.rand(rows, 1, generator=generator, device="cuda"),
        torch.arange(shape.width, device="cuda").repeat(shape.requests),
        torch.empty(rows, device="cuda"),
        torch.randint(0, rows, (rows, 2), generator=generator, device="cuda", dtype=torch.int32),
    )


def ways(shape: Shape, *, early: bool) -> dict[str, Callable[[Inputs], object]]:
    """What is timed, by name."""
    row_start = range(0, shape.requests * shape.width + 1, shape.width)
    of = geometry.requests(row_start, [shape.keep] * shape.requests, torch.device("cuda", 0))
    rows = shape.requests * shape.width

    def select(x: Inputs, *, whole: bool, rank: str = "") -> object:
        fit = launch.layout(CODES, x.logits.element_size(), of, x.logits.device)
        assert fit is not None
        expression = launch.Ranked(rank, x.weight) if rank else None
        scores = launch.Scores(x.mask if whole else None, x.norm, x.parent, "step", expression)
        slots = torch.empty(of.total, 3, dtype=torch.int32, device="cuda") if whole else None
        ancestry = x.ancestry if whole else None
        return launch.select(x.logits, scores, x.order, of, fit, ancestry=ancestry, ancestry_out=slots, early=early)

    def ranks(x: Inputs) -> object:
        fit = launch.layout(CODES, 4, of, x.logits.device)
        assert fit is not None
        return launch.select(x.logits, launch.Scores(), x.order, of, fit, early=early)

    def program(x: Inputs) -> object:
        fit = launch.layout(CODES, 4, of, x.logits.device)
        assert fit is not None
        bits = x.mask[:, :, None] >> torch.arange(8, dtype=torch.uint8, device="cuda")
        legal = (bits & 1).view(rows, CODES).bool()
        logits = x.logits.float()
        logp = logits - torch.logsumexp(logits, 1, keepdim=True)
        score = x.parent[:, None] + logp
        rank = torch.where(logp > -9, score, 2 * score) - x.weight * torch.exp(logp)
        rank = torch.where(legal & (rank < torch.inf), rank, -torch.inf) + 0.0
        return launch.select(rank, launch.Scores(), x.order, of, fit, early=early)

    def pipeline(x: Inputs) -> object:
        score = torch.log_softmax(x.logits, 1, dtype=torch.float32).add_(x.parent[:, None])
        return torch.topk(score.view(shape.requests, -1), shape.keep)

    return {
        "whole": lambda x: select(x, whole=True),
        "bare": lambda x: select(x, whole=False),
        "bent": lambda x: select(x, whole=True, rank=BENT),
        "prob": lambda x: select(x, whole=True, rank=PROB),
        "program": program,
        "ranks": ranks,
        "radix": lambda x: radix.select(x.logits, x.order, of),
        "bitonic": lambda x: _bitonic.top(x.logits.view(shape.requests, -1), shape.keep),
        "topk": lambda x: torch.topk(x.logits.view(shape.requests, rows // shape.requests * CODES), shape.keep),
        "torch": pipeline,
    }


def measure(shape: Shape, kind: str, names: Sequence[str], *, early: bool) -> Iterator[dict[str, Any]]:
    """One line for each way."""
    every = ways(shape, early=early)
    for dtype in (torch.bfloat16, torch.float32):
        mine = [name for name in names if (name in IN_FLOAT32) == (dtype == torch.float32)]
        if not mine:
            continue
        size = shape.requests * shape.width * CODES * dtype.itemsize
        sets = [make_inputs(shape, kind, dtype, seed) for seed in range(max(2, min(8, int(3e8 // size))))]
        for name in mine:
            ms = graph_time([lambda x=x, way=every[name]: way(x) for x in sets])
            yield {
                "R": shape.requests, "W": shape.width, "K": shape.keep, "scores": kind, "way": name,
                "ms": round(ms, 4), "floor_ms": round(1e3 * size / BANDWIDTH, 4),
            }  # fmt: skip


def plan() -> Iterator[tuple[Shape, str, tuple[str, ...]]]:
    """Figure 19, then figure 8."""
    for width, requests in product((512, 1024), (4, 8, 16, 32)):
        yield Shape(requests, width, width), "std", tuple(name for name in NAMES if name != "bitonic")
        yield Shape(requests, width, width), "wide", ("whole", "bare", "bent", "prob")
    for keep in (16, 32, 64, 128, 256, 512, 1024):
        yield Shape(16, 512, keep), "std", ("bare", "ranks", "radix", "bitonic", "topk")


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown, a line a shape."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        found.setdefault((line["R"], line["W"], line["K"], line["scores"]), {})[line["way"]] = line["ms"]
    out = ["| R | W | K | scores | " + " | ".join(NAMES) + " |", "|" + "---|" * (4 + len(NAMES))]
    for shape, ms in found.items():
        out.append("| " + " | ".join(map(str, (*shape, *(ms.get(name, "") for name in NAMES)))) + " |")
    return "\n".join(out)


def shown(document: dict[str, Any], stem: str) -> Shown:
    """A result's table, and its plots for STEM.svg and STEM_k.svg."""
    pictures = plots(document, stem)
    return Shown(markdown(document, tuple(pictures)), pictures)


def markdown(document: dict[str, Any], pictures: Sequence[str] = ()) -> str:
    """What was measured, the plots beside it, the table."""
    about = (
        f"{document['device']}, torch {document['torch']}, CUDA {document['cuda']}, CuPy {document['cupy']}, commit "
        f"{document['commit']}; {document['codes']} codes, milliseconds of a call. Of what: [README](../README.md) and "
        f"`bench/selection.py`. Not run: {document['not run']}."
    )
    shown = [line for name, of in zip(pictures, PICTURES, strict=False) for line in (f"![{of}]({name})", "")]
    return "\n".join(["# Selection on a GPU", "", about, "", *shown, table(document["times"])]) + "\n"


def plots(document: dict[str, Any], stem: str) -> dict[str, str]:
    """PICTURES by the names of their files."""
    std = [one for one in document["times"] if one["scores"] == "std"]
    wide = [one for one in std if one["W"] == one["K"]]
    by_k = [one for one in std if (one["R"], one["W"]) == (16, 512)]
    shapes = sorted({(one["R"], one["W"]) for one in wide})
    keeps = sorted({one["K"] for one in by_k})
    bars = _series({(one["R"], one["W"], one["way"]): one["ms"] for one in wide}, shapes, without=("bitonic",))
    lines = _series(
        {(one["K"], one["way"]): one["ms"] for one in by_k}, [(x,) for x in keeps], without=("whole", "torch")
    )
    notes = [
        f"{document['device']}, {document['codes']} codes, commit {document['commit'][:7]}; graph-captured medians, "
        "logits std 2, beams std 1; ranks in float32, scores in 16 bit. "
        f"Not run: {document['not run']}.",
    ]
    each = Panel("", "requests / beam width (K = beam width)", "ms", tuple(f"{r} / {w}" for r, w in shapes), bars,
                 kind="bars", log=True)  # fmt: skip
    some = Panel("R = 16, W = 512", "K", "ms", tuple(map(str, keeps)), lines, log=True)
    titles = ("Selection by requests and beam width", "figure 19"), ("Selection by K", "figure 8")
    made = [
        _plots.figure(f"{title} (as RecoGEM's {figure})", [panel], columns=1, height=340, notes=notes)
        for (title, figure), panel in zip(titles, (each, some), strict=True)
    ]
    return dict(zip((f"{stem}.svg", f"{stem}_k.svg"), made, strict=True))


def _series(
    ms: dict[tuple[Any, ...], float], places: Sequence[tuple[Any, ...]], without: Sequence[str]
) -> tuple[Series, ...]:
    """Of each way, the values at some places; ms: by place and way."""
    return tuple(
        Series(label, tuple(ms.get((*place, way)) for place in places), colour)
        for way, (label, colour) in DRAWN.items() if way not in without
    )  # fmt: skip


def main() -> None:
    """Time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON; the table goes beside it as .md")
    parser.add_argument("--commit", help="of the code, where it is no clone")
    parser.add_argument("--late", action="store_true", help="no kernel begins before the one before it ends")
    args = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for shape, kind, names in plan():
        lines += measure(shape, kind, names, early=not args.late)
    print(table(lines), flush=True)
    if args.out:
        about = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "cupy": version("cupy-cuda13x"), "commit": args.commit or commit(), "codes": CODES,
            "not run": "FlashInfer: not installed where this was measured",
        }  # fmt: skip
        document = {**about, "times": lines}
        save(args.out, document, shown(document, args.out.stem))


if __name__ == "__main__":
    main()
