"""Background threads and the server's own files."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import weakref

import pytest
import torch

from app.policies.last_good import Kept
from app.policies.source import Source
from app.runtime import background, state_dir
from app.runtime.background import Background


async def test_calls_run_in_order_and_give_what_they_gave():
    background = Background("test")
    seen = []
    results = await asyncio.gather(*(background.run(lambda n=n: seen.append(n) or n) for n in range(20)))
    assert results == seen == list(range(20))
    with pytest.raises(ZeroDivisionError):
        await background.run(lambda: 1 // 0)
    assert await background.run(lambda: threading.current_thread().name) == "widebeam-test"
    background.close()
    background._thread.join(60)
    assert not background._thread.is_alive()


async def test_whoever_does_not_wait_any_more_disturbs_nobody():
    background, entered, go = Background("test"), threading.Event(), threading.Event()
    task = asyncio.create_task(background.run(lambda: (entered.set(), go.wait(60))))
    await asyncio.to_thread(entered.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await background.run(lambda: 5) == 5
    background.close()


async def test_an_idle_thread_holds_nothing_in_memory():
    class Big:
        pass

    background, big = Background("test"), Big()
    gone = weakref.ref(big)
    assert await background.run([big].copy)
    del big
    await background.run(lambda: None)
    gc.collect()
    assert gone() is None
    background.close()


async def test_only_heavy_threads_give_way():
    heavy, light = Background("heavy", heavy=True), Background("light")
    nice = [await one.run(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) for one in (heavy, light)]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    expected = sys.platform == "linux" and own < 19  # elsewhere threads have no priority of their own
    assert (nice[0] > nice[1]) == expected
    assert nice[1] == own
    heavy.close()
    light.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
async def test_a_heavy_thread_computes_on_one_core_and_others_keep_theirs():
    torch.set_num_threads(2)
    try:
        heavy, light = Background("heavy", heavy=True), Background("light")
        assert await heavy.run(_cores) == 1
        assert await light.run(_cores) == 2
        assert _cores() == 2
        heavy.close()
        light.close()
    finally:
        torch.set_num_threads(1)


def test_heavy_threads_that_start_together_do_not_take_one_core_for_everybodys_number(monkeypatch):
    said, counted = torch.set_num_threads, torch.get_num_threads
    said(3)
    read, done, found = threading.Event(), threading.Event(), []
    second = threading.Thread(target=background.use_one_core)

    def says(number):
        said(number)
        if threading.current_thread() is first and number == 1:
            second.start()
            read.wait(0.5)  # somebody comes at the worst moment, where that is possible

    def counts():
        number = counted()
        if threading.current_thread() is second:
            read.set()
            done.wait(60)
        return number

    first = threading.Thread(target=lambda: (background.use_one_core(), done.set()))
    monkeypatch.setattr(torch, "set_num_threads", says)
    monkeypatch.setattr(torch, "get_num_threads", counts)
    try:
        first.start()
        first.join()
        second.join()
        third = threading.Thread(target=lambda: found.append(counted()))
        third.start()
        third.join()
        assert found == [3]
    finally:
        said(1)


def _cores() -> int:
    torch.ones(1 << 18).sin()  # a thread has its number when it first computes
    return torch.get_num_threads()


def test_a_heavy_thread_gives_way_to_a_process_that_gives_way_itself():
    found = []

    def gives_way():
        own = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own)
        heavy = Background("heavy", heavy=True)
        heavy._work.put(lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) - own))
        heavy._work.put(None)
        heavy._thread.join(60)

    thread = threading.Thread(target=gives_way)
    thread.start()
    thread.join()
    assert found[0] >= 0


def test_a_load_that_takes_long_does_not_keep_a_server_from_ending():
    background, go = Background("test"), threading.Event()
    background._work.put(lambda: go.wait(100))
    began = time.monotonic()
    background.close()
    assert time.monotonic() - began < 60
    go.set()


def kept(name, text):
    return Kept(name, {name: Source(f"policies/{name}.yaml", text.encode())})


def test_last_good_texts_come_back_and_what_is_gone_goes(tmp_path):
    first = {"a": kept("a", "1"), "experiments/x": kept("experiments/x", "2")}
    state_dir.save_last_good(tmp_path, first, {})
    assert state_dir.load_last_good(tmp_path) == first
    second = {"a": kept("a", "3")}
    state_dir.save_last_good(tmp_path, second, first)
    assert state_dir.load_last_good(tmp_path) == second
    (tmp_path / "last_good" / "a.json").write_text("{")
    assert state_dir.load_last_good(tmp_path) == {}


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    state_dir.write(tmp_path / "pin.json", b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        state_dir.write(tmp_path / "pin.json", b"new")
    assert state_dir.read(tmp_path / "pin.json") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["pin.json"]


def test_what_a_killed_process_left_is_taken_away(tmp_path):
    state_dir.write(tmp_path / "last_good" / "a.json", b"x")
    (tmp_path / "last_good" / ".tmp-abc").write_bytes(b"half")
    state_dir.clean(tmp_path)
    assert [path.name for path in (tmp_path / "last_good").iterdir()] == ["a.json"]
    state_dir.clean(tmp_path / "nowhere")
