"""Where the time of a batch goes on a GPU, by step and by kind: attention, selection, rest (RecoGEM's figure 17).

    widebeam bench steps [--mode step homogeneous general eager] [--precision bfloat16 fp8] [--batch 32]
                         [--shape 0.2b | 4b-moe] [--batches 3] [--out bench/results/steps.json]
    widebeam bench steps --toy [--out FILE]

The modes, weights, contexts and catalogue of `bench e2e`, batches one after the other: milliseconds of kernels and
copies a batch, by torch.profiler. A part of a batch begins with an empty kernel of ours in the GPU's queue: what begins
after it, and before the next one, is of that part.

context    up to what contexts leave behind
hand-over  copies of that, and of step 1's output, to where the decode reads them, if they were made elsewhere
step t     its decode: attention by the names of kernels, to the prefix and to the context; products, norms, gates,
           copies, rest. `general` gathers prefixes for torch's attention: that is rest. Then its selection: everything
           from the logits to the next step's rows
answers    what goes to the host

Each mode, precision and batch size can be run alone; results are merged into the file. --toy: a model of 3,000 items in
float32, on a CPU where there is no GPU: torch's operators instead of kernels, and no figure for anybody.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from app.config import Precision
from app.ops import cuda
from app.runtime.job import Batch
from app.runtime.laps import Laps
from app.runtime.selection import Selection
from app.runtime.snapshot import Snapshot
from app.runtime.steps import StepLoop
from bench import _plots
from bench._e2e_report import ORDER, merged, older
from bench._kernels import KINDS, Event, events, host_events, kind_of
from bench._modes import OnePlan
from bench._plots import Panel, Series
from bench._report import Shown, commit, save
from bench._synthetic import SHAPES, Shape, jobs_of, snapshot_of
from bench.e2e import POLICY, SETS, prepared

MARK = "part_begins"
TOY = Shape(codes=32, width=16, context=12, d=32, layers=2, heads=2, ffn=64, items=3000)
COLUMNS = ("attention", "selection", *(kind for kind in KINDS if kind not in {"attention", "selection"}), "rest")
FIGURE = {"attention": _plots.RED, "selection": _plots.BLUE, "rest": _plots.GREY}
"""The kinds of figure 17."""
Row = dict[str, Any]


class Part(NamedTuple):
    """Of a batch: "context", "hand-over", "1" .. "L", "answers"; whether it is a step's selection."""

    name: str
    selecting: bool = False


def split(found: Iterable[Event], parts: Sequence[Part], batches: int) -> dict[str, dict[str, float]]:
    """Milliseconds a batch by part and kind (COLUMNS). found: with a MARK for each of `parts`; an event is of the part
    that it begins in, however long it takes. What begins before the first mark is "other". Raises ValueError where
    there are more or fewer marks than parts."""
    ordered = sorted(found)
    marks = sum(one.name == MARK for one in ordered)
    if marks != len(parts):
        raise ValueError(f"{len(parts)} marks were put, and the profiler saw {marks}")
    ms: dict[str, dict[str, float]] = {}
    following, part = iter(parts), Part("other")
    for one in ordered:
        if one.name == MARK:
            part = next(following)
            continue
        kind = "selection" if part.selecting else kind_of(one.name)
        kind = "rest" if kind == "selection" and not part.selecting else kind
        own = ms.setdefault(part.name, dict.fromkeys(COLUMNS, 0.0))
        own[kind] += one.micros / 1e3 / batches
    return {name: ms[name] for name in sorted(ms, key=_place)}


def _place(part: str) -> tuple[int, str]:
    order = {"context": 0, "hand-over": 1, "answers": 3, "other": 4}
    return order.get(part, 2), part


