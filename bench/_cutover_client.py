"""A client process of `bench cutover`: an open loop that writes down every request.

    python -m bench._cutover_client URL --bodies FILE --rate R --seed N [--seconds S] --out FILE

It sends until its standard input ends (or `--seconds` are over), waits for what is out, for as many seconds as stood
there, and writes columns as JSON. Times are those of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from functools import partial
from pathlib import Path

import msgspec

from app.cli.load import Load, Pacer, Shot, Target, arrivals
from app.cli.loop import run
from bench._cutover_names import EVERYWHERE, content_of, item_name

LONGEST_S = 1200.0
PATIENCE_S = 35.0
"""Seconds for what is out, where nobody says how many; longer than any request may take."""
COLUMNS = (
    "intended", "latency_ms", "late_ms", "status", "body", "weights", "vocab", "score", "last", "mixed", "batch_ms"
)  # fmt: skip


class Item(msgspec.Struct):
    id: str
    score: float
    sid: list[int]


class Versions(msgspec.Struct, frozen=True):
    snapshot: str
    weights: str
    vocab: str
    policy: str
    policy_id: str
    contract: str


class Timings(msgspec.Struct):
    context: float
    decode: float


class Answer(msgspec.Struct):
    items: list[Item]
    versions: Versions
    timings_ms: Timings


def wrong_items(answer: Answer, k: int) -> int:
    """Items of an answer that do not belong to the vocab that it names, and those that are missing. An item's id says
    its SID behind the letter of its content, or EVERYWHERE. No two contents share another SID, so what one's trie
    allows is missing where another's item map is asked."""
    letters = {EVERYWHERE, content_of(answer.versions.vocab)}
    bad = sum(item.id[0] not in letters or item.id != item_name(item.id[0], item.sid) for item in answer.items)
    return bad + abs(k - len(answer.items))


class Recording(Load):
    """A load that keeps a row a request, and every set of versions that answers have named."""

    def __init__(self, target: Target, bodies: list[bytes], connections: int) -> None:
        super().__init__(target, bodies, timeout_s=30.0, connections=connections)
        self.rows: list[tuple[float | int | str, ...]] = []
        self.named: set[Versions] = set()
        self._answer = msgspec.json.Decoder(Answer)
        self._k = [json.loads(body)["k"] for body in bodies]
        self._number = {target.message(body): n for n, body in enumerate(bodies)}
        self._order: dict[float, int] = {}

    def _fire(self, message: bytes, intended: float) -> None:
        self._order[intended] = self._number[message]
        super()._fire(message, intended)

    def answered(self, shot: Shot, status: int, body: bytes) -> None:
        now = time.monotonic()
        self.outstanding -= 1
        number = self._order.pop(shot.intended)
        row = (shot.intended, 1e3 * (now - shot.intended), 1e3 * (shot.sent - shot.intended), status, number)
        if status != 200:
            self.rows.append((*row, "", "", 0.0, 0.0, 0, 0.0))
            return
        self.latencies.append(now - shot.intended)
        found = self._answer.decode(body)
        self.named.add(found.versions)
        took = found.timings_ms.context + found.timings_ms.decode
        first, last = (found.items[0].score, found.items[-1].score) if found.items else (0.0, 0.0)
        mixed = wrong_items(found, self._k[number])
        self.rows.append((*row, found.versions.weights, found.versions.vocab, first, last, mixed, took))


class Stop:
    """When to send no more, and for how long to wait then."""

    def __init__(self) -> None:
        self.patience, self._set = PATIENCE_S, threading.Event()

    def wait(self) -> None:
        """Until standard input ends."""
        said = sys.stdin.buffer.read()
        self.patience = float(said) if said else PATIENCE_S
        self._set.set()

    @property
    def now(self) -> bool:
        """Whether it has."""
        return self._set.is_set()


async def fire(arguments: argparse.Namespace) -> dict[str, object]:
    bodies = arguments.bodies.read_bytes().splitlines()
    load = Recording(Target.parse(arguments.url), bodies, arguments.connections)
    stop, loop = Stop(), asyncio.get_running_loop()
    if arguments.seconds is None:
        threading.Thread(target=stop.wait, daemon=True).start()
    start = time.monotonic() + 0.1
    times = [start + gap for gap in arrivals(arguments.rate, arguments.seconds or LONGEST_S, arguments.seed)]
    pacer = Pacer(times, lambda: loop.call_soon_threadsafe(lambda: load.fire_until(times, time.monotonic())))
    pacer.start()
    while load.sent < len(times) and not stop.now:  # noqa: ASYNC110  the pacer and standard input are threads
        await asyncio.sleep(0.05)
    pacer.stopped = True
    del times[load.sent :]
    end = time.monotonic() + stop.patience
    while load.outstanding > 0 and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    load.close()
    rounded = partial(round, ndigits=3)
    rows = [tuple(rounded(cell) if isinstance(cell, float) else cell for cell in row) for row in load.rows]
    columns = (
        {name: list(column) for name, column in zip(COLUMNS, zip(*rows, strict=True), strict=True)} if rows else {}
    )
    errors = {code: n for code, n in load.errors.items() if n}
    return {"sent": load.sent, "answered": len(load.latencies), "failed": errors, "columns": columns,
            "named": [msgspec.to_builtins(one) for one in load.named]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--bodies", type=Path, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.write_text(json.dumps(run(fire(arguments))))


if __name__ == "__main__":
    main()
