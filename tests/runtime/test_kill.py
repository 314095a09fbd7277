"""The kill switch works alone, survives a restart, and cannot be read half."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from app.errors import InvalidRequest
from app.runtime import state_dir
from app.runtime.kill import MAX_BYTES, KillSwitch
from app.runtime.snapshot import EVERYTHING
from tests import support
from tests.live_support import live_server, until

SIZES = (4, 5, 6)


@pytest.fixture
def places(tmp_path):
    (tmp_path / "policies").mkdir()
    return tmp_path / "policies", tmp_path / "state"


def test_the_file_lists_a_name_a_line(places):
    switch = KillSwitch(*places)
    assert switch.names == frozenset()
    (places[0] / "KILL").write_text("feed_diversity\n\n  explore  # since Monday\n# nothing\n")
    assert switch.take(switch.read()) == {"feed_diversity", "explore"}
    (places[0] / "KILL").write_text("*\n")
    assert switch.take(switch.read()) == {EVERYTHING}
    (places[0] / "KILL").unlink()
    assert switch.take(switch.read()) == frozenset()


def test_what_is_posted_survives_a_restart_and_adds_up_with_the_file(places):
    switch = KillSwitch(*places)
    (places[0] / "KILL").write_text("a\n")
    switch.take(switch.read())
    assert switch.post(["b", "c"], []) == {"a", "b", "c"}
    assert switch.post([], ["a", "c"]) == {"a", "b"}  # the file still says so
    again = KillSwitch(*places)
    assert again.names == {"a", "b"}
    assert again.document() == [
        {"name": "a", "by": "policies/KILL"},
        {"name": "b", "by": "state/killed.json"},
    ]


def test_what_cannot_be_read_changes_nothing(places):
    switch = KillSwitch(*places)
    (places[0] / "KILL").write_text("a\n")
    switch.post(["b"], [])
    switch.take(switch.read())
    (places[1] / "killed.json").write_text("[1, ")
    (places[0] / "KILL").unlink()
    (places[0] / "KILL").mkdir()
    assert switch.take(switch.read()) == {"a", "b"}
    (places[0] / "KILL").rmdir()
    places[0].rename(places[0].parent / "away")  # a folder that is being replaced revives nobody
    assert switch.take(switch.read()) == {"a", "b"}


def test_a_read_that_was_begun_before_a_post_does_not_undo_it(places):
    switch = KillSwitch(*places)
    slow = switch.read()
    switch.post(["a"], [])
    assert switch.take(slow) == {"a"}
    slow = switch.read()
    switch.post([], ["a"])
    assert switch.take(slow) == frozenset()


@pytest.mark.parametrize("name", ["", "x" * 200, "a\nb", "\x00"])
def test_odd_names_are_refused(places, name):
    with pytest.raises(InvalidRequest):
        KillSwitch(*places).post([name], [])


def test_a_killed_policy_is_served_by_the_default_which_cannot_be_killed():
    deployment = support.deployment_of(SIZES)
    engine = support.onerec_engine(SIZES, deployment.limits)
    vocab = support.catalogue(support.random_sids(SIZES, 40), SIZES)
    snapshot = support.snapshot_of(engine, vocab, deployment, {"p": "widebeam: 1\nwidths: [2, 2, 2]\n"})
    assert snapshot.plan("p").policy == "p"
    for killed in ({"p"}, {EVERYTHING}, {"p", "base"}):
        stopped = snapshot.having(killed=frozenset(killed))
        assert stopped.plan("p").policy == "base"
        assert stopped.plan("base").policy == "base"
        assert stopped.plan("nope") is None
        assert stopped.id != snapshot.id
        assert stopped.having(killed=frozenset()).id == snapshot.having(killed=frozenset()).id


def test_a_kill_list_that_cannot_be_read_is_said(tmp_path):
    (tmp_path / "policies").mkdir()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "killed.json").write_text("[[")
    switch = KillSwitch(tmp_path / "policies", tmp_path / "state")
    assert switch.unreadable
    assert "cannot be read" in switch.document()[0]["by"]
    switch.post(["rising"], [])
    assert not switch.unreadable
    assert [entry["name"] for entry in switch.document()] == ["rising"]


def test_a_kill_file_that_cannot_be_read_is_said(places):
    switch = KillSwitch(*places)
    (places[0] / "KILL").mkdir()
    switch.take(switch.read())
    [said] = switch.document()
    assert said["name"] == "?"
    assert said["by"].startswith("policies/KILL, which cannot be read")
    (places[0] / "KILL").rmdir()
    switch.take(switch.read())
    assert switch.document() == []


def test_a_kill_file_that_is_too_large_is_not_cut_but_said(places):
    switch, file = KillSwitch(*places), places[0] / "KILL"
    file.write_text("a\n")
    switch.take(switch.read())
    file.write_text("".join(f"name_{n}\n" for n in range(8000)))
    assert switch.take(switch.read()) == {"a"}
    assert switch.document()[0] == {
        "name": "?",
        "by": "policies/KILL, which has more than 65536 bytes: what it listed before counts",
    }
    file.write_text("a\n" + " " * (MAX_BYTES - 2))  # just so many are read whole
    assert switch.take(switch.read()) == {"a"}
    assert not switch.unlistable


def spoil_folder(places):
    (places[0] / "KILL").unlink()
    (places[0] / "KILL").mkdir()


def spoil_size(places):
    (places[0] / "KILL").write_text("c\n" * MAX_BYTES)


def spoil_link(places):
    (places[0] / "KILL").unlink()
    (places[0] / "KILL").symlink_to("/etc/hostname")


def spoil_place(places):
    places[0].rename(places[0].parent / "away")


@pytest.mark.parametrize("spoil", [spoil_folder, spoil_size, spoil_link, spoil_place])
def test_a_kill_file_that_cannot_be_used_at_a_start_kills_whom_it_listed_before(places, spoil):
    (places[0] / "KILL").write_text("a\nb\n")
    assert KillSwitch(*places).names == {"a", "b"}
    spoil(places)
    for _ in range(2):  # starts
        again = KillSwitch(*places)
        assert again.names == {"a", "b"}
        assert "what it listed before counts" in again.document()[0]["by"]
    again.post(["c"], [])
    assert KillSwitch(*places).names == {"a", "b", "c"}


def test_a_name_that_has_left_the_kill_file_is_not_killed_by_what_was_kept(places):
    (places[0] / "KILL").write_text("a\nb\n")
    switch = KillSwitch(*places)
    (places[0] / "KILL").write_text("b\n")
    assert switch.take(switch.read()) == {"b"}
    spoil_folder(places)
    assert KillSwitch(*places).names == {"b"}
    (places[0] / "KILL").rmdir()
    assert KillSwitch(*places).names == frozenset()
    (places[0] / "KILL").mkdir()
    assert KillSwitch(*places).names == frozenset()


def test_where_nothing_is_known_of_a_kill_file_that_is_said(places):
    (places[0] / "KILL").mkdir()
    assert "whom it lists is not known" in KillSwitch(*places).document()[0]["by"]
    places[1].mkdir()
    (places[1] / "kill_list.json").write_text("[")
    assert KillSwitch(*places).names == frozenset()
    assert "whom it lists is not known" in KillSwitch(*places).document()[0]["by"]


def test_a_kill_list_that_cannot_be_kept_counts_and_is_kept_when_there_is_room(places, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    switch = KillSwitch(*places)
    (places[0] / "KILL").write_text("a\n")
    with monkeypatch.context() as patch:
        patch.setattr(state_dir, "write", full)
        assert switch.take(switch.read()) == {"a"}
        assert switch.unkept == "cannot be written: No space left on device"
    assert switch.take(switch.read()) == {"a"}
    assert not switch.unkept
    spoil_folder(places)
    assert KillSwitch(*places).names == {"a"}


async def test_a_kill_file_that_cannot_be_used_is_logged_once(tmp_path):
    root = support.write_root(tmp_path / "root")
    (root / "policies" / "feed.yaml").write_text("widebeam: 1\n")
    (root / "policies" / "KILL").write_text("feed\n" * 20_000)
    async with live_server(root) as server:
        await until(lambda: server.events("kill_list_unusable"))
        document = await server.policies()
        assert [one["name"] for one in document["killed"]] == ["?"]
        (root / "policies" / "KILL").write_text("feed\n")
        await until(lambda: server.events("killed"))
        [line] = server.events("kill_list_unusable")
    assert line["file"] == "policies/KILL"
    assert line["message"] == "has more than 65536 bytes: whom it lists is not known"


async def test_a_restart_over_a_kill_file_that_cannot_be_used_revives_nobody(tmp_path):
    root = support.write_root(tmp_path / "root", policies={"feed": "widebeam: 1\n"})
    (root / "policies" / "KILL").write_text("feed\n")
    async with live_server(root) as server:
        await server.sees(killed)
    (root / "policies" / "KILL").write_text("feed\n" * 20_000)
    async with live_server(root) as server:
        assert (await server.recommend(policy="feed"))["versions"]["policy"] == "base"
        assert await killed(server)


async def killed(server):
    return (await server.status())["policies"]["feed"]["state"] == "killed"


def test_two_servers_on_one_root_do_not_revive_what_the_other_has_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(state_dir, "alone", partial(state_dir.alone, patience_s=60.0))  # a disk may be slow
    one, two = (KillSwitch(tmp_path / "policies", tmp_path / "state") for _ in range(2))
    one.post(["a"], [])
    assert two.post(["b"], []) == {"a", "b"}
    assert one.post([], ["b"]) == {"a"}
    assert two.take(two.read()) == {"a"}

    def kill(switch, names):
        for name in names:
            switch.post([name], [])

    names = [[f"{letter}{number}" for number in range(30)] for letter in "xy"]
    threads = [threading.Thread(target=kill, args=pair) for pair in zip((one, two), names, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert one.take(one.read()) == {"a", *names[0], *names[1]}


def test_a_kill_waits_for_nobody_for_long(tmp_path):
    switch = KillSwitch(tmp_path / "policies", tmp_path / "state")
    with state_dir.alone(tmp_path / "state"):
        began = time.monotonic()
        assert switch.post(["a"], []) == {"a"}
        assert time.monotonic() - began < 60
