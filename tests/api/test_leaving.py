"""Clients that leave at any moment: the engine is told, and nothing of their requests is left behind."""

import asyncio
import gc
import io
import json
import random
import socket
import time

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from app.api.app import public
from app.api.health import Readiness
from app.api.protocol import protocol
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from app.runtime.ticket import PendingTicket
from tests.api.support import GOLDEN, FakeFront, connect, deployment, message, outcome_of, served, until

HOLD = message(json.dumps({"context": {"history": ["hold"]}, "k": 1}).encode())


async def test_a_client_that_has_asked_twice_and_leaves_ends_the_request_that_runs():
    async with served() as server:
        async with connect(server.addresses.public) as client:
            client.writer.write(HOLD + HOLD)
            await until(lambda: server.front.admitted)
        await until(lambda: server.front.cancelled)
        await until(server.requests)
    assert len(server.front.admitted) == 1  # the second had not begun
    assert [line["outcome"] for line in server.requests()] == ["cancelled"]


async def test_a_client_that_says_no_more_has_left():
    async with served() as server, connect(server.addresses.public) as client:
        client.writer.write(HOLD)
        await until(lambda: server.front.admitted)
        client.writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
        await until(lambda: server.front.cancelled)
        assert await client.closed()


async def test_a_client_that_stays_is_answered_after_another_of_its_requests_was_refused():
    async with served() as server, connect(server.addresses.public) as client:
        for body, status in (({"k": 0}, 422), (GOLDEN, 200), ({**GOLDEN, "deadline_ms": 0}, 422), (GOLDEN, 200)):
            client.writer.write(message(json.dumps(body).encode()))
            assert (await client.reply()).status == status
    assert server.front.cancelled == []


class Socket(asyncio.Transport):
    """A connection in memory."""

    closing = paused = False
    written = b""

    def write(self, data):
        assert not self.closing
        self.written += data

    def is_closing(self):
        return self.closing

    def close(self):
        self.closing = True

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False


class Crowd(FakeFront):
    """A front door that answers some turns of the loop later, and counts what is given up."""

    def __init__(self, dice):
        super().__init__()
        self.dice, self.open, self.left = dice, 0, 0

    def admit(self, request):
        ticket = PendingTicket(request.deadline, time.monotonic, self._left)
        self.open += 1
        self._later(self.dice.randrange(4), ticket, outcome_of(request))
        return ticket

    def _left(self, _):
        self.left += 1
        self.open -= 1

    def _later(self, turns, ticket, outcome):
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self._later, turns - 1, ticket, outcome)
        elif ticket.resolve(outcome):
            self.open -= 1


def connections(front, log, metrics=None):
    """Makes connections in memory to an application of this loop; the server's state, with its tasks."""
    settings = deployment(read_timeout_s=600.0)  # no timer of ours may end what these tests end
    app = public(front, settings, metrics or Metrics(), make_log(log), Readiness(front))
    config = Config(app, ws="none", access_log=False, timeout_keep_alive=600)
    kind, state = protocol(settings.server.read_timeout_s), ServerState()

    def connect():
        made, transport = kind(config=config, server_state=state, app_state={}), Socket()
        made.connection_made(transport)
        return made, transport

    return connect, state


async def test_a_body_that_came_at_once_leaves_nobody_deaf_to_its_client_s_leaving():
    front = FakeFront()
    connect, state = connections(front, io.BytesIO())
    made, transport = connect()
    body = json.dumps({"context": {"history": ["hold", *(f"item-{n:09}" for n in range(9_000))]}, "k": 1}).encode()
    head, _, rest = message(body).partition(b"\r\n\r\n")
    made.data_received(head + b"\r\n\r\n")
    for _ in range(5):
        await asyncio.sleep(0)  # whoever serves it waits for the body
    made.data_received(rest)  # more than is taken before reading is paused
    await until(lambda: front.admitted)
    assert not transport.paused
    made.connection_lost(None)
    await until(lambda: not state.tasks)
    assert front.cancelled == front.admitted


async def test_nothing_is_written_to_a_client_that_has_asked_twice_and_left(monkeypatch):
    front, written = FakeFront(), []
    connect, state = connections(front, io.BytesIO())
    made, transport = connect()
    monkeypatch.setattr(transport, "write", written.append)  # uvloop's transports would raise
    made.data_received(HOLD + HOLD)
    await until(lambda: front.admitted)
    made.connection_lost(None)
    await until(lambda: not state.tasks)
    assert front.cancelled == front.admitted
    assert written == []


async def test_the_idle_time_of_a_connection_begins_after_a_request_that_has_begun():
    front = FakeFront()
    connect, _ = connections(front, io.BytesIO())
    made, transport = connect()
    made.data_received(HOLD)
    await until(lambda: front.admitted)
    made.data_received(b"GET /li")
    front.release.set()
    await until(lambda: made.cycle.response_complete)
    assert made.timeout_keep_alive_task is None
    made.data_received(b"vez HTTP/1.1\r\n\r\n")
    await until(lambda: made.cycle.response_complete)
    assert transport.written.count(b"HTTP/1.1 200") == 2
    assert made.timeout_keep_alive_task is not None
    made.connection_lost(ConnectionResetError())
    assert made.timeout_keep_alive_task is None


@pytest.mark.parametrize("asked", [HOLD[:-5], HOLD])
async def test_a_request_that_is_cut_off_is_answered_and_given_up_wherever_it_waits(asked):
    front, log, metrics = FakeFront(), io.BytesIO(), Metrics()
    connect, state = connections(front, log, metrics)
    made, transport = connect()
    made.data_received(asked)
    await until(lambda: front.admitted or asked != HOLD)
    for _ in range(5):
        await asyncio.sleep(0)
    (task,) = state.tasks
    task.cancel()
    await until(lambda: not state.tasks)
    assert transport.written.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"draining"' in transport.written
    assert front.cancelled == front.admitted
    assert len(front.admitted) == (asked == HOLD)
    assert metrics.counters() == {"executed": 0, "cancelled": 0, "refused": 1, "failed": 0}
    (line,) = map(json.loads, log.getvalue().splitlines())
    assert (line["status"], line["outcome"], line["code"]) == (503, "refused", "draining")


async def test_ten_thousand_requests_of_which_one_in_ten_is_left_at_any_moment_leave_nothing_behind():
    dice, reported = random.Random(5), []
    front, log = Crowd(dice), io.BytesIO()
    connect, state = connections(front, log)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    asked = message(json.dumps({**GOLDEN, "deadline_ms": 600_000}).encode())
    before = len(asyncio.all_tasks())

    async def connection() -> None:
        (made, transport), leaves = connect(), False
        for _ in range(10):
            leaves = dice.random() < 0.1
            made.data_received(asked[: dice.randrange(len(asked))] if leaves and dice.random() < 0.3 else asked)
            if leaves:
                break
            await until(lambda: made.cycle.response_complete, 120)
        for _ in range(dice.randrange(6) if leaves else 0):
            await asyncio.sleep(0)
        transport.closing = True
        made.connection_lost(None if dice.random() < 0.5 else ConnectionResetError())

    async def client() -> None:
        for _ in range(60):
            await connection()

    await asyncio.gather(*(client() for _ in range(25)))
    await until(lambda: not state.tasks)
    assert state.total_requests + front.left > 8_000
    assert front.left > 100
    assert front.open == 0
    await until(lambda: len(asyncio.all_tasks()) <= before)
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []
    outcomes = [json.loads(line)["outcome"] for line in log.getvalue().splitlines()]
    assert set(outcomes) == {"ok", "cancelled"}
