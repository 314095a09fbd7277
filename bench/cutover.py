"""Does a cutover show in the tail? RecoGEM 5.6, figure 20: new weights and vocabs while requests keep coming.

    python -m bench.cutover make --work FOLDER [--setting cpu|h200|toy] [--start]
    python -m bench.cutover run --work FOLDER --out part1.json [--setting ...] [--mode live|naive] [--cutovers N] ...
    python -m bench.cutover report --out results/cutover part*.json

`run` is one part: a server as a process of its own, client processes in an open loop at a share of the saturation
that they measured just before; updates that fill the weight slots, the last one under load; S seconds steady, N
versions `--gap` seconds apart (weights, vocabs, both), S seconds steady. Every request is written down. `report`
pools parts: the tail of requests that overlap an update (from its publication until the version before has given its
memory back) against that of the steady ones, with bootstrap intervals, beside the same ratio between the two steady
stretches (A/A). `--mode naive` rebuilds on the engine thread.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from app.vocab.manifest import Kind
from bench._cutover_names import LETTERS, version_name
from bench._cutover_processes import PATIENCE_S, Clients, Row, Server, Trouble, saturation, serving
from bench._cutover_report import write_report
from bench._cutover_root import HEAVY, SETTINGS, Setting, ask_for, bodies, clean, drop_old, make_root, publish
from bench._report import settings as machine

KINDS: dict[str, tuple[Kind, ...]] = {"weights": ("weights",), "vocab": ("vocab",), "both": ("weights", "vocab")}
LEAST_S = 3.0
"""Seconds that clients wait for their answers at the end of a part, where none are left."""
SETTLE_S = 180.0
"""Seconds that a version may take until it serves."""


def run_part(arguments: argparse.Namespace, work: Path) -> Row:
    """One part. What goes wrong once the load runs ends the updates; the samples are kept, with what went wrong."""
    began, setting = time.monotonic(), _setting(arguments)
    print(f"root in {work}", file=sys.stderr)
    root = make_root(work, setting)
    clean(work)
    (work / "bodies.jsonl").write_bytes(b"\n".join(bodies(setting)))
    before = machine({}, setting.threads)
    with serving(root, arguments.mode) as server:
        updates = Updates(server, work, arguments.gap)
        _, wrong = updates.publish(["both"] * (arguments.first - 1), math.inf)  # nobody has to wait for these
        if wrong:
            raise Trouble(wrong[0])
        most = arguments.saturation or saturation(server.url, work, arguments.clients, arguments.probe)
        rate = arguments.rate or arguments.share * most
        print(f"{time.monotonic() - began:.0f} s: saturation {most:.1f}/s, open loop at {rate:.1f}/s", file=sys.stderr)
        clients = Clients(server.url, work, arguments.clients, rate, arguments.seed)
        try:
            timed = _timed(updates, arguments, began)
        finally:
            found, wrong = clients.collect(max(LEAST_S, min(PATIENCE_S, began + arguments.limit - time.monotonic())))
        _complete(server, timed["first"] + timed["updates"])
        said = server.bad()
        graphs = [line for _, line in server.of("graphs_captured")]
    return {
        "mode": arguments.mode, "setting": asdict(setting), "machine": before, "kernels": server.serving["kernels"],
        "graphs": graphs, "saturation_per_s": most, "rate_per_s": rate, **timed, "clients": found,
        "trouble": timed["trouble"] + wrong, "said": said, "note": arguments.note,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def _timed(updates: Updates, arguments: argparse.Namespace, began: float) -> Row:
    """The stretches of a part, under load: `marks` are their bounds. Updates end early for `--limit`, and where
    that is not enough, so does the second steady stretch."""
    trouble = list[str]()
    end = began + arguments.limit
    until = end - arguments.steady - arguments.rest
    time.sleep(arguments.warm)
    first, wrong = updates.publish(["both"] * min(arguments.first, 1), until - arguments.steady)
    trouble += wrong
    if first:
        time.sleep(arguments.warm)  # whoever waited has been answered
    marks = [_said(began, "steady")]
    time.sleep(arguments.steady)
    marks.append(time.monotonic())
    cycle = [arguments.kinds[n % len(arguments.kinds)] for n in range(arguments.cutovers)]
    made, wrong = updates.publish(cycle if not trouble else [], until)
    trouble += wrong
    time.sleep(arguments.rest)
    marks.append(_said(began, f"{len(made)} updates, steady again"))
    left = max(0.0, end - marks[-1])
    if left < arguments.steady:
        trouble.append(f"{left:.0f} s were left for the second steady stretch")
    time.sleep(min(arguments.steady, left))
    marks.append(time.monotonic())
    rounded = [round(one, 3) for one in marks]
    return {"marks": rounded, "first": first, "updates": made, "trouble": trouble, "asked": arguments.cutovers}


def _said(began: float, what: str) -> float:
    """The time, said aloud."""
    now = time.monotonic()
    print(f"{now - began:.0f} s: {what}", file=sys.stderr)
    return now


class Updates:
    """Versions, one after the other: none is published before the last one serves, and which are to serve is said by
    release.json, once they are there; so what is removed from the disk is never wanted."""

    def __init__(self, server: Server, work: Path, gap: float) -> None:
        self._server, self._work, self._gap = server, work, gap
        self._content = dict.fromkeys(("weights", "vocab"), 0)
        self._serving: dict[Kind, str] = {"weights": "v1", "vocab": "v1"}
        self._number = 1

    def publish(self, cycle: Sequence[str], until: float) -> tuple[list[Row], list[str]]:
        """Updates of these kinds, `gap` seconds apart or as soon as the one before serves; none begins after `until`.
        The updates, and what went wrong with the last one."""
        found: list[Row] = []
        for kind in cycle:
            began = time.monotonic()
            if began + self._gap > until:
                return found, []
            try:
                found.append(self._one(kind, began))
            except Trouble as trouble:
                print(f"after {len(found)} updates: {trouble}", file=sys.stderr)
                return found, [f"update {len(found) + 1} ({kind}): {trouble}"]
            time.sleep(max(0.0, began + self._gap - time.monotonic()))
        return found, []

    def _one(self, what: str, began: float) -> Row:
        self._number += 1
        for kind in KINDS[what]:
            self._content[kind] = (self._content[kind] + 1) % len(LETTERS)
            version = version_name(self._number, self._content[kind])
            publish(self._work, kind, self._content[kind], version)
            self._serving[kind] = version
        ask_for(self._work, self._serving)
        at, _ = self._server.wait("snapshot_active", SETTLE_S, **{str(k): v for k, v in self._serving.items()})
        drop_old(self._work, frozenset(self._serving.values()))
        return {"kind": what, **{str(k): v for k, v in self._serving.items()}, "published": began, "active": at}


def _complete(server: Server, updates: list[Row]) -> None:
    """What the log says about each update: how long it was prepared, what it held up, when the old one was gone."""
    said = server.of("artifact")
    retired = [at for at, line in said if line.get("state") == "retired"]
    for n, one in enumerate(updates):
        took = one["active"] - one["published"]
        one["states"] = [
            (round(at - one["published"], 3), line["kind"], line.get("state"))
            for at, line in said
            if line["kind"] in HEAVY and line.get("version") == one[line["kind"]] and 0 <= at - one["published"] <= took
        ]
        following = updates[n + 1]["published"] if n + 1 < len(updates) else math.inf
        one["hold_ms"] = _fact(server, "cutover", one, "hold_ms")
        one["prepare_ms"] = _fact(server, "snapshot_ready", one, "prepare_ms")
        one["gone"] = max((at for at in retired if one["active"] <= at < following), default=one["active"])


def _fact(server: Server, event: str, update: Row, fact: str) -> float | None:
    """What the last line of an event says about an update's versions; no two updates have the same names."""
    lines = [line for _, line in server.of(event) if all(line.get(kind) == update[kind] for kind in HEAVY)]
    return lines[-1][fact] if lines else None


