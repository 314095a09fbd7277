"""The admin routes of live updates: closed without a token, strict about bodies, the same answer twice."""

from __future__ import annotations

import asyncio

import pytest

from tests.api.support import ask, connect, get
from tests.live_support import live_server
from tests.runtime.test_cutover import weights, world

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
            ("POST", "/admin/v1/snapshots/{snapshot}:promote"), ("POST", "/admin/v1/snapshots/{snapshot}:pin"),
            ("POST", "/admin/v1/snapshots/{snapshot}:unpin"), ("GET", "/admin/v1/snapshots/{snapshot}"),
            ("GET", "/admin/v1/status"), ("GET", "/admin/v1/artifacts/{kind}"), ("GET", "/admin/v1/history"),
            ("GET", "/admin/v1/policies/{policy}/explain"), ("GET", "/admin/v1/assignments/{experiment}"),
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
    ("snapshots/nope:unpin", None, 422),
    ("snapshots/nope:nothing", None, 405),
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


async def test_a_decision_counts_only_for_the_epoch_it_names(shared):
    before = (await get(shared.admin, "/admin/v1/status")).headers["etag"]
    assert before == f'"{(await shared.status())["epoch"]}"'
    assert (await get(shared.admin, "/admin/v1/snapshots")).headers["etag"] == before

    async def post(path, body=None, match=None):
        return await ask(shared.admin, body, path=f"/admin/v1/{path}", if_match=match)

    done = await post("kill", {"kill": ["narrow"]}, before)
    assert done.status == 200
    assert done.headers["etag"] != before
    active = (await shared.status())["active"]["snapshot"]
    for path, body in (
        ("kill", {"kill": ["narrow"]}), ("snapshots:unpin", None), ("snapshots:promote", {"weights": "v1"}),
        ("drain", None), (f"snapshots/{active}:pin", None), (f"snapshots/{active}:rollback", None),
        ("policies:reload", None),
    ):  # fmt: skip
        late = await post(path, body, before)
        assert (late.status, late.json()["error"]["code"]) == (412, "epoch_changed"), path
    assert (await shared.status())["desired"]["asked"] == {}
    assert (await post("snapshots:unpin", None, "*")).status == 200
    now = (await get(shared.admin, "/admin/v1/status")).headers["etag"]
    assert (await post("snapshots:unpin", None, f'"other", {now}')).status == 200


MATCHES = [
    (["{now}"], 200),
    ([" {now} "], 200),
    (["*"], 200),
    (['"other", {now}'], 200),
    (['"other"', "{now}"], 200),  # two headers are one list
    (["{now},"], 200),
    (['"other"'], 412),
    (["W/{now}"], 412),  # If-Match compares strongly
    (['W/{now}, "other"'], 412),
    (['"*"'], 412),
    (['"a,{bare}"'], 412),
    ([""], 400),
    (["   "], 400),
    ([" , ,"], 400),
    (["{bare}"], 400),  # without its quotes
    (['"{bare}'], 400),
    (["*, {now}"], 400),
    (["*", "{now}"], 400),
    (["{now} {now}"], 400),
    (["{now}; q=1"], 400),
    (["", "{now}"], 200),
]


async def test_a_condition_is_understood_or_refused_and_never_passed_over(shared):
    async def post(given):
        now = (await get(shared.admin, "/admin/v1/status")).headers["etag"]
        lines = "".join(f"if-match: {one.format(now=now, bare=now.strip(chr(34)))}\r\n" for one in given)
        async with connect(shared.admin) as client:
            head = f"POST /admin/v1/snapshots:unpin HTTP/1.1\r\nhost: localhost\r\n{lines}content-length: 0\r\n\r\n"
            client.writer.write(head.encode())
            return await client.reply()

    for given, status in MATCHES:
        reply = await post(given)
        assert reply.status == status, (given, reply.body)
        if status != 200:
            error = reply.json()["error"]
            code = {400: "malformed_header", 412: "epoch_changed"}[status]
            assert (error["code"], error["path"], error["retryable"]) == (code, "If-Match", False)


async def test_of_two_decisions_at_once_that_name_one_epoch_one_is_carried_out(shared):
    epoch = (await get(shared.admin, "/admin/v1/status")).headers["etag"]
    active = (await shared.status())["active"]["snapshot"]
    replies = await asyncio.gather(
        *(ask(shared.admin, path=f"/admin/v1/snapshots/{active}:pin", if_match=epoch) for _ in range(5))
    )
    assert sorted(reply.status for reply in replies) == [200, 412, 412, 412, 412]


