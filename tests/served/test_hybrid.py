"""A Gated DeltaNet hybrid served over HTTP: policies, exclusion, batches, thin catalogues."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from safetensors.torch import load_file

from tests import support
from tests.engine import hybrid
from tests.live_support import live_server
from tests.served.process import PATIENCE_S, serving

SIZES, BASES = (8, 8, 8), (10, 18, 26)
EPS = 3e-4
ITEMS = [{"id": f"i{n}", "sid": sid} for n, sid in enumerate(support.random_sids(SIZES, 60).tolist())]
POLICIES = {
    **{f"w{w}": f"widebeam: 1\nwidths: [{w}, {w}, {w}]\n" for w in (1, 8, 64)},
    "unseen": "widebeam: 1\nsteps:\n  all:\n    mask: trie and not seen\n",
}
DEPLOYMENT = f"""family = "qwen3_5"
device = "cpu"
[sid]
sizes = {list(SIZES)}
token_base = {list(BASES)}
prefix = [2]
[limits]
widths = [64, 64, 64]
rows = 1024
batch = 16
context = 64
[server]
port = 0
admin_port = 0
admin_auth = "none"
policy_override = true
drain_delay_s = 0.05
threads = 1
"""


def write_root(root, items=ITEMS, precision="auto", **changes):
    """A conditional checkpoint: the text model with a vision tower beside it; `changes` to its configuration."""
    (root / "policies").mkdir(parents=True)
    (root / "deployment.toml").write_text(f'precision = "{precision}"\n' + DEPLOYMENT)
    for name, text in {"base": support.BASE, **POLICIES}.items():
        (root / "policies" / f"{name}.yaml").write_text(text)
    publish_weights(root, "v1", **changes)
    support.write_vocab(root, SIZES, items)
    return support.store_contract(root)


def publish_weights(root, version, seed=0, **changes):
    changes = {"max_position_embeddings": 256, **changes}
    exported = hybrid.write(root / "exported" / version, "qwen3_5", seed=seed, **changes)
    config = hybrid.config("qwen3_5", **changes)
    support.write_weights(root, config, load_file(exported / "model.safetensors"), version)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(write_root(tmp_path_factory.mktemp("hybrid") / "root")) as running:
        yield running.ready()


def test_the_log_says_that_the_vision_tower_is_not_read(server):
    (line,) = server.said("tensors_unread")
    assert (line["version"], line["tensors"]) == ("v1", 2)


def test_every_item_comes_once_and_a_narrow_beam_keeps_scores(server):
    scores = dict(server.items("i1", "i2", k=60))
    assert len(scores) == 60
    for width in (1, 8, 64):
        narrow = server.items("i1", "i2", k=width, policy=f"w{width}")
        assert len(narrow) == min(width, 60)
        assert all(abs(scores[item] - score) < EPS for item, score in narrow)


def test_what_is_excluded_or_seen_does_not_come_and_changes_no_score(server):
    scores = dict(server.items("i1", "i2", k=60))
    best = sorted(scores, key=scores.__getitem__)[-3:]
    left = dict(server.items("i1", "i2", k=60, exclude=best))
    assert set(left) == set(scores) - set(best)
    assert all(abs(scores[item] - score) < EPS for item, score in left.items())
    unseen = dict(server.items("i1", "i2", k=60, policy="unseen"))
    assert set(unseen) == set(scores) - {"i1", "i2"}


def test_batch_mates_do_not_change_an_answer(server):
    histories = [(), ("i1",), ("i1", "i2"), tuple(f"i{n}" for n in range(20))] * 3
    alone = [server.items(*history, k=60) for history in histories]

    async def together():
        async with httpx.AsyncClient(base_url=server.public, timeout=60) as client:
            bodies = [{"context": {"history": list(history)}, "k": 60} for history in histories]
            return await asyncio.gather(*(client.post("/v1/recommend", json=body) for body in bodies))

    sizes, end = set(), time.monotonic() + PATIENCE_S
    while max(sizes, default=1) == 1 and time.monotonic() < end:  # until some have shared a batch
        for expected, answer in zip(alone, asyncio.run(together()), strict=True):
            sizes.add(answer.json()["batch"]["requests"])
            scores = {item["id"]: item["score"] for item in answer.json()["items"]}
            assert all(abs(scores[item] - score) < EPS for item, score in expected)
    assert max(sizes) > 1, "no batch ever formed: the test is void"


async def test_a_thinned_catalogue_leaves_scores_alone(server, tmp_path):
    full = dict(server.items("i3", k=60, exclude=[]))
    kept = [one for one in ITEMS if one["sid"][0] == ITEMS[17]["sid"][0] or one["id"] == "i3"]
    kept += [one for one in ITEMS if one["sid"][0] != ITEMS[17]["sid"][0] and one["id"] != "i3"][::7]
    async with live_server(write_root(tmp_path / "thin", sorted(kept, key=lambda one: one["sid"]))) as running:
        thinned = (await running.recommend("i3", k=60))["items"]
    assert len(thinned) == len(kept)
    assert all(abs(one["score"] - full[one["id"]]) < EPS for one in thinned)


@pytest.mark.slow
def test_other_weights_take_over_under_load_and_no_answer_mixes_them(tmp_path):
    root = write_root(tmp_path / "live")
    with serving(root) as running:
        running.ready()
        first = dict(running.items("i1", "i2", k=60))
        answers = []

        async def client(http, until):
            while not until.is_set():
                answer = await http.post("/v1/recommend", json={"context": {"history": ["i1", "i2"]}, "k": 60})
                answers.append((answer.status_code, answer.json()))

        async def load():
            until = asyncio.Event()
            async with httpx.AsyncClient(base_url=running.public, timeout=60) as http:
                clients = [asyncio.create_task(client(http, until)) for _ in range(4)]
                await asyncio.to_thread(running.until, lambda: seen("v1"), "on the old weights")
                await asyncio.to_thread(publish_weights, root, "v2", 9)
                await asyncio.to_thread(running.until, lambda: seen("v2"), "on the new weights")
                until.set()
                await asyncio.gather(*clients)

        def seen(version):
            return any(answer["versions"]["weights"] == version for _, answer in answers)

        asyncio.run(load())
        second = dict(running.items("i1", "i2", k=60))
    assert max(abs(first[item] - second[item]) for item in first) > 0.1
    assert {status for status, _ in answers} == {200}
    golden = {"v1": first, "v2": second}
    versions = [answer["versions"]["weights"] for _, answer in answers]
    assert set(versions) == {"v1", "v2"}
    for version, (_, answer) in zip(versions, answers, strict=True):
        assert all(abs(item["score"] - golden[version][item["id"]]) < EPS for item in answer["items"])
