import asyncio
import json

import pytest

from tests.api.support import GOLDEN, ask, connect, message, served


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


async def test_many_small_requests_in_one_read_are_no_large_head():
    async with served() as server, connect(server.addresses.public) as client:
        client.writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n" * 3000)
        for _ in range(3000):
            assert (await client.reply()).status == 200


async def test_a_trailer_is_no_header():
    async with served() as server, connect(server.addresses.public) as client:
        body = json.dumps(GOLDEN).encode()
        head = b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        client.writer.write(head + b"%x\r\n%s\r\n0\r\nx-request-id: smuggled\r\n\r\n" % (len(body), body))
        reply = await client.reply()
        assert (reply.status, reply.headers["x-request-id"]) == (200, reply.json()["request_id"])
        assert reply.json()["request_id"] != "smuggled"
