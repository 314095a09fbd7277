"""A front door without a runtime behind it, a real server around it, and a client that can misbehave."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from app.api.server import Addresses, serve
from app.cli import front_end
from app.config import Deployment, Limits, Server, SidConfig
from app.core import Exposure, HistoryIds, Item, Outcome, Request, Timings, Versions
from app.errors import Cancelled, Expired, Fault, InvalidRequest, ModelOutput, QueueFull, WidebeamError
from app.runtime.front import Ticket
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from tests import said

VERSIONS = Versions("snap-1", "w1", "v1", "base", "pid-1", "c-1")
GOLDEN = {"context": {"history": ["a", "b"]}, "k": 3}
PATIENCE_S = 60.0
"""What ends a test that has failed. A machine may be slow: nothing that is awaited has a shorter bound."""


def outcome_of(request: Request, items: tuple[Item, ...] | None = None) -> Outcome:
    """The fake's answer: a function of history and k alone."""
    first = request.context.ids[0] if isinstance(request.context, HistoryIds) and request.context.ids else "none"
    made = tuple(Item(f"{first}-{n}", -0.5 * n, (n, n + 1, n + 2)) for n in range(request.k))
    return Outcome(
        request_id=request.request_id,
        items=made if items is None else items,
        status="ok",
        reason=None,
        versions=VERSIONS,
        experiments=(Exposure("l", "x", "a", "split"),),
        seed=request.seed or 0,
        load=None,
        unknown_history=0,
        unknown_exclude=0,
        timings=Timings(0.1, 0.2, 0.3, 0.7),
        batch_requests=1,
        batch_rows=8,
    )


RAISES: Mapping[str, WidebeamError | Exception] = {
    "full": QueueFull("1024 requests are waiting"),
    "crash": RuntimeError("admission broke on secret-content"),
    "unpolicy": InvalidRequest("no such policy", path="$.policy"),
}
ENDS: Mapping[str, Exception] = {
    "late": Expired("the deadline passed"),
    "model": ModelOutput("2 % of the logits of step 1 are NaN"),
    "fault": Fault("the step loop broke"),
    "boom": ValueError("unexpected"),
}


class FakeTicket:
    def __init__(self, front: FakeFront, request: Request) -> None:
        self.front, self.request, self.cancelled = front, request, False
        self.held: asyncio.Future[bool] | None = None

    async def outcome(self) -> Outcome:
        context = self.request.context
        word = context.ids[0] if isinstance(context, HistoryIds) and context.ids else ""
        if word in ENDS:
            raise ENDS[word]
        if word == "nan":
            return outcome_of(self.request, (Item("x", float("nan"), (1, 2, 3)),))
        if word == "hold" and not self.cancelled:
            self.held = asyncio.ensure_future(self.front.release.wait())
            try:
                await self.held
            except asyncio.CancelledError:
                if not self.cancelled:  # whoever waits was cancelled
                    self.cancel()
                    raise
        if self.cancelled:
            raise Cancelled("the client left")
        if word == "dropped":
            raise Cancelled("dropped by the runtime")
        self.front.answered += 1
        return outcome_of(self.request)

    def cancel(self) -> None:
        if self.cancelled:
            return
        self.cancelled = True
        if self.held is not None:
            self.held.cancel()
        self.front.cancelled.append(self.request)
        self.front.cancel_seen.set()


@dataclass
class FakeFront:
    admitted: list[Request] = field(default_factory=list)
    cancelled: list[Request] = field(default_factory=list)
    why_not: tuple[str, ...] = ()
    answered: int = 0
    draining: bool = False
    release: asyncio.Event = field(default_factory=asyncio.Event)
    cancel_seen: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: set[asyncio.Task[None]] = field(default_factory=set)

    def admit(self, request: Request) -> Ticket:
        word = request.context.ids[0] if isinstance(request.context, HistoryIds) and request.context.ids else ""
        if word in RAISES:
            raise RAISES[word]
        if request.k > 100:
            raise InvalidRequest(f"k is {request.k}; 1 to 100 are possible (limits.k)", path="$.k")
        self.admitted.append(request)
        return FakeTicket(self, request)

    def hand_in(self, request: Request, tell: Callable[[Outcome | WidebeamError], None]) -> Ticket:
        ticket = self.admit(request)

        async def wait() -> None:
            try:
                tell(await ticket.outcome())
            except Exception as error:  # noqa: BLE001  as the runtime
                tell(error if isinstance(error, WidebeamError) else Fault.of(error))

        task = asyncio.create_task(wait())
        self.waiting.add(task)
        task.add_done_callback(self.waiting.discard)
        return ticket

    def reasons(self) -> tuple[str, ...]:
        return self.why_not

    def status(self) -> dict[str, object]:
        return {"ready": not self.why_not, "reasons": list(self.why_not), "device": "cpu", "active": VERSIONS._asdict()}

    def begin_drain(self) -> None:
        self.draining = True

    async def drained(self, timeout_s: float) -> bool:
        return True


