"""What a request costs the event loop, layer by layer, in microseconds of its thread's processor time: no GPU needed.

    python -m bench.request_layers [--rounds 60] [--requests 96] [--history 100] [--k 50] [--json FILE]

The server's own protocol and applications over connections in memory, so that neither sockets nor a client are in the
figures, and engines that answer at once. Each row but the last two is what its layer adds to those above it, or what
it takes alone; short rounds of all of them take turns, and the quickest of each counts, since a busy machine only adds.

protocol    bytes to a request and back: HTTP's parser, uvicorn's cycle, one task
edge        request id, bounds of the body
decode      JSON to a checked `core.Request`
encode      an outcome of k items to JSON
route       the rest up to the front door: routing, headers, metrics, the wait for the ticket
line        the log line
runtime     behind the front door: admission, queue, batches of 32 to an engine and back, the outcome
together    all of it
front ends  what is left of it in the engine's process with `server.front_ends`: messages to requests, the runtime,
            outcomes to messages
new ids     the same, where nobody has asked for an id of the histories before; in all other rows somebody has
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec
import numpy as np
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from app.api import codec, media, wire
from app.api.app import public
from app.api.health import Readiness
from app.api.middleware import BodyGuard, Edge
from app.api.protocol import protocol
from app.cli.compose import Overrides, compose
from app.cli.loop import run
from app.config import Deployment
from app.core import HistoryIds, Item, Outcome, Ranked, Request, Timings, Versions
from app.runtime.channel import HEAD as HEAD_BYTES
from app.runtime.front import Front
from app.runtime.job import Batch, Served
from app.runtime.logs import Log, make_log
from app.runtime.messages import Fetch, Fetched, Hello
from app.runtime.metrics import Metrics
from app.runtime.port import Port
from app.runtime.runtime import Runtime
from app.runtime.thread import Done
from app.runtime.ticket import PendingTicket
from app.runtime.translate import asked
from bench._report import settings, table
from bench._synthetic import Shape
from bench.rest import write_root

CONNECTIONS = 32
SHAPE = Shape(codes=64, steps=3, width=64, context=512, d=32, layers=1, heads=2, ffn=64, items=100_000)
HEAD = (
    b"POST /v1/recommend HTTP/1.1\r\nhost: shop.example\r\nuser-agent: bench\r\naccept: application/json\r\n"
    b"content-type: application/json\r\nx-request-timeout-ms: 1000\r\ncontent-length: %d\r\n\r\n"
)


class Wire(asyncio.Transport):
    """A connection in memory: what is written is counted."""

    written = 0

    def write(self, data: Any) -> None:
        """Take an answer's bytes."""
        self.written += len(data)

    def is_closing(self) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """There is nothing to close."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""


class Connections:
    """Connections of one application that ask at the same moment, as after a batch that was answered."""

    def __init__(self, app: ASGIApp, asked: Sequence[bytes]) -> None:
        config, self._state, self._asked = Config(app, ws="none", access_log=False), ServerState(), asked
        kind = protocol(30.0)
        self._open = [kind(config=config, server_state=self._state, app_state={}) for _ in range(CONNECTIONS)]
        self._wires = [Wire() for _ in self._open]
        for one, wire_ in zip(self._open, self._wires, strict=True):
            one.connection_made(wire_)

    async def ask(self, requests: int) -> None:
        """Ask, in waves of one request a connection, and wait for every answer."""
        for at in range(0, requests, CONNECTIONS):
            end = self._state.total_requests + CONNECTIONS
            for number, one in enumerate(self._open):
                one.data_received(self._asked[(at + number) % len(self._asked)])
            while self._state.total_requests < end:  # noqa: ASYNC110  uvicorn counts, no event of ours
                await asyncio.sleep(0)

    @property
    def written(self) -> int:
        """Bytes of all answers."""
        return sum(one.written for one in self._wires)

    def close(self) -> None:
        """Close them, with their timers."""
        for one in self._open:
            one.connection_lost(None)


class FrontEnd:
    """A front end's socket to the engine, in memory; as many requests at the same moment as there are connections."""

    def __init__(
        self, runtime: Runtime, deployment: Deployment, log: Log, asked_: Sequence[Request], *, new: bool = False
    ) -> None:
        """new: whether nothing was asked for before, each time"""
        self._runtime, self._new = runtime, new
        self._port = Port(runtime, Metrics(), log, _never, Hello(deployment, False))
        self._port.connection_made(Wire())
        encode = msgspec.msgpack.Encoder().encode
        bodies = [encode(asked(number, request)) for number, request in enumerate(asked_)]
        self._wave = b"".join(len(body).to_bytes(HEAD_BYTES) + body for body in bodies)

    async def ask(self, requests: int) -> None:
        """See `Connections.ask`."""
        for _ in range(0, requests, CONNECTIONS):
            if self._new and self._runtime.active is not None:
                self._runtime.active.vocab.recent._known.clear()  # noqa: SLF001
            self._port.data_received(self._wave)
            while self._port._open:  # noqa: SLF001, ASYNC110  it tells its front end, nobody else
                await asyncio.sleep(0)

    def close(self) -> None:
        """End it."""
        self._port.connection_lost(None)


