"""What passes is tried again, and nothing else is."""

from __future__ import annotations

import shutil

from app.errors import Rejected
from app.runtime import artifact_updates, contracts, live, retries
from app.runtime.retries import FIRST_S, LONGEST_S, Retries
from tests import support
from tests.live_support import live_server
from tests.runtime.test_cutover import edit, serving, state_of, weights, world


def test_the_next_try_comes_later_each_time_and_once():
    now = [0.0]
    tries = Retries(lambda: now[0])
    for wait in (FIRST_S, 2 * FIRST_S, 4 * FIRST_S):
        tries.refused("v2", "export_failed")
        now[0] += wait - 0.1
        assert tries.due() == ()
        now[0] += 0.2
        assert (tries.due(), tries.due()) == (("v2",), ())
    for _ in range(20):
        tries.refused("v2", "export_failed")
    now[0] += LONGEST_S
    assert tries.due() == ("v2",)
    tries.refused("v2", "export_failed")
    tries.refused("v2", "not_finite")  # what it is now does not pass
    tries.refused("v3", "bad_family")
    now[0] += 10 * LONGEST_S
    assert tries.due() == ()


def failing(monkeypatch, times):
    """An export that fails as often as `times` says; nobody waits long for the next."""
    left = [times]

    def export(*args):
        if left[0]:
            left[0] -= 1
            raise Rejected("export_failed", "Cannot allocate memory", location="contracts")
        return support.not_exported(*args)

    monkeypatch.setattr(contracts, "export_apart", export)
    monkeypatch.setattr(retries, "FIRST_S", 0.01)
    monkeypatch.setattr(artifact_updates, "PERIOD_S", 0.1)
    monkeypatch.setattr(live, "RETRY_PERIOD_S", 0.1)
    return left


async def test_a_start_that_could_not_export_tries_again_without_a_touch(tmp_path, monkeypatch):
    root = world(tmp_path)
    shutil.rmtree(root / "contracts")
    left = failing(monkeypatch, 2)
    async with live_server(root, ready=False) as server:
        await server.settles(lambda status: any(one.startswith("export_failed") for one in status["reasons"]))
        await server.ready()
        assert left == [0]
        assert serving("v1", "v1")(await server.status())


async def test_versions_and_edits_that_could_not_be_exported_are_tried_again(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        before = await server.status()
        shutil.rmtree(root / "contracts")
        left = failing(monkeypatch, 1)
        weights(root, "v2", 1)
        await server.settles(serving("v2"))
        (line,) = server.events("artifact_rejected")
        assert (line["code"], line["version"], left) == ("export_failed", "v2", [0])
        shutil.rmtree(root / "contracts")
        left[0] = 1
        edit(root, "context = ", "context = 1")
        status = await server.settles(lambda status: status["active"]["contract"] != before["active"]["contract"])
        assert [line["code"] for line in server.events("deployment_rejected")] == ["export_failed"]
        assert state_of(status, "weights", "v2")["state"] == "active"


async def test_what_is_wrong_with_a_version_is_not_tried_again(tmp_path, monkeypatch):
    root = world(tmp_path)
    monkeypatch.setattr(retries, "FIRST_S", 0.0)
    async with live_server(root) as server:
        weights(root, "v2", 1, ghost=support.onerec_weights(support.onerec_config((4, 5, 6)), 0).popitem()[1])
        await server.settles(lambda status: state_of(status, "weights", "v2")["state"] == "rejected")
        await server.live._artifacts.check()
        assert len(server.events("artifact_rejected")) == 1
