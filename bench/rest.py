"""One REST server on a GPU: the most requests a second, an open loop at 70 % of them, what REST adds, what it costs the
engine.

    python -m bench.rest [--precision bfloat16 fp8] [--front-ends 0 1 2] [--seconds 30] [--k 50]
                         [--out bench/results/rest.json]

A deployment root with weights in OneRec-V2's 0.2B shape (`_synthetic`), random, and a random catalogue of a million
items; `widebeam serve` over it as a process of its own; clients over loopback with histories of 511 items.

closed   connections that ask again as soon as they have their answer: full batches, the most requests a second
open     Poisson arrivals at 70 % of that; latency counts from the intended time of sending
few      the same at 20 a second: one request at a time, mostly
rest     an answer's time at its client less the server's own, from the request's last byte to the answer made
         (`timings_ms.total`): the client, both sockets, and the answer's way back through messages, JSON and HTTP.
         What reading the request takes is in `total`: everything that REST adds is told beside `alone, few`
busy     the closed loop once more, with requests beside it that are refused after their bodies were read, as many as
         make 1,000 a second
alone    the engine's process without HTTP, with as many requests under way as in the closed loop (`_rest_alone`): what
         the step loop's own time of a batch is compared with; then as many a second as in `few`, from a request's
         admission to its answer (`alone, few`): the latency of `few` less this is everything that REST adds
nothing  as many again with the same bytes to and from a process that does nothing (`_nothing`): of what REST adds, the
         part that is the clients', their sockets' and two wake-ups'

--front-ends: `server.front_ends`, one server after the other on one root; 0 = HTTP and engine in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from app.cli.load import Load, Pacer, Shot, Target, arrivals
from app.cli.loop import run
from app.config import Limits, SidConfig
from app.engine.families.base import ModelFiles
from app.engine.families.onerec import OneRec
from app.errors import counted
from app.vocab.artifact import save_vocab
from app.vocab.publish import commit, draft
from bench import _served
from bench._nothing import nothing, response
from bench._report import commit as commit_of
from bench._report import table
from bench._synthetic import Shape, catalogue, deviation

Row = dict[str, Any]
POLICY = "widebeam: 1\nsteps:\n  all:\n    mask: trie\n    normalize: step\n"
SHARE, BUSY, FEW = 0.7, 1000.0, 20.0
BODIES = 128
WARM_S = 2.0


class _Timings(msgspec.Struct):
    queue: float
    context: float
    decode: float
    total: float


class _Batch(msgspec.Struct):
    requests: int


class _Seen(msgspec.Struct):
    timings_ms: _Timings
    batch: _Batch


def write_root(root: Path, shape: Shape, batch: int, precision: str) -> Path:
    """The deployment root: weights in bfloat16, a catalogue, one policy."""
    sizes, widths = [shape.codes] * shape.steps, [shape.width] * shape.steps
    (root / "policies").mkdir(parents=True)
    (root / "policies" / "base.yaml").write_text(POLICY)
    (root / "deployment.toml").write_text(
        f'family = "onerec"\nprecision = "{precision}"\n[sid]\nsizes = {sizes}\n[limits]\nwidths = {widths}\n'
        f"rows = {batch * shape.width}\nbatch = {batch}\ncontext = {shape.context}\nk = {shape.width}\n"
        '[server]\nport = 0\nadmin_port = 0\nadmin_auth = "none"\ndrain_delay_s = 0.05\n'
    )
    _write_weights(root, shape)
    save_vocab(catalogue(shape), tuple(sizes), root, "v1", made_by="bench")
    return root


def _write_weights(root: Path, shape: Shape) -> None:
    config = msgspec.to_builtins(shape.config)
    sid, limits = SidConfig(sizes=(shape.codes,) * shape.steps), Limits(widths=(shape.width,) * shape.steps)
    family = OneRec.build(ModelFiles(config, Path(), {}), sid, limits, torch.bfloat16)
    shapes = {spec.name: spec.shape for spec in family.weight_specs()}
    header, at = dict[str, object](), 0
    for name, size in shapes.items():
        bytes_ = 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, at + bytes_]}
        at += bytes_
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    torch.manual_seed(1)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little")
        yield text
        for name, size in shapes.items():
            values = torch.ones(size) if len(size) == 1 else torch.randn(size) * deviation(name, size[1], shape)
            yield values.bfloat16().view(torch.int16).numpy().data.cast("B")

    with draft(root, "weights") as made:
        made.write("config.json", [msgspec.json.encode(config)])
        made.write("model.safetensors", pieces())
        commit(made, "weights", "v1", "bench", {})


def bodies(shape: Shape, items: int, k: int) -> list[bytes]:
    """Requests with full histories."""
    return [json.dumps({"context": {"history": one}, "k": k}).encode() for one in bodies_ids(shape.context, items)]


def bodies_ids(context: int, items: int) -> list[list[str]]:
    """The histories of those requests."""
    histories = np.random.default_rng(3).integers(0, items, (BODIES, context - 1)).tolist()
    return [[f"item-{n}" for n in one] for one in histories]


class Asking(Load):
    """A load that keeps of every answer its latency from its sending and what the server says of it."""

    def __init__(self, target: Target, asked: Sequence[bytes], connections: int) -> None:
        super().__init__(target, asked, timeout_s=30.0, connections=connections)
        self.rows: list[tuple[float, _Seen]] = []
        self._answers = msgspec.json.Decoder(_Seen)

    def answered(self, shot: Shot, status: int, body: bytes) -> None:
        """See `Load.answered`."""
        now = time.monotonic()
        self.outstanding -= 1
        self.lates.append(shot.sent - shot.intended)
        self.statuses[str(status)] += 1
        if status == 200:
            self.latencies.append(now - shot.intended)
            self.rows.append((now - shot.sent, self._answers.decode(body)))

    def refill(self, now: float) -> None:
        """As many requests under way as there are connections."""
        while self.outstanding < self._most:
            self._fire(self._messages[self.sent % len(self._messages)], now)
            self.sent += 1
            self.outstanding += 1

    def free(self, connection: Any) -> None:
        """See `Load.free`."""
        super().free(connection)
        if self.looping:
            self.refill(time.monotonic())

    looping = False


async def closed(target: Target, asked: Sequence[bytes], connections: int, seconds: float, beside: float = 0) -> Row:
    """The closed loop. beside: requests a second that are refused with 422, beside it."""
    load = Asking(target, asked, connections)
    load.looping = True
    load.refill(time.monotonic())
    wrong = Asking(target, [asked[0][:-1] + b', "policy": "none"}'], 64)
    times = [time.monotonic() + 0.05 + gap for gap in arrivals(beside, WARM_S + seconds, 7)] if beside else []
    pacer = Pacer(times, lambda: load.loop.call_soon_threadsafe(wrong.fire_until, times, time.monotonic()))
    pacer.start()
    await asyncio.sleep(WARM_S)
    before, refused, began = len(load.rows), len(wrong.lates), time.monotonic()
    await asyncio.sleep(seconds)
    took, rows = time.monotonic() - began, load.rows[before:]
    pacer.stopped, load.looping = True, False
    found = {
        "connections": connections,
        "per_s": len(rows) / took,
        "refused_per_s": (len(wrong.lates) - refused) / took,
    }
    while load.outstanding > 0:  # noqa: ASYNC110  sockets answer, no event of ours
        await asyncio.sleep(0.02)
    load.close()
    wrong.close()
    return found | _told(rows) | {"statuses": dict(load.statuses), "refused": dict(wrong.statuses)}


async def opened(target: Target, asked: Sequence[bytes], rate: float, seconds: float) -> Row:
    """The open loop."""
    load = Asking(target, asked, 512)
    start = time.monotonic() + 0.05
    times = [start + gap for gap in arrivals(rate, seconds, 1)]
    pacer = Pacer(times, lambda: load.loop.call_soon_threadsafe(load.fire_until, times, time.monotonic()))
    pacer.start()
    while load.sent < len(times) or load.outstanding > 0:
        await asyncio.sleep(0.05)
        load.fire_until(times, time.monotonic())
    load.close()
    found = {"rate_per_s": rate, "seconds": seconds, "sent": load.sent, "answered": len(load.latencies)}
    return found | {
        "latency_ms": percentiles(load.latencies), "sent_late_ms": percentiles(load.lates),
        "statuses": dict(load.statuses), **_told(load.rows),
    }  # fmt: skip


def _told(rows: Sequence[tuple[float, _Seen]]) -> Row:
    """What the server says of the answers, and what its clients saw beyond it; nothing where there are none."""
    if not rows:
        return {}
    around = [latency - seen.timings_ms.total / 1e3 for latency, seen in rows]
    parts = {
        name: statistics.mean(getattr(seen.timings_ms, name) for _, seen in rows) for name in _Timings.__struct_fields__
    }
    return {
        "rest_ms": percentiles(around), "server_mean_ms": parts,
        "server_ms": percentiles([seen.timings_ms.total / 1e3 for _, seen in rows]),
        "batch": statistics.mean(seen.batch.requests for _, seen in rows),
    }  # fmt: skip


def few_seconds(seconds: float) -> float:
    """How long a few come a second, where everything else takes so long."""
    return min(seconds, 10.0)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = 1e3 * np.sort(np.array(seconds))
    return {name: round(float(np.quantile(ordered, q)), 3) for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}


def steps_ms(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Mean milliseconds of the context and of each step between two looks at the metrics."""
    found = {}
    for name in after:
        if match := re.fullmatch(r'widebeam_step_seconds_count\{step="(\w+)"\}', name):
            total, label = name.replace("_count", "_sum"), match[1]
            count = after[name] - before.get(name, 0)
            found[label] = 1e3 * (after[total] - before.get(total, 0)) / count if count else float("nan")
    return found


