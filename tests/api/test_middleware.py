import asyncio
import gc
import json
import resource
import time
import uuid

import pytest

from app.api.codec import JsonDecoder
from app.api.middleware import BodyReader, Record, request_id
from app.api.wire import body_type, to_request
from app.config import Limits
from tests.api.support import GOLDEN, ask, connect, get, message, served, until

MEGABYTE = b"x" * 2**20


async def test_a_body_with_a_large_length_is_refused_before_it_is_sent():
    async with served(max_body=1000) as server, connect(server.addresses.public) as client:
        client.writer.write(message(method="POST", content_length=str(50 * 2**20)))
        reply = await client.reply()
    assert reply.status == 413
    assert reply.json()["error"]["code"] == "body_too_large"
    assert server.requests()[0]["bytes_in"] == 0


async def test_a_chunked_body_without_end_is_refused_early_and_memory_stays_flat():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with served() as server, connect(server.addresses.public) as client:
        client.writer.write(message(method="POST", content_length=None, transfer_encoding="chunked"))
        reply = asyncio.create_task(client.reply())
        sent = 0
        while sent < 200:  # MiB; goes on after the answer, as a client that does not listen would
            client.writer.write(b"100000\r\n" + MEGABYTE + b"\r\n")
            await client.writer.drain()
            sent += 1
        assert (await reply).status == 413
        client.writer.write(b"0\r\n\r\n" + message(json.dumps(GOLDEN).encode()))
        assert (await client.reply()).status == 200
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 * 1024  # KiB
    assert server.requests()[0]["bytes_in"] <= 8 * 2**20 + 2**20


async def test_a_body_at_the_limit_is_served_and_one_byte_more_is_not():
    data = json.dumps(GOLDEN).encode()
    async with served(max_body=len(data)) as server:
        assert (await ask(server.addresses.public, data)).status == 200
        assert (await ask(server.addresses.public, data + b" ")).status == 413


async def test_silence_after_the_headers_ends_in_a_timeout_and_a_closed_connection():
    async with served(read_timeout_s=0.3) as server, connect(server.addresses.public) as client:
        client.writer.write(message(method="POST", content_length="100"))
        reply = await client.reply()
        assert await client.closed()
    assert (reply.status, reply.json()["error"]["code"]) == (408, "body_timeout")
    assert reply.headers["connection"] == "close"


async def test_a_body_that_drips_ends_in_a_timeout_too():
    async with served(read_timeout_s=0.3) as server, connect(server.addresses.public) as client:
        client.writer.write(message(method="POST", content_length="100000"))

        async def drip():
            while True:
                client.writer.write(b" ")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        reply = await client.reply()
        dripping.cancel()
    assert reply.status == 408


async def test_an_answer_may_take_longer_than_a_body():
    async with served(read_timeout_s=0.1) as server:
        pending = asyncio.create_task(ask(server.addresses.public, {"context": {"history": ["hold"]}, "k": 1}))
        await until(lambda: server.front.admitted)
        await asyncio.sleep(0.25)
        server.front.release.set()
        assert (await pending).status == 200


@pytest.mark.parametrize(
    "given", [b"", b"a" * 129, b"a\tb", b"a b", b"id\xe2\x80\xa8", b"%0a\x00", b"{}", b"a" * 65_000, "é".encode()]
)
def test_an_unsafe_request_id_is_replaced(given):
    made = request_id([(b"x-request-id", given)])
    assert uuid.UUID(made)


@pytest.mark.parametrize("given", ["a", "7f1c-9:b/c+d=@.e_f", "x" * 128])
async def test_a_safe_request_id_is_kept_in_header_answer_and_log(given):
    async with served() as server:
        reply = await ask(server.addresses.public, GOLDEN, x_request_id=given)
    assert reply.headers["x-request-id"] == given
    assert reply.json()["request_id"] == given
    assert server.requests()[0]["request_id"] == given


async def test_a_request_id_in_the_body_may_hold_anything_and_forges_nothing():
    name = 'two\nlines "quoted" \u2028'
    async with served() as server:
        reply = await ask(server.addresses.public, {**GOLDEN, "request_id": name}, x_request_id="header-id")
    assert reply.json()["request_id"] == name
    assert reply.headers["x-request-id"] == "header-id"
    assert len(server.requests()) == 1
    assert server.requests()[0]["request_id"] == name