class Marks:
    """Puts marks in the device's queue where parts of batches begin; `parts`: of which, in order."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self.parts: list[Part] = []
        self._steps, self._lap = steps, 0
        self._put = _on_the_host
        if device.type == "cuda":
            kernel = cuda.load(Path(__file__).with_name("_part.cu"), MARK, device)
            self._put = lambda: kernel.launch(1, 1)

    def begins(self, name: object, *, selecting: bool = False) -> None:
        """A part begins here."""
        self.parts.append(Part(str(name), selecting))
        self._put()

    @contextmanager
    def put(self) -> Iterator[None]:
        """Meanwhile step loops of every mode put them. They tell where they are: to their `Laps`, whose marks end the
        context, what is handed over, and each step; by decoding, for step 1 of those that do it beside the context; and
        by selecting."""
        with ExitStack() as entered:
            for owner, name, before in (
                (Laps, "mark", lambda _: self._lap_ends()),
                (StepLoop, "_decode", lambda _, _graphs, _engine, t, *_rest: self.begins(t)),
                (Selection, "select", lambda _, t, *_rest: self.begins(t, selecting=True)),
                (OnePlan, "_flat", lambda _, t, *_rest: self.begins(t, selecting=True)),
            ):
                entered.enter_context(told(owner, name, before))
            yield

    def _lap_ends(self) -> None:
        names = ["context", "hand-over", *range(1, self._steps + 1), "answers"]
        self.begins(names[self._lap])
        self._lap = (self._lap + 1) % len(names)


def _on_the_host() -> None:
    with torch.profiler.record_function(MARK):
        pass


@contextmanager
def told(owner: type, name: str, before: Callable[..., None]) -> Iterator[None]:
    """Meanwhile a method tells somebody its arguments before it does what it does."""
    method = getattr(owner, name)

    def telling(*args: Any, **named: Any) -> Any:
        before(*args, **named)
        return method(*args, **named)

    setattr(owner, name, telling)
    try:
        yield
    finally:
        setattr(owner, name, method)


def measure(mode: str, snapshot: Snapshot, batch: int, batches: int, k: int) -> Row:
    """One mode and batch size."""
    loop, device = prepared(mode, snapshot, batch).loop, snapshot.engine.device
    sets = [Batch(jobs_of(snapshot, batch, seed, k)) for seed in range(SETS)]
    for one in sets:
        loop.serve(one)
    marks, turn = Marks(device, len(snapshot.contract.sizes)), cycle(sets)
    seen = events if device.type == "cuda" else host_events
    with marks.put():
        found = seen(lambda: loop.serve(next(turn)), batches)
    ms = split(found, marks.parts, batches)
    total = sum(sum(kinds.values()) for kinds in ms.values())
    return {
        "mode": mode, "precision": snapshot.contract.precision, "batch": batch, "batches": batches,
        "busy_ms": total, "parts_ms": ms, "commit": commit(),
    }  # fmt: skip


def shown(document: Row, stem: str) -> Shown:
    """A result's tables, and its plot for STEM.svg."""
    picture = f"{stem}.svg"
    return Shown(markdown(document, picture), {picture: plot(document)})


