"""The events as a list and as a stream: nothing is lost, nothing is kept for a client, and there is an end to them."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from app.api.admin_events import MAX_STREAMS, Streams
from app.api.health import Readiness
from app.runtime.ledger import EVENTS, Ledger
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from tests.api.support import PATIENCE_S, FakeFront, connect, get, message
from tests.live_support import live_server
from tests.runtime.test_cutover import takedown, weights, world

STREAM = {"accept": "text/event-stream", "content_type": None}


@pytest.fixture(name="shared")
async def one_server(tmp_path):
    async with live_server(world(tmp_path)) as server:
        yield server


class Follower:
    """A client of the stream."""

    def __init__(self, client):
        self.client, self.left = client, []

    async def head(self):
        return (await self.client.reader.readuntil(b"\r\n\r\n")).decode().lower()

    async def next(self):
        """The fields of the next event, comments aside."""
        while not self.left:
            async with asyncio.timeout(PATIENCE_S):
                size = int(await self.client.reader.readline(), 16)
                text = (await self.client.reader.readexactly(size + 2)).decode()
            for block in filter(None, text.strip().split("\n\n")):
                fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
                self.left += [fields] if "event" in fields else []
        return self.left.pop(0)

    async def until(self, event, **facts):
        """Read on to an event with these facts; all on the way."""
        seen = []
        while True:
            seen.append(await self.next())
            if seen[-1]["event"] == event and facts.items() <= json.loads(seen[-1]["data"]).items():
                return seen


@asynccontextmanager
async def following(server, **headers):
    async with connect(server.admin) as client:
        client.writer.write(message(path="/admin/v1/events", method="GET", **STREAM, **headers))
        follower = Follower(client)
        head = await follower.head()
        assert head.startswith("http/1.1 200"), head
        assert "content-type: text/event-stream" in head
        yield follower


async def test_a_stream_goes_on_where_the_last_one_ended(shared):
    async with following(shared) as follower:
        seen = await follower.until("artifact", kind="vocab", state="active")
        takedown(shared.root, "t1", ["a1"])
        seen += await follower.until("artifact", kind="takedowns", state="active")
    numbers = [json.loads(one["data"])["number"] for one in seen]
    assert numbers == list(range(1, len(numbers) + 1))
    assert all(one["id"] == f"{shared.live.boot}-{number}" for one, number in zip(seen, numbers, strict=True))
    weights(shared.root, "v2", 5)
    await shared.settles(lambda status: status["active"]["weights"]["version"] == "v2")
    async with following(shared, last_event_id=seen[-1]["id"]) as follower:
        more = await follower.until("artifact", kind="weights", version="v2", state="active")
    assert json.loads(more[0]["data"])["number"] == numbers[-1] + 1


@pytest.mark.parametrize("last", ["another-7", "nonsense", "7", "BOOT-99999", "BOOT--1"])
async def test_a_client_of_another_process_is_told_and_gets_everything(shared, last):
    last = last.replace("BOOT", shared.live.boot)
    async with following(shared, last_event_id=last) as follower:
        assert (await follower.next())["event"] == "restarted"
        assert json.loads((await follower.next())["data"])["number"] == 1


async def test_streams_are_counted_and_end_with_their_clients(shared):
    clients = [following(shared) for _ in range(MAX_STREAMS)]
    for client in clients:
        await client.__aenter__()
    refused = await get(shared.admin, "/admin/v1/events", accept="text/event-stream")
    assert (refused.status, refused.json()["error"]["code"]) == (503, "too_many_streams")
    assert refused.headers["retry-after"] == "5"
    assert (await get(shared.admin, "/admin/v1/events")).status == 200
    await clients[0].__aexit__(None, None, None)

    async def room(server):  # a closed stream does not count for ever
        async with connect(server.admin) as client:
            client.writer.write(message(path="/admin/v1/events", method="GET", **STREAM))
            return b" 200 " in await client.reader.readline()

    await shared.sees(room)
    for client in clients[1:]:
        await client.__aexit__(None, None, None)


async def test_a_stream_ends_when_the_server_leaves_and_head_has_no_stream(tmp_path):
    async with live_server(world(tmp_path)) as server:
        async with connect(server.admin) as client:
            client.writer.write(message(path="/admin/v1/events", method="HEAD", **STREAM))
            assert b" 200 " in await client.reader.readuntil(b"\r\n\r\n")
        stream = following(server)
        follower = await stream.__aenter__()
    assert (await follower.client.reader.read()).endswith(b"\r\n0\r\n\r\n")  # a whole answer
    await stream.__aexit__(None, None, None)


async def test_the_list_can_be_cut(shared):
    whole = (await get(shared.admin, "/admin/v1/events")).json()
    assert whole["boot"] == shared.live.boot
    assert len(whole["events"]) >= 2
    first = (await get(shared.admin, "/admin/v1/events?limit=1")).json()["events"]
    assert first == whole["events"][:1]
    rest = (await get(shared.admin, f"/admin/v1/events?after={first[0]['number']}")).json()["events"]
    assert rest == whole["events"][1:]
    for wrong in ("after=-1", "after=x", "limit=501", "limit=nan"):
        assert (await get(shared.admin, f"/admin/v1/events?{wrong}")).status == 422, wrong


class Told:
    """Only the events of a Control."""

    boot = "b"

    def __init__(self, log):
        self.ledger = Ledger(make_log(log), Metrics())
        self.events, self.told = self.ledger.events, self.ledger.told


async def test_a_slow_client_is_told_what_it_missed_and_nothing_is_kept_for_it(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        control = Told(log)
        readiness = Readiness(FakeFront())
        chunks = Streams(control, readiness).open("", 0).body_iterator
        control.ledger.note("first")
        await anext(chunks)
        assert b"event: first" in await anext(chunks)
        for _ in range(EVENTS + 200):  # while the client reads nothing
            control.ledger.note("later")
        late = await anext(chunks)
        assert late.startswith(b'event: missed\ndata: {"events": 200}\n\n')
        assert f"id: b-{202}\n".encode() in late
        got = late.count(b"event: later")
        while got < EVENTS:
            chunk = await anext(chunks)
            assert len(chunk) < 20_000
            got += chunk.count(b"event: later")
        assert got == EVENTS
        waiting = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0)
        readiness.leave()
        with pytest.raises(StopAsyncIteration):
            await waiting
