import io
import json
import os

import pytest

from app.api.admin import Tokens, parse_tokens
from app.errors import BadDeployment
from app.runtime.logs import make_log
from tests.api.support import HELD_S, ask, connect, get, held_delay, message, served, until

READ, WRITE = "Bearer r-token", "Bearer w-token"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "admin.tokens").write_text("# people\nread r-token\n\nwrite w-token\n")
    return tmp_path


def paths(document):
    return [(method.upper(), path) for path, item in document["paths"].items() for method in item]


async def test_every_admin_route_is_closed_without_a_token(root):
    async with served(root=root, admin_tokens="admin.tokens") as server:
        url = server.addresses.admin
        document = (await get(url, "/admin/v1/openapi.json", authorization=READ)).json()
        routes = paths(document)
        assert ("GET", "/admin/v1/status") in routes
        for method, path in [*routes, ("GET", "/admin/v1/openapi.json"), ("GET", "/nowhere"), ("POST", "/admin/v1")]:
            for token in (None, "Bearer", "Bearer ", "Bearer wrong", "Basic r-token", "r-token", "Bearer r-token x"):
                reply = await ask(url, path=path, method=method, authorization=token)
                assert (reply.status, reply.json()["error"]["code"]) == (401, "unauthorized"), (method, path, token)
                assert reply.headers["www-authenticate"] == "Bearer"


async def test_without_a_token_file_nobody_gets_in(tmp_path):
    async with served(root=tmp_path) as server:
        assert (await get(server.addresses.admin, "/admin/v1/status", authorization=READ)).status == 401
    async with served(root=tmp_path, admin_tokens="missing") as server:
        assert (await get(server.addresses.admin, "/admin/v1/status", authorization=READ)).status == 401


async def test_a_read_token_reads_and_does_not_write(root):
    async with served(root=root, admin_tokens="admin.tokens") as server:
        url = server.addresses.admin
        for token in (READ, WRITE, "bearer  r-token"):
            reply = await get(url, "/admin/v1/status", authorization=token)
            assert reply.status == 200
            document = reply.json()
            assert document["counters"] == {"executed": 0, "cancelled": 0, "refused": 0, "failed": 0}
            assert (document["ready"], document["reasons"], document["device"]) == (True, [], "cpu")
        assert (await ask(url, path="/admin/v1/status", authorization=READ)).status == 403
        assert (await ask(url, path="/admin/v1/status", authorization=WRITE)).status == 405
    assert b"r-token" not in server.log.getvalue()
    assert b"w-token" not in server.log.getvalue()


async def test_status_says_draining_before_anything_is_refused(root, monkeypatch):
    go = held_delay(monkeypatch)
    async with served(root=root, admin_tokens="admin.tokens", drain_delay_s=HELD_S) as server:
        server.stop.set()
        await until(lambda: server.events("draining"))
        document = (await get(server.addresses.admin, "/admin/v1/status", authorization=READ)).json()
        go.set()
    assert (document["ready"], document["reasons"]) == (False, ["draining"])


async def test_no_authentication_is_for_loopback_only(tmp_path):
    async with served(root=tmp_path, admin_auth="none") as server:
        assert (await get(server.addresses.admin, "/admin/v1/status")).status == 200
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(BadDeployment, match="loopback"):
            async with served(root=tmp_path, admin_auth="none", host=host):
                pass


def test_tokens_follow_their_file(tmp_path):
    file, log = tmp_path / "tokens", io.BytesIO()
    tokens = Tokens(file, make_log(log))
    assert tokens.right_of(b"a") is None
    file.write_text("read a\n")
    assert tokens.right_of(b"a") == "read"
    file.write_text("write a\nread b\n")
    assert (tokens.right_of(b"a"), tokens.right_of(b"b"), tokens.right_of(b"")) == ("write", "read", None)
    replaced = tmp_path / "next"
    replaced.write_text("write c\nread d\n")
    replaced.rename(file)
    assert (tokens.right_of(b"a"), tokens.right_of(b"c")) == (None, "write")
    file.unlink()
    assert tokens.right_of(b"c") is None
    file.write_text("read a\n")
    assert tokens.right_of(b"a") == "read"


@pytest.mark.parametrize(
    "text",
    [b"read", b"write a b", b"admin a", b"read a\nwr", b"read \xff", "read ä".encode(), b"read " + b"a" * 70_000],
)
def test_a_bad_token_file_lets_nobody_in_and_is_reported_once_without_its_content(text, tmp_path):
    file, log = tmp_path / "tokens", io.BytesIO()
    file.write_bytes(b"read good-token\n" + text)
    tokens = Tokens(file, make_log(log))
    for _ in range(3):
        assert tokens.right_of(b"good-token") is None
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["admin_tokens_unusable"]
    assert b"good-token" not in log.getvalue()


def test_a_token_listed_twice_keeps_its_lesser_right():
    assert parse_tokens("write a\nread a") == {b"a": "read"}
    assert parse_tokens("read a\nwrite a") == {b"a": "read"}


GUESSES = {
    "two, the right one first": [f"authorization: {READ}", "authorization: Bearer wrong"],
    "two, the right one last": ["authorization: Bearer wrong", f"authorization: {READ}"],
    "the right one twice": [f"authorization: {READ}", f"authorization: {READ}"],
    "a list": [f"authorization: Bearer wrong, {READ}"],
    "another header": [
        f"proxy-authorization: {READ}",
        f"x-authorization: {READ}",
        "cookie: authorization=Bearer r-token",
    ],
    "half of it": [f"authorization: {READ[:-1]}"],
    "more than it": [f"authorization: {READ}x"],
    "other letters": [f"authorization: {READ.swapcase()}"],
    "in pieces": ["authorization: Bearer", "authorization: r-token"],
    "not ASCII": ["authorization: Bearer r-tok\xe9n"],
    "very long": ["authorization: Bearer " + "r" * 50_000],
}


async def test_a_token_that_is_guessed_doubled_or_smuggled_opens_nothing(root):
    async with served(root=root, admin_tokens="admin.tokens") as server:
        for name, lines in GUESSES.items():
            async with connect(server.addresses.admin) as client:
                head = "".join(f"{line}\r\n" for line in ["host: x", *lines])
                target = "/admin/v1/status?authorization=Bearer+r-token&token=r-token"
                client.writer.write(f"GET {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1"))
                assert (await client.reply()).status == 401, name
        for header in ("x-http-method-override", "x-method-override", "x-http-method"):
            async with connect(server.addresses.admin) as client:
                raw = message(path="/admin/v1/status", method="GET", authorization=READ, **{header: "POST"})
                client.writer.write(raw)
                assert (await client.reply()).status == 200
        for path in ("/livez", "/readyz", "/admin/v1/status"):  # HEAD is GET without a body, on this port, too
            async with connect(server.addresses.admin) as client:
                client.writer.write(message(path=path, method="HEAD", authorization=READ))
                head = (await client.reader.readuntil(b"\r\n\r\n")).split()[1]
                assert head == (b"200" if path == "/admin/v1/status" else b"404")


def test_a_token_file_that_is_a_pipe_makes_nobody_wait(tmp_path):
    os.mkfifo(tmp_path / "tokens")
    assert Tokens(tmp_path / "tokens", make_log(io.BytesIO())).right_of(b"a") is None
