import asyncio
import json

import pytest

from app.api.protocol import MAX_WAITING
from tests.api.support import GOLDEN, ask, connect, message, served, until


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET http:// HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST /v1/recommend HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n", 431),
        (b"GET /livez HTTP/1.1\r\nx: " + b"a" * 100_000, 431),
        (b"GET /livez HTTP/1.1\r\n" + b"x: y\r\n" * 20_000, 431),
        (b"GET /livez HTTP/1.1\r\n" + b"x: y\r\n" * 11_000 + b"\r\n", 431),  # a whole head, in one read
        (b"GET /" + b"a" * 66_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
        (b"POST /livez HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 20_000 + b"\r\n", 431),
    ],
)
async def test_what_is_hardly_http_gets_an_error_in_our_shape(raw, status):
    async with served() as server:
        async with connect(server.addresses.public) as client:
            client.writer.write(raw)
            reply = await client.reply()
            assert reply.status == status
            assert set(reply.json()["error"]) == {"code", "message", "retryable"}
        assert (await ask(server.addresses.public, GOLDEN)).status == 200


async def test_a_request_head_that_never_ends_is_cut():
    async with served(read_timeout_s=0.2) as server:
        for start in (b"", b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\n"):
            async with connect(server.addresses.public) as client:
                client.writer.write(start)
                reply = await client.reply()
                assert (reply.status, reply.json()["error"]["code"]) == (408, "head_timeout")
                assert await client.closed()


async def test_a_keep_alive_client_may_pause_longer_than_a_head_may_take():
    async with served(read_timeout_s=0.2) as server, connect(server.addresses.public) as client:
        for _ in range(3):
            client.writer.write(message(json.dumps(GOLDEN).encode()))
            assert (await client.reply()).status == 200
            await asyncio.sleep(0.3)


PADDED = message(path="/livez", method="GET", x_padding="x" * 1_000)


async def test_many_requests_in_one_read_are_no_large_head_wherever_it_ends():
    async with served() as server, connect(server.addresses.public) as client:
        client.writer.write(PADDED * MAX_WAITING + PADDED[:500])  # a read of 100 KB, and the beginning of a head
        assert (await client.reply()).status == 200
        client.writer.write(PADDED[500:])
        for _ in range(MAX_WAITING):
            assert (await client.reply()).status == 200


async def test_a_body_and_the_beginning_of_the_next_head_in_one_read_are_no_large_head():
    body = json.dumps({"context": {"tokens": [1] * 40_000}, "k": 1}).encode()
    async with served() as server, connect(server.addresses.public) as client:
        client.writer.write(message(body) + PADDED[:500])
        assert (await client.reply()).status == 200
        client.writer.write(PADDED[500:])
        assert (await client.reply()).status == 200


async def test_only_so_many_requests_wait_on_a_connection():
    hold = message(json.dumps({"context": {"history": ["hold"]}, "k": 1}).encode())
    async with served() as server:
        async with connect(server.addresses.public) as client:
            client.writer.write(hold + b"GET /livez HTTP/1.1\r\n\r\n" * 2 * MAX_WAITING)
            reply = await client.reply()
            assert (reply.status, reply.json()["error"]["code"]) == (400, "too_many_waiting")
            assert await client.closed()
        await until(server.requests)
        assert [line["outcome"] for line in server.requests()] == ["cancelled"]


@pytest.mark.parametrize(
    ("request_", "rest"),
    [
        (message(path="/livez", method="GET"), b"\r\n"),
        (message(path="/livez", content_length="100"), b"x"),
        (message(path="/livez", content_length=None, transfer_encoding="chunked"), b"5\r\nhe"),
        (message(content_length=str(2**31)), b"x"),
    ],
)
async def test_what_comes_after_an_answer_and_begins_no_request_holds_no_connection(request_, rest):
    async with served(keep_alive_s=0.2) as server, connect(server.addresses.public) as client:
        client.writer.write(request_)
        assert (await client.reply()).status in {200, 405, 413}
        client.writer.write(rest)
        assert await client.closed()


async def test_a_trailer_is_no_header():
    async with served() as server, connect(server.addresses.public) as client:
        body = json.dumps(GOLDEN).encode()
        head = b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        client.writer.write(head + b"%x\r\n%s\r\n0\r\nx-request-id: smuggled\r\n\r\n" % (len(body), body))
        reply = await client.reply()
        assert (reply.status, reply.headers["x-request-id"]) == (200, reply.json()["request_id"])
        assert reply.json()["request_id"] != "smuggled"


SMUGGLES = {  # what two parsers could take for different messages
    "both lengths": b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, the other way": b"transfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n0\r\n\r\n",
    "two lengths": b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
    "two lengths that differ": b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
    "a list of lengths": b"content-length: 2, 2\r\n\r\n{}",
    "a signed length": b"content-length: +2\r\n\r\n{}",
    "a length in hex": b"content-length: 0x2\r\n\r\n{}",
    "an empty length": b"content-length:\r\n\r\n",
    "a space before the colon": b"content-length : 2\r\n\r\n{}",
    "an unknown coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a control character": b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a NUL": b"transfer-encoding: chunked\x00\r\n\r\n0\r\n\r\n",
    "chunked twice": b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunked not last": b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "two codings": b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
    "a folded line": b"x: a\r\n content-length: 2\r\n\r\n",
    "a bare line feed": b"x: a\ncontent-length: 0\r\n\r\n",
    "a bare carriage return": b"x: a\rcontent-length: 2\r\n\r\n",
    "a name with a space": b"x y: a\r\ncontent-length: 0\r\n\r\n",
    "a chunk's extension with a line feed": b"transfer-encoding: chunked\r\n\r\n2;\n{}\r\n0\r\n\r\n",
    "a negative chunk": b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    "a chunk in 0x": b"transfer-encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
    "a chunk's size beyond 64 bits": b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    "a chunk that is longer than it says": b"transfer-encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n",
}
SECOND = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize(("port", "path"), [("public", "/v1/recommend"), ("admin", "/admin/v1/snapshots:unpin")])
async def test_what_two_parsers_could_read_differently_ends_the_connection(port, path):
    async with served() as server:
        for name, rest in SMUGGLES.items():
            async with connect(getattr(server.addresses, port)) as client:
                client.writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\n".encode() + rest + SECOND)
                reply = await client.reply()
                assert (reply.status, reply.json()["error"]["code"]) == (400, "malformed_http"), name
                assert await client.closed(), name
        assert server.front.admitted == []
        assert [line for line in server.requests() if line["route"] == "/livez"] == []


async def test_a_coding_of_the_way_that_is_more_than_chunks_is_no_body_of_ours():
    async with served() as server, connect(server.addresses.public) as client:
        head = b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n"
        client.writer.write(head + b"2\r\n{}\r\n0\r\n\r\n")
        assert (await client.reply()).status == 415


UPGRADES = ({"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"},
            {"connection": "upgrade", "upgrade": "websocket"})  # fmt: skip


@pytest.mark.parametrize("headers", UPGRADES)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("pieces", [1, 2, 0])  # in one write, head and body, byte by byte
async def test_an_offer_of_another_protocol_is_passed_over_and_a_body_is_a_body(headers, chunked, pieces):
    body = json.dumps(GOLDEN).encode()
    whole = message(body, **headers)
    if chunked:
        coded = b"%x\r\n%s\r\n0\r\nx: trailer\r\n\r\n" % (len(body), body)
        whole = message(body, **headers, content_length=None, transfer_encoding="chunked").replace(body, coded)
    head, end, rest = whole.partition(b"\r\n\r\n")
    parts = {1: [whole], 2: [head + end, rest], 0: [whole[n : n + 1] for n in range(len(whole))]}[pieces]
    async with served() as server, connect(server.addresses.public) as client:
        for part in [*parts, message(path="/livez", method="GET", **headers), message(body), SECOND]:
            client.writer.write(part)
            await client.writer.drain()
            await asyncio.sleep(0)
        assert [(await client.reply()).status for _ in range(4)] == [200] * 4
        assert [line["route"] for line in server.requests()] == ["/v1/recommend", "/livez"] * 2
        assert [request.k for request in server.front.admitted] == [GOLDEN["k"]] * 2


async def test_a_body_that_looks_like_a_request_is_none_whatever_its_head_offers():
    async with served() as server, connect(server.addresses.public) as client:
        client.writer.write(message(SECOND, **UPGRADES[0]))
        reply = await client.reply()
        assert (reply.status, reply.json()["error"]["code"]) == (400, "malformed_body")
        client.writer.write(message(b"", **UPGRADES[0]))  # a length of 0 is no body
        assert (await client.reply()).status == 400
        client.writer.write(message(json.dumps(GOLDEN).encode()))
        assert (await client.reply()).status == 200
        assert {line["route"] for line in server.requests()} == {"/v1/recommend"}