def _setting(arguments: argparse.Namespace) -> Setting:
    given = {
        name: getattr(arguments, name) for name in ("gigabytes", "items", "device", "threads", "front_ends", "width")
    }
    changed = {name: value for name, value in given.items() if value is not None}
    return replace(SETTINGS[arguments.setting], threads=max(1, cores() // 2), **changed)  # half of them for the others


def cores() -> int:
    """Cores that this process, and so all of them, may use."""
    return len(os.sched_getaffinity(0))


def make(arguments: argparse.Namespace) -> None:
    """Contents and root, and a server's first start with them, which compiles what is to be compiled."""
    began = time.monotonic()
    arguments.work.mkdir(parents=True, exist_ok=True)
    root = make_root(arguments.work, _setting(arguments))
    clean(arguments.work)
    print(f"{time.monotonic() - began:.0f} s: contents in {arguments.work}", file=sys.stderr)
    if arguments.start:
        with serving(root, "live") as server:
            print(f"{time.monotonic() - began:.0f} s: serves, kernels: {server.serving['kernels']}", file=sys.stderr)
            for _, line in server.of("graphs_captured"):
                print(json.dumps(line), file=sys.stderr)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="widebeam bench cutover", description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="the contents of a folder for `run`, ahead of it")
    making.add_argument("--work", type=Path, required=True)
    making.add_argument("--start", action="store_true", help="start a server once, which compiles its kernels")
    run = commands.add_parser("run", help="one part: steady, updates, steady")
    run.add_argument("--out", type=Path, required=True, help="the part's samples, JSON; NAME.json.gz packs them")
    run.add_argument("--mode", choices=("live", "naive"), default="live")
    run.add_argument("--steady", type=float, default=100.0, help="seconds of each steady stretch")
    run.add_argument("--cutovers", type=int, default=67)
    run.add_argument("--gap", type=float, default=3.0, help="seconds between publications, at least")
    run.add_argument("--kinds", type=lambda text: text.split(","), default=["weights", "vocab", "both"])
    run.add_argument("--share", type=float, default=0.5, help="of saturation; 0.7 on a GPU")
    run.add_argument("--saturation", type=float, help="answers a second, where a part before has measured it")
    run.add_argument("--rate", type=float, help="requests a second, instead of share x saturation")
    run.add_argument("--clients", type=int, default=max(1, cores() // 4), help="processes")
    run.add_argument("--probe", type=float, default=2.5, help="seconds of each rate while looking for saturation")
    run.add_argument("--first", type=int, default=2, help="updates that fill the weight slots, the last under load")
    run.add_argument(
        "--limit", type=float, default=480.0, help="seconds of the part until it is written; updates end early for it"
    )
    run.add_argument("--warm", type=float, default=4.0, help="seconds under load before and after the first updates")
    run.add_argument("--rest", type=float, default=2.0, help="seconds between the last update and a steady stretch")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--work", type=Path, help="folder for root and contents, kept for the next part (3 x gigabytes)")
    run.add_argument("--note", default="", help="a remark that the report repeats")
    for command in (making, run):
        command.add_argument("--setting", choices=SETTINGS, default="cpu")
        command.add_argument("--gigabytes", type=float)
        command.add_argument("--items", type=int)
        command.add_argument("--width", type=int)
        command.add_argument("--threads", type=int, help="[server] threads; half of the cores that it may use")
        command.add_argument("--front-ends", type=int, help="[server] front_ends")
        command.add_argument("--device", choices=("auto", "cpu", "cuda"))
    report = commands.add_parser("report", help="pool parts into a table and a plot")
    report.add_argument("parts", type=Path, nargs="+")
    report.add_argument("--out", type=Path, required=True, help="writes OUT.md, OUT.svg and OUT.json")
    return parser.parse_args(argv)


def _opened(file: Path, mode: str) -> IO[str]:
    return gzip.open(file, mode, compresslevel=5) if file.suffix == ".gz" else file.open(mode)  # type: ignore[return-value]


def _read(file: Path) -> Row:
    with _opened(file, "rt") as stream:
        return json.load(stream)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    if arguments.command == "report":
        print(write_report([_read(part) for part in arguments.parts], arguments.out))
        return
    if arguments.command == "make":
        make(arguments)
        return
    with tempfile.TemporaryDirectory() as scratch:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))  # the server and the clients end, too
        work = arguments.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        try:
            part = run_part(arguments, work)
        except Trouble as trouble:
            raise SystemExit(str(trouble)) from trouble
    with _opened(arguments.out, "wt") as file:
        json.dump(part, file, separators=(",", ":"))
    print(f"{arguments.out}: {len(part['updates'])} updates, {sum(c['sent'] for c in part['clients'])} requests, "
          f"{part['seconds']} s", file=sys.stderr)  # fmt: skip
    if part["trouble"]:
        raise SystemExit(f"written, with trouble: {'; '.join(part['trouble'])}")


if __name__ == "__main__":
    main()