def metrics(url: str) -> dict[str, float]:
    """Samples of /metrics by name and labels."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return parse_metrics(answer.read())


def parse_metrics(text: bytes) -> dict[str, float]:
    """Samples of a scrape by name and labels."""
    lines = text.decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


@contextmanager
def serving(root: Path, log: Path) -> Iterator[tuple[Target, str]]:
    """The server of a root, and its URL."""
    with _served.server(root, log) as port:
        url = f"http://127.0.0.1:{port}"
        yield Target.parse(url), url


def with_front_ends(root: Path, number: int) -> Path:
    """The root, set to so many front ends."""
    file = root / "deployment.toml"
    kept = [line for line in file.read_text().splitlines() if not line.startswith("front_ends")]
    at = kept.index("[server]") + 1
    file.write_text("\n".join([*kept[:at], f"front_ends = {number}", *kept[at:], ""]))
    return root


def alone(root: Path, shape: Shape, batch: int, seconds: float, k: int) -> Row:
    """The engine's process without HTTP."""
    command = [sys.executable, "-m", "bench._rest_alone", str(root), "--batch", str(batch), "--seconds", str(seconds)]
    command += ["--k", str(k), "--context", str(shape.context), "--items", str(shape.items // 2)]
    done = subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parent.parent)
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(root: Path, shape: Shape, batch: int, seconds: float, k: int, work: Path) -> Row:
    """Everything about one root."""
    asked = bodies(shape, shape.items // 2, k)
    began = time.monotonic()
    with serving(root, work / "server.log") as (target, url):
        print(f"ready after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        run(closed(target, asked, 2 * batch, 1.0))
        looked = [metrics(url)]
        full = run(closed(target, asked, 3 * batch, seconds))
        looked.append(metrics(url))
        busy = run(closed(target, asked, 3 * batch, seconds, max(1.0, BUSY - full["per_s"])))
        looked.append(metrics(url))
        open_loop = run(opened(target, asked, SHARE * full["per_s"], seconds))
        few = run(opened(target, asked, FEW, few_seconds(seconds)))
        answer = response(target, asked[0])
    with nothing(answer, work) as target:
        least = run(opened(target, asked, FEW, few_seconds(seconds)))
    for n, one in enumerate((full, busy)):
        one["steps_ms"] = steps_ms(*looked[n : n + 2])
    return {
        "closed": full,
        "busy": busy,
        "open": open_loop,
        "few": few,
        "nothing": {"rate_per_s": FEW, "latency_ms": least["latency_ms"]},
    }


def markdown(document: Row) -> str:
    """The tables of a result."""
    lines = [
        "# One REST server on a GPU", "",
        f"{document['device']}, {document['cores']} cores, torch {document['torch']}, commit {document['commit']}; "
        f"{document['seconds']:.0f} s each, {document['k']} items an answer. [README](../README.md) says of what.", "",
    ]  # fmt: skip
    rows = []
    for precision, run_ in document["runs"].items():
        least = sum(run_["alone"]["steps_ms"].values()) if "alone" in run_ else None
        if least is not None:
            rows.append([precision, "alone", f"{run_['alone']['per_s']:.0f}", *["-"] * 7, f"{least:.2f}", "1.00"])
        for name in ("closed", "busy", "open", "few"):
            one = run_[name]
            latency = one.get("latency_ms") or {"p50": None, "p99": None}
            asked = one.get("per_s") or one["rate_per_s"]
            cells = [
                latency["p50"],
                latency["p99"],
                one["server_ms"]["p99"],
                one["rest_ms"]["p50"],
                one["rest_ms"]["p99"],
            ]
            steps = sum(one["steps_ms"].values()) if "steps_ms" in one else None
            times = None if steps is None or least is None else steps / least
            rows.append([
                precision, name, f"{asked:.0f}", f"{one.get('refused_per_s', 0):.0f}", f"{one['batch']:.1f}",
                *("-" if cell is None else f"{cell:.2f}" for cell in (*cells, steps, times)),
            ])  # fmt: skip
        for name, rate, latency in _beside(run_):
            cells = [f"{latency['p50']:.2f}", f"{latency['p99']:.2f}"]
            rows.append([precision, name, f"{rate:.0f}", "-", "-", *cells, *["-"] * 5])
    head = ["precision", "load", "requests/s", "refused/s", "batch", "p50 ms", "p99 ms", "p99 in the server",
            "REST adds, p50", "p99", "steps ms", "times alone"]  # fmt: skip
    return "\n".join([*lines, table(head, rows), ""])


def _beside(run_: Row) -> Iterator[tuple[str, float, dict[str, float]]]:
    """What `few` is to be compared with, where it was measured: its name, requests a second, their latencies."""
    if "few_ms" in run_.get("alone", {}):
        yield "alone, few", FEW, run_["alone"]["few_ms"]
    if "nothing" in run_:
        yield "nothing", run_["nothing"]["rate_per_s"], run_["nothing"]["latency_ms"]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--precision", nargs="+", choices=["bfloat16", "float16", "fp8", "float32"], default=["bfloat16"]
    )
    parser.add_argument("--front-ends", nargs="+", type=int, default=[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--k", type=int, default=50)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--contracts", type=Path, help="a folder of contracts that were made before: an export is slow")
    parser.add_argument("--toy", action="store_true", help="a tiny model on a CPU: whether it runs, not how fast")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = Shape(codes=32, width=16, context=12, d=32, layers=2, heads=2, ffn=64, items=3000) if args.toy else Shape()
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for precision in args.precision:
            began = time.monotonic()
            root = write_root(work / precision, shape, args.batch, precision)
            print(f"{precision}: a root after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            if args.contracts:
                shutil.copytree(args.contracts, root / "contracts")
            without = alone(root, shape, args.batch, args.seconds, args.k)
            for number in args.front_ends:
                name = precision if number == 0 else f"{precision}, {counted(number, 'front end')}"
                found = measure(with_front_ends(root, number), shape, args.batch, args.seconds, args.k, work)
                runs[name] = found | {"alone": without}
                print(json.dumps({name: runs[name]}), flush=True)
    document = {
        "device": "a CPU" if args.toy else torch.cuda.get_device_name(), "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__, "python": platform.python_version(), "commit": commit_of(),
        "seconds": args.seconds, "k": args.k, "runs": runs,
    }  # fmt: skip
    print(markdown(document))
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        args.out.with_suffix(".md").write_text(markdown(document), "utf-8")


if __name__ == "__main__":
    main()