async def test_one_line_a_request_with_what_made_the_answer_and_nothing_of_the_user():
    secret = {"user_id": "the-user", "context": {"history": ["the-item"]}, "k": 2, "exclude": ["not-that"],
              "ctx": {"city": "the-town"}, "user": {"age": 77}}  # fmt: skip
    async with served() as server:
        await ask(server.addresses.public, secret, x_request_id="r")
        await ask(server.addresses.public, {**secret, "the-key": 1})
        await get(server.addresses.public, "/livez")
    good, bad, probe = server.requests()
    assert good["event"] == "request"
    assert (good["level"], good["route"], good["status"], good["outcome"]) == ("info", "/v1/recommend", 200, "ok")
    assert good["versions"]["policy"] == "base"
    assert good["timings_ms"] == {"queue": 0.1, "context": 0.2, "decode": 0.3, "total": 0.7}
    assert (good["batch"], good["k"], good["items"], good["arms"]) == ({"requests": 1, "rows": 8}, 2, 2, {"x": "a"})
    assert (bad["status"], bad["outcome"], bad["code"]) == (422, "invalid", "invalid_request")
    assert probe["level"] == "debug"
    for word in (b"the-user", b"the-item", b"not-that", b"the-town", b"the-key", b"age"):
        assert word not in server.log.getvalue()


async def test_the_keys_of_a_line_and_their_order_are_what_they_always_were():
    head, body = (
        ["at", "level", "event", "request_id", "method", "route", "status", "outcome"],
        ["ms", "bytes_in", "bytes_out"],
    )
    async with served() as server:
        await ask(server.addresses.public, GOLDEN)
        await ask(server.addresses.public, {**GOLDEN, "k": 0})
        await ask(server.addresses.public, {"context": {"history": ["boom"]}, "k": 1})
        await get(server.addresses.public, "/nowhere")
    good, bad, fault, nowhere = server.requests()
    assert list(good) == [*head, *body, "k", "items", "versions", "timings_ms", "batch", "arms"]
    assert list(good["versions"]) == ["snapshot", "weights", "vocab", "policy", "policy_id", "contract"]
    assert list(good["timings_ms"]) == ["queue", "context", "decode", "total"]
    assert list(bad) == list(nowhere) == [*head, "code", *body]
    assert list(fault) == [*head, "code", *body, "exception"]
    assert (bad["route"], nowhere["route"]) == ("/v1/recommend", "unmatched")


async def test_each_log_line_carries_its_own_request():
    async with served() as server:
        await asyncio.gather(*(ask(server.addresses.public, {**GOLDEN, "k": n + 1}, x_request_id=f"r{n}")
                               for n in range(100)))  # fmt: skip
    assert {line["request_id"]: line["k"] for line in server.requests()} == {f"r{n}": n + 1 for n in range(100)}


async def test_random_paths_ids_and_policies_add_no_series_to_the_metrics():
    async with served(policy_override=True) as server, connect(server.addresses.public) as client:
        client.writer.write(message(json.dumps(GOLDEN).encode()))
        await client.reply()
        client.writer.write(message(b"[]"))
        await client.reply()

        def series() -> int:
            return sum(not line.startswith(b"#") for line in server.metrics.render().splitlines())

        before = series()
        for n in range(5000):
            client.writer.write(message(path=f"/scan/{n}", method="GET"))
            assert (await client.reply()).status == 404
        for n in range(200):
            data = json.dumps({**GOLDEN, "user_id": f"u{n}", "policy": f"p{n}", "request_id": f"r{n}"}).encode()
            client.writer.write(message(data))
            assert (await client.reply()).status == 200
    assert series() == before


def test_64_of_the_largest_requests_at_once_hold_the_loop_for_less_than_a_probe_may_wait():
    """A probe behind them may wait 250 ms, so one of them may take a 64th of that of the loop's time."""
    data = json.dumps({"context": {"history": [f"item-{n}" for n in range(10_000)]}, "k": 100}).encode()
    decoder = JsonDecoder(body_type(Limits(k=100)))
    spent = []
    for _ in range(10):
        start = time.thread_time()
        to_request(decoder.decode(data), request_id="r", received=0.0, deadline=None, override=False)
        spent.append(time.thread_time() - start)
    assert min(spent) < 0.25 / 64


def alive() -> int:
    return sum(type(one) in {Record, BodyReader} for one in gc.get_objects())


async def test_no_request_waits_for_a_garbage_collection_to_give_its_body_back(no_collections):
    bodies = (b"[", b'{"k": 1}', asked("full"), asked("crash"), asked("late"), asked("boom"), asked("nan"), asked("a"))
    async with served() as server:
        before = alive()
        for body in bodies:
            async with connect(server.addresses.public) as client:
                client.writer.write(message(body))
                await client.reply()
            async with connect(server.addresses.public) as client:
                client.writer.write(message(body)[:-1])
        for path in ("/nothing", "/livez", "/metrics"):
            await ask(server.addresses.public, path=path)
        await until(lambda: len(server.requests()) == 2 * len(bodies) + 3)
        await until(lambda: alive() == before)


def asked(word: str) -> bytes:
    return json.dumps({"context": {"history": [word]}, "k": 1}).encode()