def deployment(**server: object) -> Deployment:
    settings = {"port": 0, "admin_port": 0, "drain_delay_s": 0.0, "drain_timeout_s": 2.0, "read_timeout_s": 5.0}
    return Deployment(
        family="fake",
        sid=SidConfig(sizes=(8, 8, 8)),
        limits=Limits(widths=(8, 8, 8), k=100),
        server=msgspec.convert({**settings, **server}, Server),
    )


@dataclass
class Served:
    front: FakeFront
    metrics: Metrics
    log: io.BytesIO
    addresses: Addresses
    stop: asyncio.Event

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    def events(self, name: str) -> list[dict[str, object]]:
        return [line for line in self.lines() if line["event"] == name]

    def requests(self) -> list[dict[str, object]]:
        return self.events("request")


HELD_S = 600.0
"""A `drain_delay_s` that ends when a test says so: see `held_delay`."""


def held_delay(monkeypatch) -> asyncio.Event:
    """A server that leaves waits for this event where it would wait for `HELD_S`: nothing has to be done in time."""
    real, go = asyncio.sleep, asyncio.Event()

    async def sleep(seconds, *rest):
        await (go.wait() if seconds == HELD_S else real(seconds, *rest))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return go


@asynccontextmanager
async def served(front: FakeFront | None = None, root: Path = Path(), **server: object) -> AsyncIterator[Served]:
    """The real server on this loop, on ports of its own; stopped, and drained, at the end."""
    front, metrics, log = front or FakeFront(), Metrics(), io.BytesIO()
    ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(
        serve(front, deployment(**server), metrics, make_log(log, "debug"), root=root, on_ready=ready.set_result,
              stop=stop, start=front_end.start)
    )  # fmt: skip
    await asyncio.wait((ready, task), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    said.listen("server", lambda: log.getvalue().decode("utf-8", "replace"), lambda: not task.done())
    try:
        yield Served(front, metrics, log, ready.result(), stop)
    finally:
        stop.set()
        await task


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self):
        return json.loads(self.body)


class Client:
    """A raw HTTP/1.1 connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def reply(self) -> Reply:
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            status, *lines = head.decode("latin-1").split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Reply(int(status.split()[1]), headers, body)

    async def closed(self) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Client]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError, TimeoutError):
            await writer.wait_closed()


def message(body: bytes = b"", path: str = "/v1/recommend", method: str = "POST", **headers: str | None) -> bytes:
    """A whole request. Header names with _ for -; None leaves a header out."""
    lines: dict[str, str | None] = {"host": "localhost", "content-type": "application/json"}
    lines |= {"content-length": str(len(body))} if body or method == "POST" else {}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items() if v is not None)
    return head.encode("latin-1") + b"\r\n" + body


async def ask(url: str, body: object = None, **kwargs: str | None) -> Reply:
    """One request on a connection of its own; a body that is not bytes is sent as JSON."""
    async with connect(url) as client:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        client.writer.write(message(data, **kwargs))
        await client.writer.drain()
        return await client.reply()


async def get(url: str, path: str, **headers: str | None) -> Reply:
    return await ask(url, path=path, method="GET", content_type=None, **headers)


async def until(condition, seconds: float = PATIENCE_S) -> None:
    """Wait for a condition of this process; the bound only ends a test that has failed."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition never came true"
        await asyncio.sleep(0.005)
