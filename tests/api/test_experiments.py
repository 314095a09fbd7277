"""Experiments over REST: arms in answers, testers' arms, one unit explained, edits while it serves."""

from __future__ import annotations

import asyncio
import json
import time
from urllib.parse import quote

from tests.api.support import PATIENCE_S, ask, get, served
from tests.api.test_over_runtime import body, poll, serving
from tests.support import write_root

TRAFFIC = """\
widebeam: 1
kind: traffic
default: base
layers:
  ranking: {salt: ranking/1}
"""
WIDE = """\
widebeam: 1
kind: experiment
layer: ranking
slots: [0, 10000]
salt: wide/1
where: ctx.country == "BR"
arms:
  control: {weight: 50, policy: base}
  wide:    {weight: 50, policy: wide}
"""


def write(root, name, text):
    path = root / "policies" / name
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").rename(path)


def records(root, kind):
    files = sorted((root / "state" / kind).glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


async def experiment(url, name="wide"):
    return (await get(url, "/admin/v1/status")).json()["experiments"].get(name)


async def until(url, good):
    end = time.monotonic() + PATIENCE_S
    while not good(one := await experiment(url)):
        assert time.monotonic() < end, one
        await asyncio.sleep(0.02)


async def test_an_experiment_from_its_file_to_its_end(tmp_path):
    root = write_root(tmp_path / "root", policies={"wide": "widebeam: 1\nextends: base\nwidths: [9, 9, 9]\n"})
    toml = root / "deployment.toml"
    toml.write_text(toml.read_text() + "arm_override = true\n[log]\nrequests = 1.0\n")
    (root / "policies" / "traffic.yaml").write_text(TRAFFIC)
    async with serving(root) as (where, _, _):
        assert await experiment(where.admin) is None
        write(root, "experiments/wide.yaml", WIDE)
        await until(where.admin, lambda one: one is not None and one["standing"] == "live")

        arms = {}
        for n in range(24):
            reply = await ask(where.public, body(["i1"], user_id=f"u{n}", ctx={"country": "BR"}))
            (arm,) = reply.json()["experiments"]
            assert reply.json()["versions"]["policy"] == {"control": "base", "wide": "wide"}[arm["arm"]]
            assert arm == {"layer": "ranking", "name": "wide", "arm": arm["arm"], "reason": "assigned", "coverage": 1.0}
            arms[f"u{n}"] = arm["arm"]
            why = await get(where.admin, f"/admin/v1/assignments/wide?unit=u{n}&ctx.country=BR")
            assert (why.json()["arm"], why.json()["reason"]) == (arm["arm"], "assigned")
        assert set(arms.values()) == {"control", "wide"}
        elsewhere = (await ask(where.public, body(["i1"], user_id="u1", ctx={"country": "DE"}))).json()
        assert [one["reason"] for one in elsewhere["experiments"]] == ["where"]
        one = await experiment(where.admin)
        assert one["served"] == {arm: list(arms.values()).count(arm) for arm in ("control", "wide")}

        forced = await ask(where.public, body(["i1"]), **{"x-widebeam-arm": "wide=wide"})
        assert [(one["arm"], one["reason"]) for one in forced.json()["experiments"]] == [("wide", "forced")]
        assert (await experiment(where.admin))["served"] == one["served"]

        write(root, "experiments/wide.yaml", WIDE.replace("weight: 50, policy: wide", "weight: 40, policy: wide"))
        await until(where.admin, lambda one: one["standing"] == "stale")
        bad = await experiment(where.admin)
        assert {error["code"] for error in bad["errors"]} == {"E001", "E008"}
        assert bad["served"] == one["served"]
        again = (await ask(where.public, body(["i1"], user_id="u1", ctx={"country": "BR"}))).json()
        assert again["experiments"][0]["arm"] == arms["u1"]

        write(root, "experiments/wide.yaml", WIDE.replace("layer: ranking", "layer: ranking\nstate: paused"))
        await until(where.admin, lambda one: one["state"] == "paused")
        paused = (await ask(where.public, body(["i1"], user_id="u1", ctx={"country": "BR"}))).json()
        assert paused["versions"]["policy"] == "base"
        assert paused["experiments"][0]["reason"] == "paused"

        write(root, "experiments/wide.yaml", WIDE)
        await until(where.admin, lambda one: one["state"] == "running")
        killed = await ask(where.admin, {"kill": ["wide"]}, path="/admin/v1/kill")
        assert killed.status == 200
        user = next(user for user, arm in arms.items() if arm == "wide")
        stopped = (await ask(where.public, body(["i1"], user_id=user, ctx={"country": "BR"}))).json()
        assert stopped["versions"]["policy"] == "base"
        assert (stopped["experiments"][0]["arm"], stopped["experiments"][0]["reason"]) == ("control", "killed")
        assert (await experiment(where.admin))["killed"] is True
    lines = records(root, "exposures")
    assert [line["experiments"][0]["reason"] for line in lines] == [
        *["assigned"] * 24, "where", "forced", "assigned", "paused", "killed",
    ]  # fmt: skip
    recorded = records(root, "requests")
    assert len(recorded) == len(lines)
    assert recorded[0]["answer"]["items"][0].keys() == {"id", "score", "sid"}
    assert b"u1" not in b"".join(file.read_bytes() for file in (root / "state" / "exposures").glob("*.jsonl"))


async def test_arms_are_refused_where_the_deployment_does_not_allow_them_or_they_make_no_sense(tmp_path):
    root = write_root(tmp_path / "root")
    (root / "policies" / "traffic.yaml").write_text(TRAFFIC)
    async with serving(root) as (where, _, _):
        await poll(where.public, "/readyz", lambda reply: reply.status == 200)
        reply = await ask(where.public, body(["i1"]), **{"x-widebeam-arm": "wide=wide"})
        assert (reply.status, reply.json()["error"]["path"]) == (422, "header x-widebeam-arm")


async def test_the_header_is_read_exactly():
    async with served() as server:
        url = server.addresses.public
        for text in ("", "a", "a=", "=b", "a=b,", "a=b,a=c"):
            reply = await ask(url, body(["i1"]), **{"x-widebeam-arm": text})
            assert (reply.status, reply.json()["error"]["path"]) == (422, "header x-widebeam-arm"), text
        assert (await ask(url, body(["i1"]), **{"x-widebeam-arm": "a=b, c=d"})).status == 200
    assert server.front.admitted[-1].arms == {"a": "b", "c": "d"}


async def test_questions_about_units_are_checked(tmp_path):
    root = write_root(tmp_path / "root", policies={"wide": "widebeam: 1\nextends: base\nwidths: [9, 9, 9]\n"})
    (root / "policies" / "traffic.yaml").write_text(TRAFFIC)
    write(root, "experiments/wide.yaml", WIDE)
    async with serving(root) as (where, _, _):
        for query, status, path in (
            ("", 422, "query unit"), ("?unit=", 422, "query unit"), ("?unit=a&unit=b", 422, "query unit"),
            ("?unit=a&x=1", 422, "query x"), ("?unit=a&user.age=old", 422, "query user.age"),
            ("?unit=a&user.age=inf", 422, "query user.age"), (f"?unit={'a' * 513}", 422, "query unit"),
            (f"?unit={quote('ü')}&ctx.country=BR&user.age=3", 200, None),
        ):  # fmt: skip
            reply = await get(where.admin, f"/admin/v1/assignments/wide{query}")
            assert (reply.status, reply.json().get("error", {}).get("path")) == (status, path), query
        assert (await get(where.admin, "/admin/v1/assignments/nobody?unit=a")).status == 404
        found = (await get(where.admin, "/admin/v1/assignments/wide?unit=user-1")).json()
        assert (found["slot"], found["eligible"], found["arm"], found["reason"]) == (4883, False, "default", "where")
