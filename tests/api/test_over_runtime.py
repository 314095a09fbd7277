"""REST over the real runtime: a small random model, real beams, real sockets."""

import asyncio
import io
import json
import re
import time
from contextlib import asynccontextmanager
from importlib.metadata import version

import pytest

from app.cli.compose import Overrides, compose
from app.cli.serve import run
from tests import said
from tests.api.support import PATIENCE_S, ask, connect, get, message, until
from tests.api.test_hostile import HOSTILE
from tests.support import write_root

HISTORIES = [[], ["i1"], ["i2", "i3"], [f"i{n % 40}" for n in range(50)]]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_root(tmp_path_factory.mktemp("root") / "served")


async def poll(url, path, good):
    """Ask until the reply is good; the bound only ends a test that has failed."""
    end = time.monotonic() + PATIENCE_S
    while not good(reply := await get(url, path)):
        assert time.monotonic() < end, (path, reply)
        await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(root):
    log = io.BytesIO()
    service = compose(root, Overrides(), log)
    ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
    task = asyncio.create_task(run(service, root, ready.set_result, stop))
    said.listen(f"server on {root.name}", lambda: log.getvalue().decode("utf-8", "replace"), lambda: not task.done())
    await asyncio.wait((ready, task), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    addresses = ready.result()
    try:
        await poll(addresses.public, "/readyz", lambda reply: reply.status == 200)
        yield addresses, log, stop
    finally:
        stop.set()
        await task


def body(history, k=5, **more):
    return {"context": {"history": history}, "k": k, **more}


def ranking(reply):
    assert reply.status == 200, reply
    return {item["id"]: item["score"] for item in reply.json()["items"]}


def assert_same(rankings, golden):
    """The same items in the same order, scores within 1e-4: a batch may add in another order."""
    for found, expected in zip(rankings, golden, strict=True):
        assert list(found) == list(expected)
        assert found == pytest.approx(expected, abs=1e-4)


async def quiet(addresses):
    """In-flight and queue gauges are back at 0."""
    pattern = re.compile(r"^widebeam_(?:in_flight|queue_depth) (\S+)$", re.MULTILINE)
    await poll(addresses.public, "/metrics", lambda reply: pattern.findall(reply.body.decode()) == ["0.0", "0.0"])


async def test_hostile_requests_do_not_change_what_their_company_gets(root):
    fine_here = {"policy", "k 101"}  # this root lets requests name a policy, and serves up to 1,000 items
    hostile = [data for name, (_, _, data) in HOSTILE.items() if name not in fine_here]
    async with serving(root) as (addresses, log, _):
        golden = [ranking(await ask(addresses.public, body(history))) for history in HISTORIES]
        for start in range(0, len(hostile), 8):
            bad = hostile[start : start + 8]
            replies = await asyncio.gather(
                *(ask(addresses.public, data) for data in bad),
                *(ask(addresses.public, body(history)) for history in HISTORIES),
            )
            assert all(400 <= reply.status < 500 for reply in replies[: len(bad)])
            assert_same([ranking(reply) for reply in replies[len(bad) :]], golden)
        unknown = await ask(addresses.public, body(["i1"], policy="no-such-policy"))
        assert (unknown.status, unknown.json()["error"]["path"]) == (422, "$.policy")
        for context in ({"tokens": [1, 2]}, {"history": ["never-heard-of"]}):
            assert (await ask(addresses.public, {"context": context, "k": 1})).status in {200, 422}
        await quiet(addresses)
        assert (await get(addresses.public, "/livez")).status == 200
    assert b"Traceback" not in log.getvalue()


async def test_an_explained_answer_shows_its_steps_and_its_items_and_too_many_are_refused(root):
    async with serving(root) as (addresses, _, _):
        plain = await ask(addresses.public, body(["i1"], policy="base"))
        answer = await ask(addresses.public, body(["i1"], policy="base", explain={"why": ["i2", "never-heard-of"]}))
        assert ranking(answer) == ranking(plain)
        assert "explain" not in plain.json()
        told = answer.json()["explain"]
        steps = [one for one in told if one["kind"] == "step"]
        assert [one["step"] for one in steps] == [1, 2, 3]
        assert all(one["candidates"] == one["kept"] + sum(one["removed"].values()) for one in steps)
        assert [(one["id"], one["result"]) for one in told[3:]][1] == ("never-heard-of", "unknown")
        busy: list = []
        while not busy:  # a machine that is slow enough explains one after the other
            asked = (ask(addresses.public, body(["i1"], explain=True)) for _ in range(20))
            busy = [one for one in await asyncio.gather(*asked) if one.status == 503]
        assert {one.json()["error"]["code"] for one in busy} == {"explain_busy"}
        assert (await ask(addresses.public, body(["i1"]))).status == 200


async def test_clients_that_leave_in_masses_leave_nothing_behind(root):
    async with serving(root) as (addresses, log, _):
        golden = ranking(await ask(addresses.public, body(["i1"])))

        async def leave(n):
            async with connect(addresses.public) as client:
                client.writer.write(message(json.dumps(body(HISTORIES[3], 5)).encode()))
                await client.writer.drain()
                await asyncio.sleep(0.001 * (n % 7))

        await asyncio.gather(*(leave(n) for n in range(200)))
        await quiet(addresses)
        replies = await asyncio.gather(*(ask(addresses.public, body(["i1"])) for _ in range(50)))
        assert_same([ranking(reply) for reply in replies], [golden] * 50)
    assert b"Traceback" not in log.getvalue()


async def test_a_deadline_that_cannot_be_met_is_504_or_503_and_a_generous_one_is_met(root):
    async with serving(root) as (addresses, _, _):
        replies = await asyncio.gather(
            *(ask(addresses.public, body(HISTORIES[3], deadline_ms=1)) for _ in range(30)),
            *(ask(addresses.public, body(HISTORIES[1], deadline_ms=60_000)) for _ in range(10)),
        )
        assert {reply.status for reply in replies[:30]} <= {200, 503, 504}
        assert {reply.status for reply in replies[30:]} == {200}
        await quiet(addresses)


async def test_what_was_asked_before_the_end_is_answered(root):
    async with serving(root) as (addresses, log, stop):
        running = [asyncio.create_task(ask(addresses.public, body(history))) for history in HISTORIES * 5]
        admitted = b'"route":"/v1/recommend"'
        await until(lambda: log.getvalue().count(admitted) > 0)
        stop.set()
        assert {reply.status for reply in await asyncio.gather(*running)} == {200}


async def test_the_status_document_has_what_its_readers_rely_on(root):
    async with serving(root) as (addresses, _, _):
        await ask(addresses.public, body(["i1"]))
        document = (await get(addresses.admin, "/admin/v1/status")).json()
    assert {"ready", "reasons", "uptime_s", "device", "kernels", "by_torch", "active", "artifacts", "policies",
            "experiments", "queue", "history", "counters"} <= set(document)  # fmt: skip
    assert document["counters"]["executed"] == 1
    assert document["build"] == version("widebeam")
