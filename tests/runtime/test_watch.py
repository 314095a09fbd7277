"""Scans tell what a folder holds; watches only hint, and come back from whatever ends them."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
from contextlib import asynccontextmanager

import pytest
import watchfiles

from app.runtime import watch
from app.runtime.background import Background
from app.runtime.logs import make_log
from app.runtime.watch import Listing, Watch, scan, settled
from tests.api.support import PATIENCE_S, until


def test_a_scan_lists_names_sizes_and_digests(tmp_path):
    (tmp_path / "a.yaml").write_text("x")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.yaml").write_text("yy")
    (tmp_path / ".hidden").write_text("z")
    listing = scan(tmp_path)
    assert [(name, size) for name, size, _ in listing.files] == [("a.yaml", 1), ("sub/b.yaml", 2)]
    assert listing.sha("a.yaml") == "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    assert listing.sha("nope") is None
    assert scan(tmp_path / "nope") == Listing(False)


def test_a_scan_sees_what_times_do_not(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("one")
    before, times = scan(tmp_path), file.stat()
    file.write_text("two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert scan(tmp_path) != before
    file.write_text("one")
    os.utime(file)
    assert scan(tmp_path) == before


def test_a_scan_follows_links_and_survives_odd_entries(tmp_path):
    folder = tmp_path / "policies"
    (folder / "..d1").mkdir(parents=True)
    (folder / "..d2").mkdir()
    (folder / "..d1" / "p.yaml").write_text("one")
    (folder / "..d2" / "p.yaml").write_text("two")
    (folder / "..data").symlink_to("..d1")
    (folder / "p.yaml").symlink_to("..data/p.yaml")
    (folder / "loop.yaml").symlink_to("loop.yaml")
    os.mkfifo(folder / "pipe.yaml")
    before = scan(folder)
    assert [name for name, _, _ in before.files] == ["loop.yaml", "p.yaml", "pipe.yaml"]
    (folder / "..data_tmp").symlink_to("..d2")
    (folder / "..data_tmp").rename(folder / "..data")
    assert scan(folder).sha("p.yaml") != before.sha("p.yaml")


def test_nothing_is_opened_behind_a_link_that_leads_out(tmp_path, monkeypatch):
    folder, outside = tmp_path / "root" / "policies", tmp_path / "outside"
    folder.mkdir(parents=True)
    outside.mkdir()
    (outside / "p.yaml").write_text("secret")
    (folder / "p.yaml").symlink_to(outside / "p.yaml")
    (folder / "experiments").symlink_to(outside)
    assert scan(folder) == Listing(True, (("experiments", -1, "outside"), ("p.yaml", -1, "outside")))
    (tmp_path / "root" / "link").symlink_to("policies")
    assert scan(tmp_path / "root" / "link").present
    (tmp_path / "root" / "out").symlink_to(outside)
    assert scan(tmp_path / "root" / "out") == Listing(False)
    (tmp_path / "root" / "round").symlink_to("round")
    assert scan(tmp_path / "root" / "round") == Listing(False)


def test_a_huge_file_costs_its_first_part(tmp_path):
    with (tmp_path / "big.yaml").open("wb") as stream:
        stream.truncate(50 << 20)
    before = scan(tmp_path)
    assert before.files[0][1] == 50 << 20
    with (tmp_path / "big.yaml").open("r+b") as stream:
        stream.seek(40 << 20)
        stream.write(b"x")
    os.utime(tmp_path / "big.yaml", ns=(1, 1))
    assert scan(tmp_path) != before


@pytest.fixture
def background():
    made = Background("test")
    yield made
    made.close()


async def test_what_is_read_belongs_to_a_folder_that_stood_still(tmp_path, background):
    file = tmp_path / "p.yaml"
    file.write_text("0")
    reads = []

    def read(directory):
        reads.append((directory / "p.yaml").read_text())
        if len(reads) < 4:
            file.write_text(str(len(reads)))  # somebody is still writing
        return reads[-1]

    listing, text = await settled(tmp_path, read, background, 0.001)
    assert (text, listing) == ("3", scan(tmp_path))
    assert reads == ["0", "1", "2", "3"]


async def test_a_folder_that_never_stands_still_is_read_later(tmp_path, background):
    counter = iter(range(100))
    (tmp_path / "p").write_text("")
    found = await settled(tmp_path, lambda d: (d / "p").write_text(str(next(counter))), background, 0.0, tries=3)
    assert found is None


@asynccontextmanager
async def watching(root, **kwargs):
    made = Watch(root, ("policies",), make_log(io.BytesIO()), **kwargs)
    hint = made.hint()
    task = asyncio.create_task(made.run())
    try:
        yield made, hint
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def hinted(hint, act):
    """Whether an act is followed by a hint."""
    hint.clear()
    act()
    await asyncio.wait_for(hint.wait(), PATIENCE_S)
    return True


async def test_changes_are_hinted_even_after_the_folder_was_replaced_and_made_again(tmp_path):
    folder = tmp_path / "policies"
    folder.mkdir()
    async with watching(tmp_path) as (made, hint):
        await until(lambda: made.status()["mode"] == "events")
        assert await hinted(hint, lambda: (folder / "a.yaml").write_text("1"))
        (tmp_path / "next").mkdir()
        assert await hinted(hint, lambda: (folder.rename(tmp_path / "old"), (tmp_path / "next").rename(folder)))
        await until(lambda: made.status()["rearmed"] >= 1)
        assert await hinted(hint, lambda: (folder / "b.yaml").write_text("2"))
        assert await hinted(hint, lambda: shutil.rmtree(folder))
        assert await hinted(hint, lambda: (folder.mkdir(), (folder / "c.yaml").write_text("3")))
        rearmed = made.status()["rearmed"]
        await until(lambda: made.status()["rearmed"] >= rearmed and made.status()["mode"] == "events")
        await asyncio.sleep(0)
        assert await hinted(hint, lambda: (folder / "c.yaml").write_text("4"))


async def test_without_inotify_it_says_polling_and_recovers(tmp_path, monkeypatch):
    real, left = watchfiles.awatch, [3]

    def failing(*paths, **kwargs):
        if left[0]:
            left[0] -= 1
            raise OSError(24, "Too many open files")
        return real(*paths, **kwargs)

    monkeypatch.setattr(watchfiles, "awatch", failing)
    monkeypatch.setattr(watch, "RETRY_S", 0.05)
    (tmp_path / "policies").mkdir()
    async with watching(tmp_path) as (made, hint):
        await asyncio.wait_for(hint.wait(), PATIENCE_S)  # whoever waits is told to look for himself
        assert made.status()["mode"] == "polling"
        assert "Too many open files" in str(made.status()["reason"])
        await until(lambda: made.status()["mode"] == "events")
        assert "reason" not in made.status()
        assert await hinted(hint, lambda: (tmp_path / "policies" / "a.yaml").write_text("1"))


async def test_a_watch_that_dies_is_armed_again(tmp_path, monkeypatch):
    real, armed = watchfiles.awatch, []

    async def dying(*paths, **kwargs):
        armed.append(paths)
        if len(armed) == 1:
            yield set()
            raise RuntimeError("error in underlying watcher")
        async for found in real(*paths, **kwargs):
            yield found

    monkeypatch.setattr(watchfiles, "awatch", dying)
    monkeypatch.setattr(watch, "RETRY_S", 0.01)
    (tmp_path / "policies").mkdir()
    async with watching(tmp_path) as (made, hint):
        await until(lambda: len(armed) == 2 and made.status()["mode"] == "events")
        await asyncio.sleep(0.05)
        assert await hinted(hint, lambda: (tmp_path / "policies" / "a.yaml").write_text("1"))


async def test_names_that_are_no_text_are_a_change_and_end_no_watch(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "RETRY_S", 3600.0)  # nobody waits as after a watch that has failed
    logged: list[str] = []
    monkeypatch.setattr(Watch, "_say", lambda _, problem: logged.append(problem))
    folder = tmp_path / "policies"
    folder.mkdir()

    def odd(name):
        return os.fsencode(folder) + b"/" + name + b"\xff\xfe"

    async with watching(tmp_path) as (made, hint):
        await until(lambda: made.status()["mode"] == "events")
        for act in (lambda: os.mkdir(odd(b"d")), lambda: os.close(os.open(odd(b"f"), os.O_CREAT))):  # noqa: PTH102
            assert await hinted(hint, act)
            await until(lambda: made.status()["mode"] == "events")
        assert await hinted(hint, lambda: (folder / "a.yaml").write_text("1"))
    assert logged == []


async def test_a_folder_that_may_not_be_read_keeps_nobody_from_watching_the_others(tmp_path, monkeypatch):
    closed, real, shut = tmp_path / "policies" / "closed", os.access, [True]
    closed.mkdir(parents=True)  # nothing is forbidden to root
    monkeypatch.setattr(watch.os, "access", lambda path, mode: not (shut[0] and path == closed) and real(path, mode))
    monkeypatch.setattr(watch, "REARM_S", 0.05)
    async with watching(tmp_path) as (made, hint):
        await until(lambda: made.status()["mode"] == "events")
        assert await hinted(hint, lambda: (tmp_path / "policies" / "a.yaml").write_text("1"))
        assert made.status() == {"mode": "events", "rearmed": 0}
        shut[0] = False
        await until(lambda: made.status()["rearmed"] == 1)
        assert await hinted(hint, lambda: (closed / "b.yaml").write_text("1"))


def test_of_very_many_versions_some_are_watched_and_every_folder_is(tmp_path):
    for name in ("weights/v1", *(f"policies/{n}" for n in range(watch.MAX_PLACES))):
        (tmp_path / name).mkdir(parents=True)
    places = [path for path, _ in watch._places(tmp_path, ("policies", "weights"))]
    assert places[:3] == [str(tmp_path / name) for name in ("", "policies", "weights")]
    assert len(places) == watch.MAX_PLACES


async def test_a_root_that_is_not_there_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "RETRY_S", 0.02)
    async with watching(tmp_path / "later") as (made, _):
        await until(lambda: "not there" in str(made.status().get("reason")))
        (tmp_path / "later").mkdir()
        await until(lambda: made.status()["mode"] == "events")


async def test_events_can_be_switched_off(tmp_path):
    made = Watch(tmp_path, (), make_log(io.BytesIO()), events=False)
    await made.run()
    assert made.status() == {"mode": "polling", "rearmed": 0, "reason": "events are switched off"}
