"""Does a cutover show in the tail? RecoGEM 5.6, figure 20: new weights and vocabs while requests keep coming.

    python -m bench.cutover run --out part1.json [--setting cpu|h200|toy] [--mode live|naive] [--cutovers N] ...
    python -m bench.cutover report --out results/cutover part*.json

`run` is one part: a server as a process of its own, client processes in an open loop at a share of the saturation that
they measured just before, S seconds steady, N versions `--gap` seconds apart (weights, vocabs, both), S seconds steady.
Every request is written down. `report` pools parts: the tail of requests that overlap an update (from its publication
until the version that it replaced has given its memory back) against that of the steady ones, with bootstrap intervals,
beside the same ratio between the two steady stretches (A/A). `--mode naive` rebuilds on the engine thread.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from bench._cutover_report import write_report
from bench._cutover_root import LETTERS, SETTINGS, Setting, bodies, make_root, publish
from bench._report import settings as machine

CLONE = Path(__file__).parent.parent
KINDS = {"weights": ("weights",), "vocab": ("vocab",), "both": ("weights", "vocab")}
SETTLE_S = 180.0
KEPT = 4
"""Versions of a kind that stay on the disk."""
Row = dict[str, Any]


class Server:
    """A server process and what its log has said, with the times at which it said so."""

    def __init__(self, root: Path, mode: str) -> None:
        command = [sys.executable, "-m", "app", "serve", "--root", str(root), "--port", "0", "--admin-port", "0"]
        if mode == "naive":
            command = [sys.executable, "-m", "bench._cutover_naive", str(root)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=CLONE)
        self.lines: list[tuple[float, Row]] = []
        self._said = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        _, where = self.wait("listening", seconds=300)
        self.url, self.admin = where["public"], where["admin"]
        self.wait("snapshot_active", seconds=600)
        time.sleep(1)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                found = json.loads(line)
            except ValueError:
                found = {"event": "text", "text": line.decode(errors="replace")}
            with self._said:
                self.lines.append((time.monotonic(), found))
                self._said.notify_all()
        self.process.wait()
        with self._said:
            self._said.notify_all()

    def wait(self, event: str, seconds: float, **facts: str) -> tuple[float, Row]:
        """The first line of an event with these facts; SystemExit where none comes."""
        end, seen = time.monotonic() + seconds, 0
        with self._said:
            while True:
                for at, line in self.lines[seen:]:
                    if line.get("event") == event and all(line.get(k) == v for k, v in facts.items()):
                        return at, line
                    if line.get("event") == "artifact_rejected":
                        raise SystemExit(f"refused: {line}")
                seen = len(self.lines)
                if self.process.poll() is not None or not self._said.wait(max(0.0, end - time.monotonic())):
                    raise SystemExit(f"no `{event}` {facts}: {[line for _, line in self.lines[-5:]]}")

    def of(self, event: str) -> list[tuple[float, Row]]:
        """Every line of an event so far."""
        with self._said:
            return [one for one in self.lines if one[1].get("event") == event]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Clients:
    """Client processes that share a rate."""

    def __init__(self, url: str, work: Path, count: int, rate: float, seed: int, seconds: float | None = None) -> None:
        self._outs = [work / f"client{n}.json" for n in range(count)]
        more = [] if seconds is None else ["--seconds", str(seconds)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "bench._cutover_client", url, "--bodies", str(work / "bodies.jsonl"), "--rate",
                 str(rate / count), "--seed", str(seed * 100 + n), "--out", str(out), *more],
                stdin=subprocess.PIPE, cwd=CLONE, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for n, out in enumerate(self._outs)
        ]  # fmt: skip

    def collect(self) -> list[Row]:
        """End the load and read what was written down."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            if process.wait(180):
                raise SystemExit("a client failed")
        return [json.loads(out.read_text()) for out in self._outs]


