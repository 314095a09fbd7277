"""The console's files: no data, no token, and headers that let them load nothing else. `tests/console` uses them."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from app.api import pages
from tests.api.support import connect, get, message, served

WORDS = (
    "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser", "setHTML",
    "localStorage", "style=",
)  # fmt: skip
FILES = {one.name: one.read_text() for one in files("app.api").joinpath("console").iterdir()}


async def test_the_page_is_served_without_a_token_and_the_api_is_not(tmp_path):
    (tmp_path / "tokens").write_text("read r-token\n")
    async with served(root=tmp_path, admin_tokens="tokens") as server:
        admin = server.addresses.admin
        for name, text in FILES.items():
            reply = await get(admin, f"/console/{'' if name == 'index.html' else name}")
            assert (reply.status, reply.body.decode()) == (200, text)
            for header, value in pages.HEADERS.items():
                assert reply.headers[header] == value
        for path in ("/", "/console"):
            reply = await get(admin, path)
            assert (reply.status, reply.headers["location"]) == (307, "console/")
        assert (await get(admin, "/admin/v1/status")).status == 401
        for path in ("/console/../admin/v1/status", "/console/%2e%2e/admin.py", "/console/index.html", "/console//"):
            assert (await get(admin, path)).status in {401, 404}, path
        async with connect(admin) as client:
            client.writer.write(message(path="/console/", method="HEAD", content_type=None))
            assert b" 200 " in await client.reader.readuntil(b"\r\n\r\n")
            client.writer.write(message(path="/console/"))
            reply = await client.reply()
            assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")
        assert (await get(server.addresses.public, "/console/")).status == 404  # the admin port's alone


def test_the_policy_allows_this_servers_files_and_nothing_else():
    policy = dict(part.strip().split(" ", 1) for part in pages.HEADERS["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert "unsafe" not in pages.HEADERS["content-security-policy"]


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith((".js", ".html"))])
def test_no_text_becomes_markup_and_nothing_is_fetched_from_elsewhere(name):
    text = FILES[name]
    for word in WORDS:
        assert word not in text, word
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\son\w+=", text)


async def test_without_tokens_only_this_machines_own_pages_are_answered():
    async with served(admin_auth="none") as server:
        admin = server.addresses.admin
        own = admin.removeprefix("http://")

        async def status(**headers):
            return (await get(admin, "/admin/v1/status", **headers)).status

        assert await status() == 200
        assert await status(host=own, origin=admin, sec_fetch_site="same-origin") == 200
        assert await status(host="[::1]:8001", sec_fetch_site="none") == 200
        for host in (
            "evil.example",
            "evil.example:8001",
            "localhost.evil.example",
            "",
            "[::1",
            "127.0.0.1.evil.example",
        ):
            assert await status(host=host) == 403, host
        assert await status(host=own, origin="http://evil.example") == 403
        for origin in ("null", "http://[::1", "http://[x]", "//", "http://\xbd"):
            assert await status(host=own, origin=origin) == 403, origin
        assert await status(host=own, sec_fetch_site="cross-site") == 403
        assert await status(host=own, sec_fetch_site="same-site") == 403  # another port of this machine
