"""Long runs of live updates: nothing fails, and files, threads, tasks and memory stay flat (`make soak`)."""

from __future__ import annotations

import asyncio
import shutil
import sys

import pytest

from tests import support
from tests.live_support import Resources, live_server
from tests.runtime.test_cutover import BAD, Load, Truth, serving, spoiled, state_of, weights, world
from tests.runtime.test_live import GOOD, Asking, edits

EDITS = 1000
CUTOVERS = 1000


def report(name, *measured):
    for number, one in measured:
        sys.stdout.write(f"{name} {number}: {one._asdict()}\n")


@pytest.mark.timeout(3600)
async def test_a_thousand_edits_a_tenth_of_them_bad(tmp_path):
    async with live_server(support.write_root(tmp_path, policies={"p": GOOD.format(5)})) as server:
        clients = [Asking(server, name, 0.005) for name in ("p", "base")]
        tasks = [asyncio.create_task(client.run()) for client in clients]
        await edits(server, EDITS // 5)
        before = Resources.now()
        await edits(server, EDITS - EDITS // 5)
        after = Resources.now()
        for client in clients:
            client.going = False
        await asyncio.gather(*tasks)
        report("edits", (EDITS // 5, before), (EDITS, after))
        flat(before, after)
        assert (await server.status())["counters"]["failed"] == 0


@pytest.mark.timeout(3600)
async def test_a_thousand_cutovers_half_of_them_failing(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        truth = Truth(root)
        for history in (("i1", "i2"), ("i7",), ("i20", "i3", "i11")):
            for policy in ("base", "narrow"):
                truth.of("v1", "v1", policy, history)
        wrong, before = list(BAD), None
        for n in range(2, 2 + CUTOVERS // 2):
            how = wrong[n % len(wrong)]
            spoiled(root, f"v{2 * n}", how)
            await server.settles(lambda status, v=f"v{2 * n}": state_of(status, "weights", v)["state"] == "rejected")
            load = Load(server, truth, clients=2)
            weights(root, f"v{2 * n + 1}", n)
            await server.settles(serving(f"v{2 * n + 1}"))
            load.going = False
            await asyncio.gather(*load.tasks)
            truth.known = {key: value for key, value in truth.known.items() if key[0] == f"v{2 * n + 1}"}
            for old in (2 * n, 2 * n - 3, 2 * n - 5):
                shutil.rmtree(root / "weights" / f"v{old}", ignore_errors=True)
            if n == 2 + CUTOVERS // 10:
                before = Resources.now()
        after = Resources.now()
        report("cutovers", (CUTOVERS // 5, before), (CUTOVERS, after))
        flat(before, after)
        status = await server.status()
        assert status["counters"]["failed"] == status["counters"]["refused"] == 0
        assert len(status["snapshots"]) == 2


def flat(before, after):
    assert after.files <= before.files + 8
    assert after.threads <= before.threads
    assert after.tasks <= before.tasks + 8
    assert after.objects <= before.objects + 16
    assert after.rss <= 1.05 * before.rss + (8 << 20)
