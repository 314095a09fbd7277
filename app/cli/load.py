"""An open-loop load generator: requests leave when a Poisson process says so, whether or not earlier ones came back.

Latency counts from the intended time of sending, so a server that stalls is charged for everybody who had to wait
(closed loops and "time since the socket was free" hide exactly that).
"""

from __future__ import annotations

import asyncio
import random
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import httptools
import msgspec

PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


class Target(NamedTuple):
    """Where to send: parts of a URL."""

    host: str
    port: int
    path: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Target:
        """`http(s)://host[:port][/path]`; without a path, `/v1/recommend`. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"expected http://host:port, got {url!r}")
        tls = parts.scheme == "https"
        path = parts.path if parts.path not in {"", "/"} else "/v1/recommend"
        return cls(parts.hostname, parts.port or (443 if tls else 80), path, tls)

    def message(self, body: bytes) -> bytes:
        """The bytes of one request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: {host}:{self.port}\r\ncontent-type: application/json\r\n"
            f"accept: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Shot(NamedTuple):
    """One request on its way. intended, sent: seconds of `time.monotonic` (uvloop's own clock counts milliseconds)."""

    intended: float
    sent: float


class _Error(msgspec.Struct):
    code: str = "unknown"


class Seen(msgspec.Struct):
    """What the generator reads of an answer."""

    versions: dict[str, str] = {}
    error: _Error | None = None


class Result(msgspec.Struct, kw_only=True):
    """What was measured. latency_ms is of answered requests (status 200), from the intended time; late_ms is the
    generator's own delay: where its p99 is not small against the latencies, the machine was too slow to ask."""

    url: str
    rate: float
    seconds: float
    seed: int
    sent: int
    answered: int
    offered_per_s: float
    achieved_per_s: float
    latency_ms: dict[str, float]
    late_ms: dict[str, float]
    statuses: dict[str, int]
    errors: dict[str, int]
    versions: dict[str, dict[str, int]]
    connections: int


class Connection(asyncio.Protocol):
    """One keep-alive connection; at most one request on it at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._shot: Shot | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready for its first request."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are no subclass

    def fire(self, message: bytes, intended: float) -> None:
        """Send one request."""
        assert self._transport is not None
        loop = self._load.loop
        self._shot = Shot(intended, time.monotonic())
        self._timer = loop.call_later(self._load.timeout_s, self._end, "timeout")
        self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end("not_http")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  asyncio's signature
        """A request that was on the way has failed."""
        self._load.lost(self)
        self._transport = None
        self._end("connection_lost")

    def on_body(self, data: bytes) -> None:
        """A part of the answer's body."""
        self._body += data

    def on_message_complete(self) -> None:
        """The answer is whole."""
        shot, body, self._body = self._shot, self._body, b""
        self._clear()
        if shot is None:
            return
        self._load.answered(shot, self._parser.get_status_code(), body)
        keep = self._parser.should_keep_alive()
        self._parser = httptools.HttpResponseParser(self)
        if keep:
            self._load.free(self)
        elif self._transport is not None:
            self._transport.close()

    def _end(self, code: str) -> None:
        if self._shot is not None:
            self._clear()
            self._load.failed(code)
        self.close()

    def close(self) -> None:
        """Close the socket."""
        if self._transport is not None:
            self._transport.abort()

    def _clear(self) -> None:
        self._shot = None
        if self._timer is not None:
            self._timer.cancel()


