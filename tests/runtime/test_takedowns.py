"""Take-downs are an exclude set that every request has, exact with whatever a request excludes beside it."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import Rejected
from app.runtime import loader, takedown_updates
from app.runtime.takedowns import KEPT, NOTHING, Takedowns, keep, kept, load_takedowns
from app.vocab.publish import commit, draft
from tests import support
from tests.live_support import live_server
from tests.runtime.test_cutover import takedown, world

SIZES = (3, 3, 3)
DEPLOYMENT = support.deployment_of(SIZES)
VOCAB = support.catalogue(np.repeat(support.random_sids(SIZES, 15), 2, axis=0), SIZES)
SNAPSHOT = support.snapshot_of(support.onerec_engine(SIZES, DEPLOYMENT.limits), VOCAB, DEPLOYMENT)
ITEMS = st.lists(st.integers(0, 29), max_size=30)


def takedowns(items):
    return Takedowns("v1", "d", "now", tuple(f"i{item}" for item in items))


@given(ITEMS, ITEMS)
def test_what_is_taken_down_and_what_is_excluded_exhaust_together(down, exclude):
    snapshot = SNAPSHOT.having(takedowns=takedowns(down))
    found = snapshot.excluding(np.array(exclude, np.int64))
    union = sorted({*down, *exclude})
    if not union:
        assert found is None
        return
    assert found.items.tolist() == union
    for got, want in zip(found.nodes, VOCAB.dead(np.array(union)), strict=True):
        assert got.tolist() == want.tolist()


@settings(max_examples=20)
@given(ITEMS, ITEMS)
def test_an_answer_is_that_of_a_request_which_excludes_them_all(down, exclude):
    snapshot = SNAPSHOT.having(takedowns=takedowns(down))
    ids = [f"i{item}" for item in exclude]
    together = [f"i{item}" for item in {*down, *exclude}]
    one = support.run_batch([support.job_of(snapshot, DEPLOYMENT, ["i1"], k=30, exclude=tuple(ids))])[0]
    other = support.run_batch([support.job_of(SNAPSHOT, DEPLOYMENT, ["i1"], k=30, exclude=tuple(together))])[0]
    assert one.items.tolist() == other.items.tolist()
    assert one.scores.tolist() == other.scores.tolist()
    assert not set(one.items.tolist()) & set(down)


def test_requests_of_different_take_downs_share_a_batch():
    after = SNAPSHOT.having(takedowns=takedowns([3, 4]))
    assert after.batch_key == SNAPSHOT.batch_key
    assert after.id != SNAPSHOT.id
    jobs = [support.job_of(snapshot, DEPLOYMENT, ["i1"], k=30) for snapshot in (SNAPSHOT, after)]
    both = support.run_batch(jobs)
    alone = [support.run_batch([job])[0] for job in jobs]
    for got, want in zip(both, alone, strict=True):
        assert got.items.tolist() == want.items.tolist()


def test_unknown_and_repeated_ids_are_nobodys_fault():
    assert takedowns([]).items(VOCAB).tolist() == []
    assert Takedowns("v1", "d", "", ("i3", "gone", "i3", "i1")).items(VOCAB).tolist() == [1, 3]
    assert SNAPSHOT.having(takedowns=NOTHING).gone is None


def publish(root, data, name="items.txt"):
    with draft(root, "takedowns") as made:
        made.write(name, [data])
        commit(made, "takedowns", "v1", "tests", {})
    return root / "takedowns" / "v1"


def test_a_list_is_read_byte_for_byte(tmp_path):
    found, manifest = load_takedowns(publish(tmp_path, "a\nü b\r\n 7\n".encode()))
    assert found.ids == ("a", "ü b", " 7")
    assert (found.version, found.digest) == ("v1", manifest.digest)


@pytest.mark.parametrize(
    ("data", "name", "code", "place"),
    [
        (b"\xff\n", "items.txt", "not_utf8", "items.txt"),
        (b"a\n\nb\n", "items.txt", "bad_id", "items.txt: line 2"),
        (b"a" * 513, "items.txt", "bad_id", "items.txt: line 1"),
        (b"a\n", "other.txt", "file_missing", "items.txt"),
    ],
)
def test_a_bad_list_is_refused_with_its_line(tmp_path, data, name, code, place):
    with pytest.raises(Rejected) as refused:
        load_takedowns(publish(tmp_path, data, name))
    assert (refused.value.code, refused.value.location) == (code, place)


@pytest.mark.parametrize("data", [b"", b"[", b"null", b"{}", b'{"ids": ["\\ud800"]}', b"\xff", b'{"x":' * 100_000])
def test_what_is_no_list_in_the_servers_own_files_is_none(tmp_path, data):
    keep(tmp_path, Takedowns("v1", "d", "now", ("i1",)))
    assert kept(tmp_path).ids == ("i1",)
    (tmp_path / KEPT).write_bytes(data)
    assert kept(tmp_path) == NOTHING


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("at_start", [True, False])
async def test_a_list_that_cannot_be_kept_counts_is_said_and_is_kept_when_there_is_room(
    tmp_path, monkeypatch, at_start
):
    root = world(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(loader, "keep", full)
        disk.setattr(takedown_updates, "keep", full)
        if at_start:
            takedown(root, "v1", ["a1"])
        async with live_server(root) as server:
            if not at_start:
                takedown(root, "v1", ["a1"])
            status = await server.settles(lambda status: status["unsaved"])
            assert status["active"]["takedowns"]["version"] == "v1"
            [why] = status["unsaved"]
            assert (why["code"], why["location"]) == ("takedowns_not_kept", "state/takedowns.json")
            assert kept(root / "state").version == ""
            disk.undo()
            await server.settles(lambda status: status["unsaved"] == [])
            assert kept(root / "state").ids == ("a1",)
            assert len(server.events("takedowns_not_kept")) == len(server.events("takedowns_kept")) == 1
