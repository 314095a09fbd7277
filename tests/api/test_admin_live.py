"""The admin routes of live updates: closed without a token, strict about bodies, the same answer twice."""

from __future__ import annotations

import pytest

from tests.api.support import ask, get
from tests.live_support import live_server
from tests.runtime.test_cutover import world

READ, WRITE = "Bearer r-token", "Bearer w-token"


def closed(root):
    (root / "admin.tokens").write_text("read r-token\nwrite w-token\n")
    file = root / "deployment.toml"
    file.write_text(
        file.read_text().replace('admin_auth = "none"', 'admin_auth = "token"\nadmin_tokens = "admin.tokens"')
    )
    return root


async def test_every_route_needs_its_right(tmp_path):
    async with live_server(closed(world(tmp_path)), ready=False) as server:
        document = (await get(server.admin, "/admin/v1/openapi.json", authorization=READ)).json()
        routes = [(method.upper(), path) for path, one in document["paths"].items() for method in one]
        assert {
            ("GET", "/admin/v1/policies"), ("POST", "/admin/v1/policies:reload"), ("POST", "/admin/v1/policies:check"),
            ("POST", "/admin/v1/kill"), ("GET", "/admin/v1/snapshots"), ("POST", "/admin/v1/snapshots:promote"),
            ("POST", "/admin/v1/snapshots:unpin"), ("POST", "/admin/v1/snapshots/{snapshot}:rollback"),
            ("GET", "/admin/v1/events"), ("POST", "/admin/v1/drain"),
        } <= set(routes)  # fmt: skip
        for method, path in routes:
            assert (await ask(server.admin, path=path, method=method)).status == 401, path
            if method == "POST":
                assert (await ask(server.admin, path=path, method=method, authorization=READ)).status == 403, path
        assert (await get(server.admin, "/admin/v1/snapshots", authorization=READ)).status == 200


WRONG = [
    ("kill", b"{", 400),
    ("kill", {"kill": "a"}, 422),
    ("kill", {"kill": [""]}, 422),
    ("kill", {"nope": []}, 422),
    ("kill", {"kill": ["x" * 200]}, 422),
    ("policies:check", {"name": "A", "text": ""}, 422),
    ("policies:check", b"\xff", 400),
    ("snapshots:promote", {}, 422),
    ("snapshots:promote", {"weights": "../v1"}, 422),
    ("snapshots:promote", {"weights": "/etc"}, 422),
    ("snapshots:promote", {"weights": "v9"}, 422),
    ("snapshots:promote?wait=-1", {"weights": "v1"}, 422),
    ("snapshots:promote?wait=x", {"weights": "v1"}, 422),
    ("snapshots/..%2f..%2fetc:promote", None, 404),
    ("snapshots/nope:rollback", None, 422),
    ("snapshots/nope:nothing", None, 404),
]


async def test_what_is_wrong_is_the_clients_and_changes_nothing(shared):
    for path, body, status in WRONG:
        reply = await shared.post(path, body)
        assert reply.status == status, (path, body, reply.body)
        assert set(reply.json()["error"]) >= {"code", "message", "retryable"}
    document = await shared.status()
    assert (document["ready"], document["killed"], document["desired"].get("asked", {})) == (True, [], {})


@pytest.fixture(name="shared")
async def one_server(tmp_path):
    async with live_server(world(tmp_path)) as server:
        yield server


async def test_drain_refuses_new_requests_and_stays_alive(shared):
    for _ in range(2):
        assert (await shared.post("drain")).json() == {"draining": True}
    refused = await ask(shared.public, {"context": {"history": []}, "k": 1}, path="/v1/recommend")
    assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
    assert (await get(shared.public, "/livez")).status == 200
    assert (await get(shared.public, "/readyz")).status == 503


async def test_the_document_describes_every_body(shared):
    document = (await get(shared.admin, "/admin/v1/openapi.json")).json()
    for name in ("PolicyText", "Kill", "Versions"):
        assert name in document["components"]["schemas"]
