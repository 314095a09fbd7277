"""What is refused gives its weight slot back at once: nothing that it leaves waits for a garbage collection.

An exception's traceback holds every frame that it came through, with all that was loaded there; a future or a local
variable that holds the exception in turn makes a ring of that, and slots are few: the next version would wait.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from app.errors import Rejected
from app.runtime import preparing, reading, stage
from app.runtime.expectations import Requests
from app.runtime.steps import StepLoop
from app.runtime.survey import Survey, survey
from tests import support
from tests.api.support import ask
from tests.live_support import live_server
from tests.runtime.test_cutover import SIZES, items, serving, state_of, weights, world

CANARY = SimpleNamespace(
    kind="weights", version="v2", head=SimpleNamespace(other="", policy=""), cases=(), fits=lambda _: True
)


def refuse(*_, **__):
    found = [Rejected("made_up", "a test says so")]
    raise Rejected.together(found)


def broken(*_, **__):
    raise RuntimeError("a test says so")


def exhausted(*_, **__):
    raise MemoryError("a test says so")


def does_not_go_together(server, patch):
    patch.setattr(preparing, "bind", refuse)


def changes_while_it_is_read(server, patch):
    patch.setattr(reading, "_check_unchanged", refuse)


def comes_with_a_bad_vocab(server, patch):
    patch.setattr(preparing, "read_fitting_vocab", refuse)


def has_no_room_for_its_state(server, patch):
    patch.setattr(server.live._runtime, "allocate", refuse)


def takes_the_last_memory(server, patch):
    patch.setattr(server.live._runtime, "allocate", exhausted)


def takes_a_policy_away(server, patch):
    patch.setattr(stage, "_check_kept", refuse)


def answers_otherwise(server, patch):
    async def expect(*_):
        return Rejected("made_up", "a test says so")

    patch.setattr(stage, "read_canary", lambda *_: CANARY)
    patch.setattr(server.live._runtime, "expect", expect)


def cannot_be_asked(server, patch):
    patch.setattr(stage, "read_canary", lambda *_: CANARY)
    patch.setattr(Requests, "under", refuse)


def breaks_when_it_is_tried(server, patch):
    patch.setattr(StepLoop, "_leaving", broken)


def has_a_bad_canary(server, patch):
    patch.setattr(stage, "read_canary", refuse)


WAYS = (
    does_not_go_together, changes_while_it_is_read, comes_with_a_bad_vocab, has_no_room_for_its_state,
    takes_the_last_memory, takes_a_policy_away, answers_otherwise, cannot_be_asked, has_a_bad_canary,
    breaks_when_it_is_tried,
)  # fmt: skip


def refused(status):
    return "rejected" in {state_of(status, kind, "v2")["state"] for kind in ("weights", "vocab")}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_version_that_is_refused_gives_its_slot_back_at_once(tmp_path, monkeypatch, no_collections, way):
    root = world(tmp_path)
    async with live_server(root) as server:
        slots = server.live._runtime.active.engine.slot.slots
        with monkeypatch.context() as patch:
            way(server, patch)
            support.write_vocab(root, SIZES, items("b"), version="v2")
            weights(root, "v2", 1, {"vocab": ["v2"]})
            await server.settles(refused)
            await server.settles(lambda _: slots.lent == 1)
        assert serving("v1")(await server.status())


async def test_a_decision_that_is_refused_holds_no_snapshot(tmp_path, monkeypatch, no_collections):
    root = world(tmp_path)
    async with live_server(root) as server:
        slots = server.live._runtime.active.engine.slot.slots
        weights(root, "v2", 1)
        old = (await server.settles(serving("v2")))["history"][0]["to"]
        with monkeypatch.context() as patch:
            patch.setattr(server.live._artifacts.stage, "promote", refuse)
            assert (await server.post(f"snapshots/{old}:rollback")).status == 422
        for number in range(3, 6):  # v1 and v2 go as newer ones come
            weights(root, f"v{number}", number)
            await server.settles(serving(f"v{number}"))
        await server.settles(lambda _: slots.lent == 2)


def alive():
    gc.collect()
    return sum(type(one) is Survey for one in gc.get_objects())


def test_surveys_do_not_hold_the_ones_before(tmp_path):
    root = world(tmp_path)
    (root / "release.json").write_text("{")
    weights(root, "v2", 1)
    (root / "weights" / "v2" / "MANIFEST.json").write_text("{")
    seen = survey(root, root / "state")
    before = alive()
    for number in range(50):
        (root / "weights" / "v2" / "MANIFEST.json").write_text("{" + " " * number)
        seen = survey(root, root / "state", seen)
    assert (seen.problem.code, seen.candidates["weights"][0].problem.code) == ("bad_json", "manifest_invalid")
    assert alive() <= before + 1


async def test_a_request_that_fails_holds_no_snapshot(tmp_path, monkeypatch, no_collections):
    root = world(tmp_path)
    async with live_server(root) as server:
        slots = server.live._runtime.active.engine.slot.slots
        with monkeypatch.context() as patch:
            patch.setattr(StepLoop, "_leaving", broken)
            for _ in range(3):
                reply = await ask(server.public, {"context": {"history": ["i1"]}, "k": 3}, path="/v1/recommend")
                assert reply.status == 500
        told = {line["request_id"]: line["exception"] for line in server.events("request_failed")}
        assert set(told) == {line["request_id"] for line in server.events("request")}
        assert all("a test says so" in str(exception) for exception in told.values())
        for number in range(2, 5):
            weights(root, f"v{number}", number)
            await server.settles(serving(f"v{number}"))
        await server.settles(lambda _: slots.lent == 2)