async def _never(_: Fetch) -> Fetched:
    raise AssertionError("nothing is fetched")


class AtOnce:
    """A front door that answers with the same items in the next turn of the event loop."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def admit(self, request: Request) -> PendingTicket:
        """See `front.Front`."""
        ticket = PendingTicket(request.deadline, time.monotonic, lambda _: None)
        asyncio.get_running_loop().call_soon(ticket.resolve, self._outcome)
        return ticket

    def reasons(self) -> tuple[str, ...]:
        """See `front.Front`."""
        return ()


class Engine:
    """In the place of a runtime's engine thread: the same ranked list for every job, in the next turn."""

    alive = True

    def __init__(self, ranked: Ranked) -> None:
        self._ranked = ranked

    def ahead(self, _: Batch) -> bool:
        """See `EngineThread`."""
        return False

    def run(self, batch: Batch, loop: asyncio.AbstractEventLoop, done: Done, _last: object = None) -> None:
        """See `EngineThread.run`."""
        ends = [Served(job, self._ranked, time.monotonic(), 0.0, 0.0, len(batch.jobs)) for job in batch.jobs]
        loop.call_soon(done, batch, ends)


async def _fixed(scope: Scope, receive: Receive, send: Send) -> None:
    """The least application: reads the body, answers with as many bytes as k items take."""
    while (await receive()).get("more_body"):
        pass
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(scope["state"]["answer"]))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": scope["state"]["answer"]})


def _with(answer: bytes) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["answer"] = answer
        await _fixed(scope, receive, send)

    return app


def _outcome(items: int) -> Outcome:
    made = tuple(Item(f"item-{n}", -0.123456789 * n, (n % 64, 7, 63)) for n in range(items))
    versions = Versions("0123456789ab", "v1", "v1", "base", "0123456789ab", "0123456789ab")
    return Outcome("r-1", made, "ok", None, versions, (), 1, None, 0, 0, Timings(0.1, 0.2, 0.3, 0.7), 32, 2048)


class Effort(NamedTuple):
    """rounds, and requests in each · history: items of a request · k: items of an answer."""

    rounds: int = 60
    requests: int = 96
    history: int = 100
    k: int = 50


