"""Long runs of live updates: nothing fails, and files, threads, tasks and memory stay flat (`make soak`).

SOAK_EDITS and SOAK_CUTOVERS say how many (default 1000 each).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys

import pytest

from tests import support
from tests.live_support import Resources, live_server
from tests.runtime.test_cutover import (
    HISTORIES,
    SIZES,
    Load,
    Truth,
    items,
    nobody_failed,
    serving,
    state_of,
    weights,
    world,
)
from tests.runtime.test_live import GOOD, Asking, edits
from tests.soak.bad import BAD
from tests.soak.bad_vocab import BAD_VOCAB

EDITS = int(os.environ.get("SOAK_EDITS", "1000"))
CUTOVERS = int(os.environ.get("SOAK_CUTOVERS", "1000"))


def report(name, *measured):
    for number, one in measured:
        sys.stdout.write(f"{name} {number}: {one._asdict()}\n")


@pytest.mark.timeout(3600)
async def test_a_thousand_edits_a_tenth_of_them_bad(tmp_path):
    root = support.write_root(tmp_path / "root", policies={"p": GOOD.format(5)})
    async with live_server(root, log=tmp_path / "log") as server:
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


def wrong():
    """(kind, how, code, how it is made) of every bad version: weights and catalogues in turn."""
    for kind, bad in ("weights", BAD), ("vocab", BAD_VOCAB):
        for number, (how, (code, make)) in enumerate(bad.items()):
            yield number, kind, how, code, make


class Reasons:
    """What each way to be wrong is refused with: the same each time."""

    def __init__(self, root, server):
        self.root, self.server = root, server
        self.ways = [way for _, *way in sorted(wrong(), key=lambda way: way[0])]
        self.told: dict[tuple[str, str], dict[str, str]] = {}

    async def refused(self, number, version):
        """One bad version comes and is refused. Returns its kind."""
        kind, how, code, make = self.ways[number % len(self.ways)]
        make(self.root, version)
        status = await self.server.settles(lambda status: state_of(status, kind, version)["state"] == "rejected")
        told = state_of(status, kind, version)["reason"]
        reason = {key: str(value).replace(version, "v") for key, value in told.items()}
        assert self.told.setdefault((kind, how), reason) == reason or code == "no_memory", (kind, how)
        assert reason["code"] == (code or reason["code"]), (kind, how, reason)
        shutil.rmtree(self.root / kind / version)


@pytest.mark.timeout(7200)
async def test_cutovers_half_of_them_failing_in_every_way(tmp_path):
    root, places, before, rounds = world(tmp_path), set(), None, CUTOVERS // 2
    async with live_server(root, log=tmp_path / "log") as server:
        truth, reasons = Truth(root), Reasons(root, server)
        for history in HISTORIES:
            for policy in ("base", "narrow"):
                truth.of("v1", "v1", policy, history)
        for n in range(rounds):
            good = f"v{2 * n + 3}"
            await reasons.refused(n, f"v{2 * n + 2}")
            load = Load(server, truth, clients=2)
            weights(root, good, n)
            await server.settles(serving(good))
            await load.end()
            places.add(next(iter(server.live._runtime.active.engine.slot.tensors.values())).data_ptr())
            truth.known = {key: value for key, value in truth.known.items() if key[0] == good}
            if n % 3 == 0:  # and a catalogue of other ids
                support.write_vocab(root, SIZES, items(f"n{n}-"), version=good)
                load = Load(server, truth, clients=2)
                await server.settles(serving(good, good))
                await load.end()
                shutil.rmtree(root / "vocab" / f"v{2 * n - 3}", ignore_errors=True)
            for old in (2 * n - 1, 2 * n - 3):
                shutil.rmtree(root / "weights" / f"v{old}", ignore_errors=True)
            if n == rounds // 5:
                before = Resources.now()
        after = Resources.now()
        report("cutovers", (2 * (rounds // 5), before), (2 * rounds, after))
        for (kind, how), reason in reasons.told.items():
            sys.stdout.write(f"  {kind}, {how}: {reason}\n")
        flat(before, after)
        assert len(places) == 3, "three slots, whatever came"
        await nobody_failed(server)
        assert len((await server.status())["snapshots"]) == 2


def flat(before, after):
    """From a fifth of the run to its end. Memory: less than 1 %, and what one measurement differs from another."""
    assert after.files <= before.files + 8
    assert after.threads <= before.threads
    assert after.tasks <= before.tasks + 8
    assert after.objects <= before.objects + 16
    assert after.rss <= 1.01 * before.rss + (1 << 20)
