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
from tests.runtime.test_cutover import HISTORIES, SIZES, Load, Truth, items, serving, state_of, weights, world
from tests.runtime.test_live import GOOD, Asking, edits
from tests.soak.bad import BAD

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


@pytest.mark.timeout(7200)
async def test_cutovers_half_of_them_failing_in_every_way(tmp_path):
    root, reasons, places = world(tmp_path), {}, set()
    async with live_server(root, log=tmp_path / "log") as server:
        truth, wrong, before = Truth(root), list(BAD), None
        for history in HISTORIES:
            for policy in ("base", "narrow"):
                truth.of("v1", "v1", policy, history)
        rounds = CUTOVERS // 2
        for n in range(rounds):
            how, bad, good = wrong[n % len(wrong)], f"v{2 * n + 2}", f"v{2 * n + 3}"
            BAD[how][1](root, bad)
            status = await server.settles(lambda status, v=bad: state_of(status, "weights", v)["state"] == "rejected")
            told = state_of(status, "weights", bad)["reason"]
            reason = {key: str(value).replace(bad, "v") for key, value in told.items()}
            assert reasons.setdefault(how, reason) == reason or BAD[how][0] == "no_memory", how
            assert reason["code"] == (BAD[how][0] or reason["code"]), (how, reason)
            load = Load(server, truth, clients=2)
            weights(root, good, n)
            await server.settles(serving(good))
            await load.end()
            places.add(next(iter(server.live._runtime.active.engine.slot.tensors.values())).data_ptr())
            truth.known = {key: value for key, value in truth.known.items() if key[0] == good}
            if n % 3 == 0:  # and a catalogue of other ids
                words = f"v{n // 3 + 2}"
                support.write_vocab(root, SIZES, items(f"n{n}-"), version=words)
                load = Load(server, truth, clients=2)
                await server.settles(serving(good, words))
                await load.end()
                shutil.rmtree(root / "vocab" / f"v{n // 3}", ignore_errors=True)
            for old in (2 * n + 2, 2 * n - 1, 2 * n - 3):
                shutil.rmtree(root / "weights" / f"v{old}", ignore_errors=True)
            if n == rounds // 5:
                before = Resources.now()
        after = Resources.now()
        report("cutovers", (2 * (rounds // 5), before), (2 * rounds, after))
        for how, reason in reasons.items():
            sys.stdout.write(f"  {how}: {reason}\n")
        flat(before, after)
        assert len(places) == 3, "three slots, whatever came"
        status = await server.status()
        assert status["counters"]["failed"] == status["counters"]["refused"] == 0
        assert len(status["snapshots"]) == 2


def flat(before, after):
    """From a fifth of the run to its end. Memory: less than 1 %, and what one measurement differs from another."""
    assert after.files <= before.files + 8
    assert after.threads <= before.threads
    assert after.tasks <= before.tasks + 8
    assert after.objects <= before.objects + 16
    assert after.rss <= 1.01 * before.rss + (1 << 20)