def saturation(url: str, work: Path, count: int, seconds: float) -> float:
    """Answers a second that the same clients get when they ask for more than there is."""
    rate, best = 8.0, 0.0
    while True:
        found = Clients(url, work, count, rate, seed=1, seconds=seconds).collect()
        spans = [
            max(t + ms / 1e3 for t, ms in zip(one["columns"]["intended"], one["columns"]["latency_ms"], strict=True))
            - min(one["columns"]["intended"])
            for one in found
            if one["columns"]
        ]
        achieved = sum(one["answered"] for one in found) / max(seconds, *spans)
        best = max(best, achieved)
        print(f"offered {rate:.0f}/s: {achieved:.1f}/s answered", file=sys.stderr)
        if achieved < 0.85 * rate:
            return best
        rate *= 2


def run_part(arguments: argparse.Namespace, work: Path) -> Row:
    setting: Setting = replace(SETTINGS[arguments.setting], **_changes(arguments))
    print(f"root in {work}", file=sys.stderr)
    root = make_root(work, setting)
    _clean(root)
    (work / "bodies.jsonl").write_bytes(b"\n".join(bodies(setting)))
    before = machine({}, setting.threads)
    with _server(root, arguments.mode) as server:
        most = arguments.saturation or saturation(server.url, work, arguments.clients, arguments.probe)
        rate = arguments.rate or arguments.share * most
        print(f"saturation {most:.1f}/s, open loop at {rate:.1f}/s", file=sys.stderr)
        clients = Clients(server.url, work, arguments.clients, rate, arguments.seed)
        time.sleep(arguments.warm)
        marks = [time.monotonic()]
        time.sleep(arguments.steady)
        marks.append(time.monotonic())
        updates = _update(server, work, arguments)
        time.sleep(arguments.rest)
        marks.append(time.monotonic())
        time.sleep(arguments.steady)
        marks.append(time.monotonic())
        found = clients.collect()
        _complete(server, updates)
    return {
        "mode": arguments.mode, "setting": asdict(setting), "machine": before, "saturation_per_s": most,
        "rate_per_s": rate, "marks": [round(one, 3) for one in marks], "updates": updates, "clients": found,
        "note": arguments.note,
    }  # fmt: skip


@contextmanager
def _server(root: Path, mode: str) -> Iterator[Server]:
    server = Server(root, mode)
    try:
        yield server
    finally:
        server.stop()


def _update(server: Server, work: Path, arguments: argparse.Namespace) -> list[Row]:
    """Publish one version after the other, `gap` seconds apart or as soon as the one before serves."""
    updates: list[Row] = []
    cycle, content = arguments.kinds, dict.fromkeys(("weights", "vocab"), 0)
    for n in range(arguments.cutovers):
        kinds, began = KINDS[cycle[n % len(cycle)]], time.monotonic()
        names: dict[str, str] = {}
        for kind in kinds:
            content[kind] = (content[kind] + 1) % len(LETTERS)
            names[kind] = f"v{n + 2}-{LETTERS[content[kind]]}"
            publish(work, kind, content[kind], names[kind])
        at, _ = server.wait("snapshot_active", SETTLE_S, **names)
        updates.append({"kind": cycle[n % len(cycle)], **names, "published": began, "active": at})
        _drop_old(work / "root")
        time.sleep(max(0.0, began + arguments.gap - time.monotonic()))
    return updates


def _complete(server: Server, updates: list[Row]) -> None:
    """What the log says about each update: how long it was prepared, what it held up, when the old one was gone.

    Contents recur, and snapshot ids with them, so lines are told apart by their times."""
    held, ready = server.of("cutover"), server.of("snapshot_ready")
    retired = [at for at, line in server.of("artifact") if line.get("state") == "retired"]
    for n, one in enumerate(updates):
        following = updates[n + 1]["published"] if n + 1 < len(updates) else math.inf
        mine = [line for at, line in held if one["active"] - 0.001 <= at < following]
        one["hold_ms"] = mine[0]["hold_ms"] if mine else None
        one["prepare_ms"] = next((line["prepare_ms"] for at, line in reversed(ready) if at <= one["active"]), None)
        one["gone"] = max((at for at in retired if one["active"] <= at < following), default=one["active"])


