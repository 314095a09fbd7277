"""A front end whose engine is a test: what it says when nobody behind it answers, reads, or lets it accept."""

import asyncio
import io
import json
import socket
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from app.api import front_end, remote
from app.runtime.channel import HEAD
from app.runtime.messages import Accepting, Done, End, Hello, ToEngine
from tests.api.support import GOLDEN, PATIENCE_S, connect, deployment, get, message, until


class Behind:
    """The engine's end of the socket."""

    def __init__(self, ours: socket.socket, url: str, log: io.BytesIO, task: asyncio.Task[None]) -> None:
        self._socket, self.url, self.log, self.task = ours, url, log, task

    async def says(self, told: msgspec.Struct) -> None:
        body = msgspec.msgpack.encode(told)
        await asyncio.get_running_loop().sock_sendall(self._socket, len(body).to_bytes(HEAD) + body)

    async def hears(self) -> ToEngine:
        """The next message, but for counts, which come at any moment."""
        while True:
            size = int.from_bytes(await self._exactly(HEAD))
            told = msgspec.msgpack.decode(await self._exactly(size), type=ToEngine)
            if not isinstance(told, Done):
                return told

    async def _exactly(self, size: int) -> bytes:
        data = b""
        async with asyncio.timeout(PATIENCE_S):
            while len(data) < size:
                data += (more := await asyncio.get_running_loop().sock_recv(self._socket, size - len(data)))
                assert more, "the front end has ended"
        return data

    def goes(self) -> None:
        self._socket.close()

    def requests(self) -> list[dict]:
        lines = map(json.loads, self.log.getvalue().splitlines())
        return [line for line in lines if line["event"] == "request"]


@asynccontextmanager
async def running(listener: socket.socket | None = None, **server: object):
    if listener is None:
        listener = socket.create_server(("127.0.0.1", 0))
    url = "http://{}:{}".format(*listener.getsockname())
    listener.setblocking(False)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    log = io.BytesIO()
    task = asyncio.create_task(front_end.run(listener, theirs, log))
    behind = Behind(ours, url, log, task)
    try:
        await behind.says(Hello(deployment(**server), leaving=False))
        yield behind
    finally:
        ours.close()
        listener.close()
        with suppress(ValueError):
            async with asyncio.timeout(PATIENCE_S):
                await task


async def _refused(url: str) -> None:
    """Wait until nobody accepts connections any more."""
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionError):
            while True:
                async with connect(url):
                    pass


@pytest.mark.parametrize("data", [message(method="GET", path="/readyz"), message(json.dumps(GOLDEN).encode())])
async def test_who_waits_for_the_engine_when_time_is_up_is_told_that_the_server_leaves(data):
    async with running() as behind:
        assert isinstance(await behind.hears(), Accepting)
        async with connect(behind.url) as client:
            client.writer.write(data)
            await behind.hears()
            await behind.says(End(0.05))
            reply = await client.reply()
        assert (reply.status, reply.json()["error"]["code"]) == (503, "draining")
        await until(behind.requests)
        assert [line["request_id"] for line in behind.requests()] == [reply.headers["x-request-id"]]


async def test_an_engine_that_does_not_read_refuses_what_comes_meanwhile(monkeypatch):
    monkeypatch.setattr(remote, "STUCK_S", 0.05)
    large = {"context": {"tokens": [2**31 - 1] * 2_000_000}, "k": 1}  # ten megabytes: more than the socket takes
    async with running(max_body=2**25) as behind:
        assert isinstance(await behind.hears(), Accepting)
        async with connect(behind.url) as first, connect(behind.url) as second:
            first.writer.write(message(json.dumps(large).encode()))
            reply = None
            while reply is None or reply.status == 504:  # the large one is not written yet
                second.writer.write(message(json.dumps({**GOLDEN, "deadline_ms": 50}).encode()))
                reply = await second.reply()
        assert (reply.status, reply.json()["error"]["code"]) == (503, "queue_full")
        assert reply.headers["retry-after"] == "1"
        probe = await get(behind.url, "/livez", x_request_id="probe")  # nor is anything kept of other routes
        assert (probe.status, probe.json()["error"]["code"]) == (503, "queue_full")
        assert (probe.headers["retry-after"], probe.headers["x-request-id"]) == ("1", "probe")


async def test_when_the_engine_goes_while_the_server_leaves_nobody_is_waited_for():
    async with running(read_timeout_s=600.0) as behind:
        assert isinstance(await behind.hears(), Accepting)
        async with connect(behind.url) as half, connect(behind.url) as client:
            half.writer.write(message(json.dumps(GOLDEN).encode())[:-1])
            client.writer.write(message(json.dumps(GOLDEN).encode()))
            await behind.hears()
            await behind.says(End(600.0))
            await _refused(behind.url)
            behind.goes()
            reply = await client.reply()
            assert (reply.status, reply.json()["error"]["code"]) == (503, "draining")
            async with asyncio.timeout(PATIENCE_S):
                await behind.task


async def test_a_front_end_that_cannot_accept_ends_and_says_nothing_of_accepting():
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 0))
    async with running(datagrams) as behind:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ValueError, match="Stream"):
                await behind.task
        with pytest.raises(AssertionError, match="has ended"):
            await behind.hears()