class Bench:
    """The parts, each a coroutine function that spends so many requests' worth."""

    def __init__(self, deployment: Deployment, runtime: Runtime, stream: BinaryIO, items: int, effort: Effort) -> None:
        """items: item-0 .. are in the runtime's catalogue · stream: for the log"""
        k, outcome = effort.k, _outcome(effort.k)
        generator = np.random.default_rng(3)
        histories = generator.integers(0, items, (CONNECTIONS, effort.history)).tolist()
        bodies = [json.dumps({"user_id": f"u-{n}", "context": {"history": [f"item-{i}" for i in one]}, "k": k}).encode()
                  for n, one in enumerate(histories)]  # fmt: skip
        self._asked = [HEAD % len(body) + body for body in bodies]
        answer = media.ENCODE[media.JSON](wire.to_answer(outcome))
        fixed = _with(answer)
        instant, readiness = AtOnce(outcome), Readiness(cast(Front, AtOnce(outcome)))
        quiet, spoken = make_log(stream, "error"), make_log(stream, "info")
        guard = BodyGuard(fixed, 8 * 2**20, 30.0)
        self.apps: dict[str, ASGIApp] = {
            "protocol": fixed,
            "edge": Edge(guard, readiness, quiet, time.monotonic),
            "route": public(cast(Front, instant), deployment, Metrics(), quiet, readiness),
            "line": public(cast(Front, instant), deployment, Metrics(), spoken, readiness),
            "runtime": public(runtime, deployment, Metrics(), spoken, Readiness(runtime)),
        }
        contexts = [HistoryIds(tuple(f"item-{i}" for i in one)) for one in histories]
        requests = [Request(f"r-{n}", one, k, f"u-{n}", received=time.monotonic()) for n, one in enumerate(contexts)]
        self._front_ends = {
            name: FrontEnd(runtime, deployment, quiet, requests, new=name == "new ids")
            for name in ("front ends", "new ids")
        }
        body = wire.body_type(deployment.limits)
        self.alone: dict[str, Callable[[], object]] = {
            "decode": partial(_decode, codec.decoders(body)[media.JSON], bodies[0]),
            "encode": lambda: media.ENCODE[media.JSON](wire.to_answer(outcome)),
        }

    async def measure(self, rounds: int, requests: int) -> dict[str, float]:
        """Microseconds a request: the quickest round of each part."""
        open_ = {name: Connections(app, self._asked) for name, app in self.apps.items()}
        parts: dict[str, Callable[[int], Awaitable[None]]] = {name: one.ask for name, one in open_.items()}
        parts |= {name: partial(_repeat, call) for name, call in self.alone.items()}
        parts |= {name: one.ask for name, one in self._front_ends.items()}
        best = dict.fromkeys(parts, float("inf"))
        gc.disable()  # between rounds instead
        try:
            for _ in range(rounds):
                for name, part in parts.items():
                    before = time.thread_time()
                    await part(requests)
                    best[name] = min(best[name], 1e6 * (time.thread_time() - before) / requests)
                gc.collect()
        finally:
            gc.enable()
            for connections in open_.values():
                connections.close()
            for front_end in self._front_ends.values():
                front_end.close()
        return best


def _decode(decoder: codec.Decoder, data: bytes) -> Request:
    return wire.to_request(decoder.decode(data), request_id="r", received=0.0, deadline=None, override=False)


async def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def layers(best: Mapping[str, float]) -> dict[str, float]:
    """What each layer adds."""
    codecs = best["decode"] + best["encode"]
    return {
        "protocol": best["protocol"],
        "edge": best["edge"] - best["protocol"],
        "decode": best["decode"],
        "encode": best["encode"],
        "route": best["route"] - best["edge"] - codecs,
        "line": best["line"] - best["route"],
        "runtime": best["runtime"] - best["line"],
        "together": best["runtime"],
        "front ends": best["front ends"],
        "new ids": best["new ids"],
    }


async def measure(root: Path, shape: Shape, effort: Effort) -> dict[str, float]:
    """Microseconds a request by layer, over a runtime of this root without its engine."""
    with tempfile.TemporaryFile("wb", buffering=0) as stream:
        service = compose(root, Overrides(), stream)
        runtime = service.build()
        await runtime.start(service.load)
        active = runtime.active
        if active is None:
            raise RuntimeError("; ".join(runtime.reasons()))
        generator, half = np.random.default_rng(1), shape.items // 2
        items = generator.choice(half, effort.k, replace=False)
        ranked = Ranked(items, -np.sort(generator.random(effort.k, np.float32)), active.vocab.sids(items))
        runtime._batcher._thread = cast(Any, Engine(ranked))  # noqa: SLF001  nobody else takes a runtime's engine away
        try:
            bench = Bench(service.deployment, runtime, stream, half, effort)
            return layers(await bench.measure(effort.rounds, effort.requests))
        finally:
            runtime.close()


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in Effort()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    effort = Effort(args.rounds, args.requests, args.history, args.k)
    with tempfile.TemporaryDirectory() as folder:
        root = write_root(Path(folder) / "root", SHAPE, CONNECTIONS, "float32")
        found = run(measure(root, SHAPE, effort))
    print(f"histories of {effort.history} items, k = {effort.k}, the quickest of {effort.rounds} rounds\n")
    print(table(["layer", "microseconds a request"], [[name, f"{value:.1f}"] for name, value in found.items()]))
    if args.json:
        args.json.write_text(json.dumps({"machine": settings({}, 1), "microseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
