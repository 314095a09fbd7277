"""Black-box relations over HTTP: what servers of this kind most often get wrong. A small catalogue, real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from contextlib import AsyncExitStack
from itertools import pairwise

import httpx
import pytest

from tests import support
from tests.api.support import connect, get, message
from tests.live_support import live_server
from tests.served.process import PATIENCE_S, serving

SIZES = (8, 8, 8)
WIDTHS = (1, 2, 4, 8, 16, 64)
EPS = 1e-4
POLICIES = {f"w{w}": f"widebeam: 1\nwidths: [{w}, {w}, {w}]\n" for w in WIDTHS}
POLICIES["unseen"] = "widebeam: 1\nsteps:\n  all:\n    mask: trie and not seen\n"
ITEMS = [{"id": f"i{n}", "sid": sid} for n, sid in enumerate(support.random_sids(SIZES, 60).tolist())]
HISTORIES = [(), ("i1",), ("i1", "i2"), tuple(f"i{n}" for n in range(7)), tuple(f"i{n % 60}" for n in range(50))]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return support.write_root(tmp_path_factory.mktemp("served") / "root", SIZES, ITEMS, POLICIES)


@pytest.fixture(scope="module")
def server(root):
    with serving(root) as running:
        yield running.ready()


def close(one, other):
    assert [item for item, _ in one] == [item for item, _ in other]
    assert all(abs(a - b) < EPS for (_, a), (_, b) in zip(one, other, strict=True))


def test_every_item_comes_once_best_first_and_a_narrow_beam_keeps_scores(server):
    full = server.items("i1", "i2", k=60)
    assert len({item for item, _ in full}) == 60
    assert all(a >= b for (_, a), (_, b) in pairwise(full))
    scores = dict(full)
    for width in WIDTHS:
        narrow = server.items("i1", "i2", k=width, policy=f"w{width}")
        assert len(narrow) == min(width, 60)
        assert all(abs(scores[item] - score) < EPS for item, score in narrow)


async def test_a_thinned_catalogue_leaves_scores_alone(server, tmp_path):
    full = dict(server.items(k=60))
    item = ITEMS[17]
    kept = [one for one in ITEMS if one["sid"][0] == item["sid"][0]]
    kept += [next(one for one in ITEMS if one["sid"][0] == first) for first in range(8) if first != item["sid"][0]]
    thin = support.write_root(tmp_path / "thin", SIZES, sorted(kept, key=lambda one: one["sid"]))
    async with live_server(thin) as running:
        answer = await running.recommend(k=60)
    assert len(answer["items"]) == len(kept)
    for one in answer["items"]:
        assert abs(one["score"] - full[one["id"]]) < EPS


def test_batch_mates_do_not_change_an_answer(server):
    asked = [
        {"context": {"history": list(history)}, "k": k, "policy": policy}
        for history in HISTORIES
        for k, policy in ((5, "w8"), (60, "base"), (20, "unseen"), (1, "w1"))
    ]
    alone = [
        [(i["id"], i["score"]) for i in server.client.post("/v1/recommend", json=body).json()["items"]]
        for body in asked
    ]

    async def together():
        async with httpx.AsyncClient(base_url=server.public, timeout=60) as client:
            return await asyncio.gather(*(client.post("/v1/recommend", json=body) for body in asked))

    sizes, end = set(), time.monotonic() + PATIENCE_S
    while max(sizes, default=1) == 1 and time.monotonic() < end:  # until some have shared a batch
        for expected, answer in zip(alone, asyncio.run(together()), strict=True):
            body = answer.json()
            sizes.add(body["batch"]["requests"])
            close(expected, [(i["id"], i["score"]) for i in body["items"]])
    assert max(sizes) > 1, "no batch ever formed: the test is void"


def test_a_request_remembers_nothing_of_earlier_ones(server):
    golden = {history: server.items(*history) for history in HISTORIES}
    for n in range(60):
        server.items(f"i{n % 60}", f"i{n * 7 % 60}", k=3)
    for history, expected in golden.items():
        close(expected, server.items(*history))


def test_excluded_items_and_seen_ones_are_replaced_by_others(server):
    best = [item for item, _ in server.items("i1", k=30)]
    for policy in ("base", "w64"):
        left = server.items("i1", k=20, policy=policy, exclude=best)
        assert len(left) == 20
        assert {item for item, _ in left}.isdisjoint(best)
    unseen = server.items(*best, k=20, policy="unseen")
    assert len(unseen) == 20
    assert {item for item, _ in unseen}.isdisjoint(best)
    nothing = server.ask("i1", k=5, exclude=[one["id"] for one in ITEMS]).json()
    assert (nothing["items"], nothing["status"]) == ([], "no_candidates")


@pytest.mark.parametrize(
    "sids", [[[1, 2, 3], [7, 2, 6]], [[0, 0, 0]], [[0, a, b] for a in range(8) for b in range(7)] + [[1, 0, 0]]]
)
async def test_only_items_of_the_catalogue_come_back_however_few(tmp_path, sids):
    items = [{"id": f"n{n}", "sid": sid} for n, sid in enumerate(sids)]
    async with live_server(support.write_root(tmp_path / "few", SIZES, items, POLICIES)) as running:
        body = await running.recommend(k=100)
        assert sorted(item["sid"] for item in body["items"]) == sorted(sids)[:64] or len(sids) > 64
        assert body["status"] == "underfilled"
        assert all(isinstance(item["score"], float) for item in body["items"])
        two = (await running.recommend(k=2, policy="w2"))["items"]
        assert 1 <= len(two) <= 2
        assert all(item["sid"] in sids for item in two)


def test_hostile_requests_leave_their_batch_mates_alone(server):
    golden = server.items("i1", "i2", k=7)
    deep = b"[" * 20000
    hostile = [
        b"", b"{", deep, b'{"context": {"history": null}, "k": 5}', b'{"context": {"history": [null]}, "k": 5}',
        b'{"context": {"history": ["i1"]}, "k": 0}', b'{"context": {"history": ["i1"]}, "k": 1e999}',
        b'{"context": {"history": ["i1"]}, "k": true}', b'{"context": {"history": ["i1"]}, "k": 1000000000}',
        b'{"context": {"history": ["\xff"]}, "k": 5}', b'{"context": {"history": ["\\ud800"]}, "k": 5}',
        b'{"context": {"history": ["i1"]}, "k": 5, "beam_widht": 3}', b'{"context": {"tokens": [1]}, "k": 5}',
        b'{"context": {"tokens": [9223372036854775808]}, "k": 5}', b'{"context": {}, "k": 5}',
        b'{"context": {"history": ["i1"]}, "k": 5, "policy": "nope"}',
        b'{"context": {"history": ["i1"]}, "k": 5, "k": 6}', b'{"context": {"history": ["i1"]}, "k": NaN}',
    ]  # fmt: skip

    async def fire():
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(base_url=server.public, timeout=60, headers=headers) as client:
            good = json.dumps({"context": {"history": ["i1", "i2"]}, "k": 7}).encode()
            calls = [client.post("/v1/recommend", content=body) for bad in hostile for body in (bad, good)]
            return await asyncio.gather(*calls)

    answers = asyncio.run(fire())
    for bad in answers[::2]:
        assert 400 <= bad.status_code < 500, bad.text
        assert set(bad.json()["error"]) >= {"code", "message", "retryable"}
    for good in answers[1::2]:
        close(golden, [(item["id"], item["score"]) for item in good.json()["items"]])


def test_clients_that_leave_free_the_queue_and_the_gauges(server):
    async def storm():
        async with httpx.AsyncClient(base_url=server.public, timeout=httpx.Timeout(5, read=0.003)) as client:
            body = {"context": {"history": ["i1"]}, "k": 60}
            await asyncio.gather(*(client.post("/v1/recommend", json=body) for _ in range(100)), return_exceptions=True)

    asyncio.run(storm())
    gauges = ("widebeam_in_flight", "widebeam_queue_depth")  # some may reach the server after their clients have left
    server.until(lambda: [server.metric(name) for name in gauges] == [0, 0], "idle")
    assert len(server.items("i1")) == 10


def test_a_server_without_a_usable_root_is_alive_and_says_why(tmp_path):
    root = support.write_root(tmp_path / "bad", SIZES, ITEMS)
    (root / "deployment.toml").write_text('family = "onerec"\n[sid]\nsizes = [8, 8, 8]\nbeam_widht = 3\n')
    with serving(root, "--port", "0", "--admin-port", "0") as running:
        running.until(lambda: "bad_deployment" in running.client.get("/readyz").text, "telling")
        assert running.client.get("/livez").status_code == 200
        assert "deployment.toml:4" in running.client.get("/readyz").text
        refused = running.ask("i1")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "not_ready"
        assert running.stop() == 0


def test_sigterm_drops_readiness_first_finishes_what_runs_and_exits_0(root):
    with serving(root) as running:
        running.ready()

        async def under_load():
            async with AsyncExitStack() as stack:
                clients = [await stack.enter_async_context(connect(running.public)) for _ in range(60)]
                for client in clients:
                    client.writer.write(message(b'{"context": {"history": ["i1"]}, "k": 60}'))
                    await client.writer.drain()
                for _ in range(3):  # whoever is answered now has sent after all of them: the server has them
                    assert (await get(running.public, "/livez")).status == 200
                running.process.send_signal(signal.SIGTERM)
                return await asyncio.gather(*(client.reply() for client in clients))

        answers = asyncio.run(under_load())
        assert {answer.status for answer in answers} == {200}
        assert running.process.wait(PATIENCE_S) == 0
    events = [line["event"] for line in running.lines]
    assert events.index("draining") < events.index("stopped")
    assert not any("exception" in line for line in running.lines)