async def test_the_history_can_be_cut(shared):
    for names in (["narrow"], []):
        await shared.post("kill", {"kill": names, "revive": [] if names else ["narrow"]})
    whole = (await get(shared.admin, "/admin/v1/history")).json()["history"]
    assert [one["cause"] for one in whole] == ["start", "kill", "kill"]
    assert whole == (await shared.status())["history"]
    assert (await get(shared.admin, "/admin/v1/history?limit=1")).json()["history"] == whole[-1:]
    assert (await get(shared.admin, "/admin/v1/history?limit=0")).json()["history"] == []
    assert (await get(shared.admin, "/admin/v1/history?limit=201")).status == 422


async def test_each_promotion_rollback_and_rejection_is_one_line_with_cause_and_timing(tmp_path):
    async with live_server(world(tmp_path)) as server:
        weights(server.root, "v2", 5)
        status = await server.settles(lambda status: status["active"]["weights"]["version"] == "v2")
        old = next(one["id"] for one in status["snapshots"] if one["weights"]["version"] == "v1")
        new = status["active"]["snapshot"]
        assert (await server.post(f"snapshots/{old}:rollback")).status == 200
        assert (await server.post("snapshots:promote?wait=60", {"weights": "v2"})).status == 200
        (server.root / "weights" / "v3").mkdir()
        (server.root / "weights" / "v3" / "MANIFEST.json").write_text("{}")
        await server.settles(lambda status: any(one["state"] == "rejected" for one in status["artifacts"]))
        decisions = server.events("decision")
        assert [(one["cause"], one["weights"], one["vocab"]) for one in decisions] == [
            ("rollback", "v1", "v1"), ("promote", "v2", "v1")
        ]  # fmt: skip
        assert decisions[0]["before"] == new
        assert all(one["ms"] >= 0 and one["level"] == "info" for one in decisions)
        (rejected,) = server.events("artifact_rejected")
        assert (rejected["kind"], rejected["version"], rejected["level"]) == ("weights", "v3", "error")
        assert {"code", "message", "location"} <= set(rejected)
        assert rejected["ms"] >= 0


async def test_one_snapshot_one_version_and_one_policy_can_be_asked_for(shared):
    async def ask_for(path):
        reply = await get(shared.admin, f"/admin/v1/{path}")
        return reply.status, reply.json()

    active = (await shared.status())["active"]["snapshot"]
    assert (await ask_for(f"snapshots/{active}"))[1]["state"] == "active"
    assert [one["version"] for one in (await ask_for("artifacts/weights"))[1]["artifacts"]] == ["v1"]
    assert (await ask_for("artifacts/vocab/v1"))[1]["state"] == "active"
    assert [one["version"] for one in (await ask_for("artifacts/policy"))[1]["artifacts"]] == ["base", "narrow"]
    assert (await ask_for("artifacts/policy/narrow"))[1]["state"] == "live"
    assert (await ask_for("artifacts/engine"))[1] == {"artifacts": []}
    status, told = await ask_for("policies/narrow/explain")
    assert (status, told["policy"]) == (200, "narrow")
    assert told["policy_id"] == (await shared.policies())["policies"]["narrow"]["policy_id"]
    for path in (
        "snapshots/nope",
        "artifacts/vocab/v9",
        "artifacts/nope",
        "artifacts/policy/no",
        "policies/nope/explain",
    ):
        assert (await ask_for(path))[0] == 404, path


async def test_a_snapshot_is_unpinned_by_its_name_and_another_ones_pin_stays(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        first = (await server.status())["active"]["snapshot"]
        weights(root, "v2", 1)
        second = (await server.settles(lambda status: status["active"]["weights"]["version"] == "v2"))["active"][
            "snapshot"
        ]
        pin = (await server.post(f"snapshots/{first}:pin")).json()["pin"]
        assert pin == {"weights": "v1", "vocab": "v1"}
        assert (await server.post(f"snapshots/{second}:unpin")).json() == {"pin": pin}
        assert (await server.post(f"snapshots/{first}:unpin")).json() == {"pin": None}
        assert (await server.post(f"snapshots/{first}:unpin")).json() == {"pin": None}
        await server.settles(lambda status: status["active"]["weights"]["version"] == "v2")