def markdown(document: Row, picture: str = "") -> str:
    """The table of a result. picture: the plot beside it."""
    lines = [
        "# Steps of a batch", "", f"{_about(document)} Of what: [README](../README.md).", "",
        *(f"Of commit {of}, by batch size: {runs}.\n" for of, runs in older(document).items()),
        *([f"![Milliseconds by step and kind, as in RecoGEM's figure 17]({picture})", ""] if picture else []),
        "Milliseconds of kernels and copies a batch.", "",
        f"| mode | precision | batch | part | {' | '.join(COLUMNS)} | all |",
        "| --- | --- | ---: | --- " + "| ---: " * (1 + len(COLUMNS)) + "|",
    ]  # fmt: skip
    for run in document["runs"]:
        every = {kind: sum(one[kind] for one in run["parts_ms"].values()) for kind in COLUMNS}
        for part, kinds in (*run["parts_ms"].items(), ("**all**", every)):
            cells = [f"{kinds[kind]:.3f}" for kind in COLUMNS] + [f"{sum(kinds.values()):.3f}"]
            name = f"step {part}" if part.isdigit() else part
            lines.append(f"| {run['mode']} | {run['precision']} | {run['batch']} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _about(document: Row) -> str:
    toy = " **A toy: these figures say nothing about speed.**" if document["shape"] == "toy" else ""
    return f"{document['device']}, torch {document['torch']}, commit {document['commit']}; {document['shape']}.{toy}"


def plot(document: Row) -> str:
    """Attention, selection and rest of each step, a panel a run; those of one precision and batch size have one
    scale."""
    panels = list[Panel]()
    groups = dict.fromkeys((run["precision"], run["batch"]) for run in document["runs"])
    for group in groups:
        own = [_panel(run) for run in document["runs"] if (run["precision"], run["batch"]) == group]
        panels += _plots.alike(own)
    notes = [
        _about(document).replace("**", ""),
        *(f"Of commit {of[:7]}, by batch size: {names}." for of, names in older(document).items()),
        "Kernels and copies, by torch.profiler. Selection: from a step's logits to the next step's rows; attention: by "
        "the names of kernels. Context: with what is handed over; end: what goes to the host, and before the context.",
    ]
    title = "Where the time of a batch goes, by step and kind (as RecoGEM's figure 17)"
    return _plots.figure(title, panels, columns=2, height=260, notes=notes)


def _panel(run: Row) -> Panel:
    steps = [part for part in run["parts_ms"] if part.isdigit()]
    places = {"context": ("context", "hand-over"), **{part: (part,) for part in steps}, "end": ("answers", "other")}
    sums = {kind: [sum(_as_in_the_figure(run["parts_ms"].get(part, {}))[kind] for part in parts)
                   for parts in places.values()] for kind in FIGURE}  # fmt: skip
    series = tuple(Series(kind, tuple(sums[kind]), colour) for kind, colour in FIGURE.items())
    title = f"{run['mode']}, {run['precision']}, batch {run['batch']}: {run['busy_ms']:.3g} ms"
    return Panel(title, "step", "ms a batch", tuple(places), series, kind="stacked")


def _as_in_the_figure(kinds: Row) -> dict[str, float]:
    """Attention, selection, and everything else."""
    known = {kind: kinds.get(kind, 0.0) for kind in ("attention", "selection")}
    return {**known, "rest": sum(kinds.values()) - sum(known.values())}


def write(out: Path, shape: str, run: Row) -> None:
    """A run into the file, with its table and its plot beside it, and with what other runs of the shape put there."""
    before = json.loads(out.read_text("utf-8")) if out.exists() else {}
    known = before["runs"] if before.get("shape") == shape else []
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    document = {
        "shape": shape, "device": device, "torch": torch.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(), "commit": commit(), "runs": merged(known, [run]),
    }  # fmt: skip
    save(out, document, shown(document, out.stem))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.2b", help="a file of results is of one")
    parser.add_argument("--mode", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--precision", nargs="+", choices=["bfloat16", "float16", "fp8"], default=["bfloat16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[32])
    parser.add_argument("--batches", type=int, default=3, help="of which the mean is shown")
    parser.add_argument("--k", type=int, default=50, help="items of an answer")
    parser.add_argument("--toy", action="store_true", help="a tiny model: whether it runs, not how fast")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    on_a_gpu = torch.cuda.is_available()
    if not (on_a_gpu or args.toy):
        parser.error("it needs a GPU; --toy does not")
    device = torch.device("cuda", torch.cuda.current_device()) if on_a_gpu else torch.device("cpu")
    name, shape = ("toy", TOY) if args.toy else (args.shape, SHAPES[args.shape])
    if args.toy:
        print(f"a toy on {'a GPU' if on_a_gpu else 'a CPU'}: its figures say nothing about speed", flush=True)
    precisions: list[Precision] = ["float32"] if args.toy else args.precision
    for precision in precisions:
        snapshot = snapshot_of(shape, max(args.batch), device, POLICY, precision)
        for mode in args.mode:
            for batch in args.batch:
                run = measure(mode, snapshot, batch, args.batches, min(args.k, shape.width))
                print(json.dumps(run), flush=True)
                if args.out:
                    write(args.out, name, run)


if __name__ == "__main__":
    main()
