"""Pairs of weights and vocab that are switched to and fro, by dropped folders and by decisions, under clients without
pause; and whatever else an operator may do, in any order. tests/soak has both at their size."""

from __future__ import annotations

import asyncio
import random

from tests import support
from tests.api.support import get
from tests.live_support import live_server
from tests.runtime.test_cutover import (
    SIZES,
    Load,
    Slow,
    Truth,
    edit,
    in_force,
    items,
    nobody_failed,
    serving,
    spoiled,
    state_of,
    weights,
    world,
)


class Switched(Load):
    """Clients that see every switch before the next one is made. way: the pairs in the order in which they are switched
    to. Whatever is sent after anybody has had an answer is answered by the same pair or a later one."""

    def __init__(self, server, truth, first, clients):
        self.way, self.newest = [first], 0
        super().__init__(server, truth, clients)

    def sending(self):
        return self.newest

    def received(self, pair, before):
        at = max((n for n, one in enumerate(self.way) if one == pair), default=-1)  # all have seen what comes before
        assert at >= before, (pair, self.way[before:])
        self.newest = max(self.newest, at)

    async def seen_by_all(self):
        """Everybody has had an answer of the last switch."""
        await self.sees(lambda: all(order[-1:] == self.way[-1:] for order in self.of_client))


async def switched(root, server, rounds, clients):
    """In each round a pair comes as folders, the one before it is rolled back to and the newer one promoted: three
    switches. Returns the load, which goes on."""
    load = Switched(server, Truth(root), ("v1", "v1"), clients)
    await load.seen_by_all()
    for number in range(2, rounds + 2):
        old, version = load.way[-1], f"v{number}"
        load.way.append((version, version))
        weights(root, version, number, {"vocab": [version]})
        support.write_vocab(root, SIZES, items(f"{'ab'[number % 2]}{number}-"), version=version)
        status = await server.settles(serving(version, version))
        await load.seen_by_all()
        ids = {one["weights"]["version"]: one["id"] for one in status["snapshots"]}
        for pair, decision in (old, "rollback"), ((version, version), "promote"):
            load.way.append(pair)
            assert (await server.post(f"snapshots/{ids[pair[0]]}:{decision}")).status == 200
            await load.seen_by_all()
        assert (await server.post("snapshots:unpin")).status == 200
    return load


async def a_slow_one_and_then_a_fast_one(root, server, load, slow):
    """A version whose load takes long, and one that comes meanwhile: the newer one serves, and stays. Returns what the
    older one may have served as until then."""
    words, soon = load.way[-1][1], "v99"
    (late,) = slow.versions
    weights(root, late, 100)
    await slow.begun()
    load.way += [(late, words), (soon, words)]
    weights(root, soon, 101)
    slow.go.set()
    await server.settles(serving(soon, words))
    await load.seen_by_all()
    await server.settles(lambda status: state_of(status, "weights", late)["state"] not in {"loading", "validating"})
    await load.more(20)
    return late, words


async def pairs(root, slow, rounds, clients):
    """Three switches a round, and a version that is overtaken. Returns answers and switches."""
    async with live_server(root) as server:
        load = await switched(root, server, rounds, clients)
        between = await a_slow_one_and_then_a_fast_one(root, server, load, slow)
        await load.end()
        for order in load.of_client:
            assert order == [pair for pair in load.way if pair != between or between in order]
        await nobody_failed(server)
    return load.answers, len(load.way) - 1


async def test_pairs_that_are_switched_by_folders_and_by_decisions_mix_in_no_answer(tmp_path, monkeypatch):
    await pairs(world(tmp_path), Slow(monkeypatch, "v98"), rounds=2, clients=4)


class Operator:
    """Somebody who does one thing after the other, good and bad ones, and does not wait for what comes of it."""

    def __init__(self, root, server, seed):
        self.root, self.server, self.random = root, server, random.Random(seed)
        self.weights, self.vocab, self.batch = 1, 1, 16
        self.did: dict[str, int] = {}

    async def act(self):
        kind = self.random.choice(("good", "bad", "words", "decide", "decide", "unpin", "promote", "limits", "wait"))
        status = await getattr(self, kind)()
        assert status in {None, 200, 202, 404, 422}, (kind, status)
        self.did[kind] = self.did.get(kind, 0) + 1

    async def good(self):
        self.weights += 1
        weights(self.root, f"v{self.weights}", self.weights)

    async def bad(self):
        self.weights += 1
        spoiled(self.root, f"v{self.weights}", self.random.choice(("nan", "missing", "short", "flipped")))

    async def words(self):
        self.vocab += 1
        support.write_vocab(self.root, SIZES, items(f"n{self.vocab}-"), version=f"v{self.vocab}")

    async def decide(self):
        found = (await get(self.server.admin, "/admin/v1/snapshots")).json()["snapshots"]
        decision = self.random.choice(("rollback", "promote", "pin"))
        return (await self.server.post(f"snapshots/{self.random.choice(found)['id']}:{decision}")).status

    async def promote(self):
        wait, version = self.random.choice((0, 0.2, 2)), f"v{self.random.randint(1, self.weights)}"
        return (await self.server.post(f"snapshots:promote?wait={wait}", {"weights": version})).status

    async def unpin(self):
        return (await self.server.post("snapshots:unpin")).status

    async def limits(self):
        new = self.random.choice([one for one in (8, 12, 16) if one != self.batch])
        edit(self.root, f"batch = {self.batch}", f"batch = {new}")
        self.batch = new

    async def wait(self):
        await asyncio.sleep(self.random.uniform(0, 1))

    async def leave(self):
        """Nothing is pinned, and one more good version comes. Returns what has to serve then."""
        await self.unpin()
        await self.good()
        return f"v{self.weights}", f"v{self.vocab}"


async def operated(root, server, seed, acts):
    """Whatever is done in whatever order: every answer is right, and the newest good versions serve at the end."""
    load, operator = Load(server, Truth(root)), Operator(root, server, seed)
    await load.begun()
    for _ in range(acts):
        await operator.act()
        await load.more(1)
    last = await operator.leave()
    await server.settles(serving(*last))
    await load.sees(lambda: all(order[-1] == last for order in load.of_client))
    await server.settles(lambda _: server.live._runtime.active.contract.limits.batch == operator.batch)
    await load.end()
    await server.settles(lambda status: in_force(status) and len(status["snapshots"]) <= 2)  # limits.rollback is 1
    await nobody_failed(server)
    return load, operator


async def test_whatever_an_operator_does_in_whatever_order_every_answer_is_right(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        await operated(root, server, seed=5, acts=14)