def _drop_old(root: Path) -> None:
    for kind in ("weights", "vocab"):
        found = sorted((root / kind).glob("v*"), key=lambda path: int(path.name[1:].partition("-")[0]))
        for path in found[:-KEPT]:
            shutil.rmtree(path)


def _clean(root: Path) -> None:
    for kind in ("weights", "vocab"):
        for path in (root / kind).glob("v*-*"):
            shutil.rmtree(path)
        if not (root / kind / "v1").exists():
            publish(root.parent, kind, 0, "v1")
    shutil.rmtree(root / "state", ignore_errors=True)


def _changes(arguments: argparse.Namespace) -> Row:
    given = {name: getattr(arguments, name) for name in ("gigabytes", "items", "device", "threads", "width")}
    cores = len(os.sched_getaffinity(0))  # half of them for everybody else: clients, loading, the event loop
    return {"threads": max(1, cores // 2)} | {name: value for name, value in given.items() if value is not None}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="widebeam bench cutover", description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="one part: steady, updates, steady")
    run.add_argument("--out", type=Path, required=True, help="the part's samples, JSON; NAME.json.gz packs them")
    run.add_argument("--setting", choices=SETTINGS, default="cpu")
    run.add_argument("--mode", choices=("live", "naive"), default="live")
    run.add_argument("--steady", type=float, default=100.0, help="seconds of each steady stretch")
    run.add_argument("--cutovers", type=int, default=67)
    run.add_argument("--gap", type=float, default=3.0, help="seconds between publications, at least")
    run.add_argument("--kinds", type=lambda text: text.split(","), default=["weights", "vocab", "both"])
    run.add_argument("--share", type=float, default=0.5, help="of saturation; 0.7 on a GPU")
    run.add_argument("--saturation", type=float, help="answers a second, where a part before has measured it")
    run.add_argument("--rate", type=float, help="requests a second, instead of share x saturation")
    run.add_argument("--clients", type=int, default=max(1, (os.cpu_count() or 1) // 8), help="processes")
    run.add_argument("--probe", type=float, default=5.0, help="seconds of each rate while looking for saturation")
    run.add_argument("--warm", type=float, default=3.0, help="seconds under load before anything counts")
    run.add_argument("--rest", type=float, default=2.0, help="seconds between the last update and the second stretch")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--work", type=Path, help="folder for root and contents, kept for the next part (3 x gigabytes)")
    run.add_argument("--note", default="", help="a remark that the report repeats")
    run.add_argument("--gigabytes", type=float)
    run.add_argument("--items", type=int)
    run.add_argument("--width", type=int)
    run.add_argument("--threads", type=int, help="[server] threads; half of the cores")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"))
    report = commands.add_parser("report", help="pool parts into a table and a plot")
    report.add_argument("parts", type=Path, nargs="+")
    report.add_argument("--out", type=Path, required=True, help="writes OUT.md, OUT.svg and OUT.json")
    return parser.parse_args(argv)


def _opened(file: Path, mode: str) -> IO[str]:
    return gzip.open(file, mode) if file.suffix == ".gz" else file.open(mode)  # type: ignore[return-value]


def _read(file: Path) -> Row:
    with _opened(file, "rt") as stream:
        return json.load(stream)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    if arguments.command == "report":
        print(write_report([_read(part) for part in arguments.parts], arguments.out))
        return
    with tempfile.TemporaryDirectory() as scratch:
        work = arguments.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        part = run_part(arguments, work)
    with _opened(arguments.out, "wt") as file:
        json.dump(part, file, separators=(",", ":"))
    print(f"{arguments.out}: {len(part['updates'])} updates, {sum(c['sent'] for c in part['clients'])} requests",
          file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()