class Load:
    """One run: fires at the given times, collects what comes back. Event loop only, but for the pacer's thread."""

    def __init__(self, target: Target, bodies: Sequence[bytes], *, timeout_s: float, connections: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.timeout_s = timeout_s
        self.latencies: list[float] = []
        self.lates: list[float] = []
        self.statuses: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.versions: dict[str, Counter[str]] = {}
        self.opened = 0
        self._target = target
        self._messages = [target.message(body) for body in bodies]
        self._most = connections
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[bytes, float]] = deque()
        self._tls = ssl.create_default_context() if target.tls else None
        self._decoder = msgspec.json.Decoder(Seen)
        self.outstanding = 0
        self.sent = 0

    def fire_until(self, times: Sequence[float], now: float) -> None:
        """Send everything that is due by `now`."""
        while self.sent < len(times) and times[self.sent] <= now:
            message = self._messages[self.sent % len(self._messages)]
            self._fire(message, times[self.sent])
            self.sent += 1
            self.outstanding += 1

    def _fire(self, message: bytes, intended: float) -> None:
        if self._idle:
            self._idle.pop().fire(message, intended)
            return
        self._waiting.append((message, intended))
        self._grow()

    def _grow(self) -> None:
        """Open a connection where a request waits for one and there is room."""
        if len(self._waiting) > len(self._opening) and len(self._open) + len(self._opening) < self._most:
            task = self.loop.create_task(self._connect())
            self._opening.add(task)
            task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled():
            task.result()
        self._grow()

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                _, connection = await self.loop.create_connection(
                    lambda: Connection(self), self._target.host, self._target.port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            if self._waiting:
                self._waiting.popleft()
                self.failed("connect_timeout" if isinstance(error, TimeoutError) else "connect_failed")
            return
        self._open.add(connection)
        self.opened += 1
        self.free(connection)

    def free(self, connection: Connection) -> None:
        """A connection can take the next request."""
        if self._waiting:
            connection.fire(*self._waiting.popleft())
        else:
            self._idle.append(connection)

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._grow()

    def answered(self, shot: Shot, status: int, body: bytes) -> None:
        """An answer came, of any status."""
        self.outstanding -= 1
        self.lates.append(shot.sent - shot.intended)
        self.statuses[str(status)] += 1
        try:
            seen = self._decoder.decode(body)
        except msgspec.DecodeError:
            self.errors["not_json"] += 1
            return
        if status != 200:
            self.errors[seen.error.code if seen.error else "unknown"] += 1
            return
        self.latencies.append(time.monotonic() - shot.intended)
        for kind, version in seen.versions.items():
            self.versions.setdefault(kind, Counter())[version] += 1

    def failed(self, code: str) -> None:
        """No answer will come."""
        self.outstanding -= 1
        self.errors[code] += 1

    def close(self) -> None:
        """Drop every connection."""
        for connection in list(self._open):
            connection.close()


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of a Poisson process of `rate` a second, in [0, seconds)."""
    chance, now = random.Random(seed), 0.0  # noqa: S311  a load pattern, not a secret
    times: list[float] = []
    while True:
        now += chance.expovariate(rate)
        if now >= seconds:
            return times
        times.append(now)


class Pacer(threading.Thread):
    """Wakes the loop at each arrival. A thread, because event loops sleep in whole milliseconds."""

    def __init__(self, times: Sequence[float], wake: Callable[[], object]) -> None:
        super().__init__(daemon=True, name="pacer")
        self._times, self._wake = times, wake
        self.stopped = False

    def run(self) -> None:
        """Sleep to each time, in `time.monotonic` seconds, and wake the loop once for all that are due by then."""
        for when in self._times:
            left = when - time.monotonic()
            if left > 0:
                time.sleep(left)
            if self.stopped:
                return
            if left > 0 or when is self._times[-1]:
                self._wake()


async def run_load(
    target: Target,
    bodies: Sequence[bytes],
    *,
    url: str,
    rate: float,
    seconds: float,
    seed: int,
    timeout_s: float,
    connections: int,
    tick: Callable[[int], None] = lambda _: None,
) -> Result:
    """Send `bodies` in turn at `rate` a second for `seconds`, wait for what is out, and say what was seen.

    tick  called ten times a second with the number of requests sent
    """
    load = Load(target, bodies, timeout_s=timeout_s, connections=connections)
    loop = load.loop
    start = time.monotonic() + 0.05
    times = [start + gap for gap in arrivals(rate, seconds, seed)]
    fire = partial(_fire_due, load, times)

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended: everything was sent
            loop.call_soon_threadsafe(fire)

    pacer = Pacer(times, wake)
    pacer.start()
    try:
        while load.sent < len(times) or load.outstanding > 0:
            await asyncio.sleep(0.1)
            load.fire_until(times, time.monotonic())
            tick(load.sent)
    finally:
        pacer.stopped = True
        load.close()
    return Result(
        url=url,
        rate=rate,
        seconds=seconds,
        seed=seed,
        sent=load.sent,
        answered=len(load.latencies),
        offered_per_s=round(load.sent / seconds, 3),
        achieved_per_s=round(len(load.latencies) / max(seconds, time.monotonic() - start), 3),
        latency_ms=summary(load.latencies),
        late_ms=summary(load.lates),
        statuses=dict(load.statuses),
        errors=dict(load.errors),
        versions={kind: dict(counts) for kind, counts in load.versions.items()},
        connections=load.opened,
    )


def _fire_due(load: Load, times: Sequence[float]) -> None:
    load.fire_until(times, time.monotonic())


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Exact percentiles, mean and maximum in milliseconds; {} for no values. A percentile is a measured value: the
    smallest with at least that share of the values at or below it."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    found = {name: ordered[max(0, -int(-share * len(ordered) // 1) - 1)] for name, share in PERCENTILES.items()}
    found |= {"mean": sum(ordered) / len(ordered), "max": ordered[-1]}
    return {name: round(value * 1e3, 3) for name, value in found.items()}
