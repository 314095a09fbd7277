import asyncio
import io
import json
import time

import msgspec
import pytest

from app.api.protocol import Client
from app.api.recommend import outcome_or_cancel
from app.errors import Cancelled, Expired
from app.runtime.ticket import PendingTicket
from tests.api.support import GOLDEN, PATIENCE_S, FakeFront, ask, connect, message, outcome_of, served, until
from tests.api.test_leaving import HOLD, connections

CODECS = {
    "json": ("application/json", msgspec.json.encode, msgspec.json.decode),
    "msgpack": ("application/msgpack", msgspec.msgpack.encode, msgspec.msgpack.decode),
}


@pytest.fixture(params=CODECS)
def codec(request):
    return CODECS[request.param]


async def test_an_answer_has_the_documented_shape_in_both_codecs(codec):
    kind, encode, decode = codec
    async with served() as server:
        body = {**GOLDEN, "request_id": "r-1", "seed": 7, "exclude": ["z"], "ctx": {"a": "b"}, "user": {"age": 3}}
        reply = await ask(server.addresses.public, encode(body), content_type=kind, accept=kind)
    assert reply.status == 200
    assert reply.headers["content-type"] == kind
    answer = decode(reply.body)
    assert answer == {
        "request_id": "r-1",
        "items": [{"id": f"a-{n}", "score": -0.5 * n, "sid": [n, n + 1, n + 2]} for n in range(3)],
        "status": "ok",
        "versions": {"snapshot": "snap-1", "weights": "w1", "vocab": "v1", "policy": "base", "policy_id": "pid-1",
                     "contract": "c-1"},
        "experiments": [{"layer": "l", "name": "x", "arm": "a", "reason": "split"}],
        "seed": 7,
        "timings_ms": {"queue": 0.1, "context": 0.2, "decode": 0.3, "total": 0.7},
        "batch": {"requests": 1, "rows": 8},
    }  # fmt: skip
    asked = server.front.admitted[0]
    assert (asked.context.ids, asked.k, asked.seed, asked.exclude) == (("a", "b"), 3, 7, ("z",))
    assert (asked.ctx, asked.user, asked.policy, asked.user_id) == ({"a": "b"}, {"age": 3.0}, None, None)


async def test_errors_come_in_the_codec_that_accept_names(codec):
    kind, encode, decode = codec
    async with served() as server:
        reply = await ask(server.addresses.public, encode({"k": 1}), content_type=kind, accept=kind)
    assert reply.status == 422
    assert reply.headers["content-type"] == kind
    error = decode(reply.body)["error"]
    assert (error["code"], error["path"], error["retryable"]) == ("invalid_request", "$.context", False)


@pytest.mark.parametrize(
    ("word", "status", "code", "retry"),
    [
        ("full", 503, "queue_full", "1"),
        ("late", 504, "deadline_exceeded", None),
        ("model", 503, "model_output", None),
        ("unpolicy", 422, "invalid_request", None),
        ("dropped", 503, "draining", "1"),
        ("fault", 500, "internal", None),
        ("boom", 500, "internal", None),
        ("crash", 500, "internal", None),
        ("nan", 500, "internal", None),
    ],
)
async def test_each_end_of_a_request_has_its_status(word, status, code, retry):
    async with served() as server:
        reply = await ask(server.addresses.public, {"context": {"history": [word]}, "k": 1})
        good = await ask(server.addresses.public, GOLDEN)
    assert reply.status == status
    assert reply.json()["error"]["code"] == code
    assert reply.headers.get("retry-after") == retry
    assert good.status == 200
    tracebacks = [line for line in server.lines() if "exception" in line]
    assert len(tracebacks) == (status == 500)
    assert b"secret-content" not in reply.body
    if code == "queue_full":
        assert 'widebeam_shed_total{reason="queue_full"} 1.0' in server.metrics.render().decode()


async def test_the_smallest_of_all_budgets_is_the_deadline():
    async with served() as server:
        url = server.addresses.public
        await ask(url, {**GOLDEN, "deadline_ms": 900}, x_request_timeout_ms="700",
                  x_envoy_expected_rq_timeout_ms="800")  # fmt: skip
        await ask(url, {**GOLDEN, "deadline_ms": 300}, x_request_timeout_ms="700")
        await ask(url, GOLDEN, x_envoy_expected_rq_timeout_ms="50")
        await ask(url, GOLDEN)
    left = [None if r.deadline is None else round(r.deadline - r.received, 6) for r in server.front.admitted]
    assert left == [0.7, 0.3, 0.05, None]


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "", "999999999999", "\xb2"])
async def test_a_timeout_header_that_is_no_number_is_refused_by_name(value):
    async with served() as server:
        reply = await ask(server.addresses.public, GOLDEN, x_request_timeout_ms=value)
    assert reply.status == 422
    assert reply.json()["error"]["path"] == "header x-request-timeout-ms"


async def test_a_client_that_leaves_cancels_its_ticket_at_once():
    async with served() as server:
        async with connect(server.addresses.public) as client:
            client.writer.write(message(json.dumps({"context": {"history": ["hold"]}, "k": 1}).encode()))
            await until(lambda: server.front.admitted)
        await asyncio.wait_for(server.front.cancel_seen.wait(), PATIENCE_S)
        await until(server.requests)
    assert len(server.front.cancelled) == 1
    line = server.requests()[0]
    assert (line["outcome"], line["code"]) == ("cancelled", "cancelled")
    assert server.metrics.counters()["cancelled"] == 1


