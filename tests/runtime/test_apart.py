"""Pairs that do not go together: remembered while they are there, tried again when that may help."""

from __future__ import annotations

import shutil

from app.runtime.apart import NO_DEFAULT, Apart
from app.runtime.retries import Retries
from tests.live_support import live_server, until
from tests.runtime.test_cutover import serving, state_of, weights, world


def made(clock):
    retries = Retries(lambda: clock[0])
    return Apart(retries), retries


def test_what_the_policies_refused_is_tried_with_other_policies_and_nothing_else_is():
    apart, _ = made([0.0])
    apart.add(("w1", "v1"), NO_DEFAULT)
    apart.add(("w2", "v1"), "token_missing")
    apart.policies_changed()
    assert list(apart.pairs) == [("w2", "v1")]


def test_what_may_pass_is_tried_again_when_it_is_due():
    clock = [0.0]
    apart, retries = made(clock)
    apart.add(("w1", "v1"), "no_memory")
    apart.add(("w2", "v1"), "token_missing")
    clock[0] = 1000.0
    for what in retries.due():
        apart.again(what)
    assert list(apart.pairs) == [("w2", "v1")]


def test_a_pair_is_forgotten_with_either_of_its_versions():
    clock = [0.0]
    apart, retries = made(clock)
    for pair in (("w1", "v1"), ("w2", "v1"), ("w2", "v2")):
        apart.add(pair, "no_memory")
    apart.keep({"w2", "v2", "v3"})
    assert list(apart.pairs) == [("w2", "v2")]
    clock[0] = 1000.0
    assert retries.due() == (("w2", "v2"),)
    apart.clear()
    assert len(apart) == 0


async def test_a_server_remembers_no_more_than_there_is(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        runtime, artifacts = server.live._runtime, server.live._artifacts

        async def warm(*_, **__):
            return {"base": "it broke"}

        with monkeypatch.context() as patch:
            patch.setattr(runtime, "warm", warm)
            weights(root, "v2", 1)
            await server.settles(lambda status: state_of(status, "weights", "v2")["state"] == "rejected")
            assert len(artifacts._apart) == 1
            shutil.rmtree(root / "weights" / "v2")
            await until(lambda: len(artifacts._apart) == 0)
        weights(root, "v2", 1)  # the same bytes, and now it can be served
        await server.settles(serving("v2"))