async def test_a_storm_of_leaving_clients_leaves_the_server_as_it_was():
    async with served() as server:

        async def leave() -> None:
            async with connect(server.addresses.public) as client:
                client.writer.write(message(json.dumps({"context": {"history": ["hold"]}, "k": 1}).encode()))
                await client.writer.drain()

        before = len(asyncio.all_tasks())
        await asyncio.gather(*(leave() for _ in range(200)))
        await until(lambda: len(server.requests()) == 200)
        assert len(server.front.cancelled) == len(server.front.admitted)
        replies = await asyncio.gather(*(ask(server.addresses.public, GOLDEN) for _ in range(50)))
        await until(lambda: len(asyncio.all_tasks()) <= before)
    assert [reply.status for reply in replies] == [200] * 50


async def test_a_body_that_stops_half_way_reaches_nobody():
    async with served() as server:
        async with connect(server.addresses.public) as client:
            whole = message(json.dumps(GOLDEN).encode())
            client.writer.write(whole[:-10])
            await client.writer.drain()
            good = await ask(server.addresses.public, GOLDEN)
        await until(lambda: len(server.requests()) == 2)
    assert good.status == 200
    assert len(server.front.admitted) == 1


async def test_two_clients_with_one_request_id_each_get_their_own_answer():
    async with served() as server:
        bodies = [{"context": {"history": [f"u{n}"]}, "k": 1, "request_id": "same"} for n in range(100)]
        replies = await asyncio.gather(*(ask(server.addresses.public, b, x_request_id="same") for b in bodies))
    assert [reply.json()["items"][0]["id"] for reply in replies] == [f"u{n}-0" for n in range(100)]
    assert {reply.headers["x-request-id"] for reply in replies} == {"same"}


async def test_a_wait_that_is_cancelled_gives_its_ticket_up():
    left = []
    ticket = PendingTicket(time.monotonic() + 60, time.monotonic, left.append)
    waiting = asyncio.create_task(outcome_or_cancel(ticket, Client()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert left == [ticket]
    assert isinstance(ticket.gone(0.0), Cancelled)
    assert not ticket.resolve(Expired("the deadline passed"))


async def test_an_answer_that_is_ready_wins_over_a_client_that_leaves():
    client = Client()
    ticket = PendingTicket(None, time.monotonic, lambda _: None)
    waiting = asyncio.create_task(outcome_or_cancel(ticket, client))
    await asyncio.sleep(0)
    ticket.resolve(outcome_of(await _request("a")))
    client.leave()  # in the same turn
    assert (await waiting).items[0].id == "a-0"
    assert ticket.gone(0.0) is None


@pytest.mark.parametrize("before", [True, False])
async def test_a_client_that_leaves_while_it_waits_or_before_that_ends_the_wait(before):
    client, left = Client(), []
    if before:
        client.leave()
    ticket = PendingTicket(None, time.monotonic, left.append)
    waiting = asyncio.create_task(outcome_or_cancel(ticket, client))
    await asyncio.sleep(0)
    if not before:
        client.leave()
    with pytest.raises(Cancelled):
        await asyncio.wait_for(waiting, 20)
    assert left == [ticket]


async def test_a_client_that_leaves_after_its_answer_ends_nobody_else_s_request():
    client, left = Client(), []
    first, second = (PendingTicket(None, time.monotonic, left.append) for _ in range(2))
    first.resolve(outcome_of(await _request("a")))
    await outcome_or_cancel(first, client)
    client.leave()
    second.resolve(outcome_of(await _request("b")))
    assert (await second.outcome()).items[0].id == "b-0"
    assert left == []


async def _request(word: str):
    from app.core import HistoryIds, Request

    return Request("r", HistoryIds((word,)), 1)


async def test_a_request_s_time_begins_with_its_last_byte_whatever_the_loop_does_after_it():
    front = FakeFront()
    connect_, state = connections(front, io.BytesIO())
    made, _ = connect_()
    data = message(json.dumps({**GOLDEN, "deadline_ms": 5_000}).encode())
    made.data_received(data[:-1])
    for _ in range(5):
        await asyncio.sleep(0)  # whoever serves it waits for the body
    before = time.monotonic()
    made.data_received(data[-1:])
    after = time.monotonic()
    while time.monotonic() < after + 0.01:
        pass  # a turn that takes long
    await until(lambda: front.admitted and not state.tasks)
    [asked] = front.admitted
    assert before <= asked.received <= after
    assert asked.deadline == pytest.approx(asked.received + 5.0)
    made.connection_lost(None)


async def test_the_time_that_a_request_waits_for_the_one_before_it_is_its_own():
    front = FakeFront()
    connect_, state = connections(front, io.BytesIO())
    made, _ = connect_()
    made.data_received(HOLD)
    before = time.monotonic()
    made.data_received(message(json.dumps(GOLDEN).encode()))
    after = time.monotonic()
    await until(lambda: front.admitted)
    front.release.set()
    await until(lambda: len(front.admitted) == 2 and not state.tasks)
    assert before <= front.admitted[1].received <= after
    made.connection_lost(None)
