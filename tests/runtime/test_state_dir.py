"""The server's own files: whole or not there, whoever else writes beside it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from app.runtime import state_dir

WRITES = """
import sys
from pathlib import Path
from app.runtime import state_dir

for n in range(200):
    state_dir.write(Path(sys.argv[1]), b"%d" % n * 5000)
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_another_process_is_writing_is_not_taken_away(tmp_path):
    stream, name = state_dir._temporary(tmp_path)
    state_dir.clean(tmp_path)
    assert names(tmp_path) == [os.path.basename(name)]  # noqa: PTH119
    stream.close()
    state_dir.clean(tmp_path)
    assert names(tmp_path) == []


def test_what_a_killed_writer_has_left_is_taken_away(tmp_path):
    stuck = "import sys, time; from pathlib import Path; from app.runtime import state_dir\n"
    stuck += "held = state_dir._temporary(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", stuck, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        state_dir.clean(tmp_path)
        assert len(names(tmp_path)) == 1
        process.send_signal(signal.SIGKILL)
    (tmp_path / ".tmp-link").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / ".tmp-pipe")
    state_dir.clean(tmp_path)
    assert names(tmp_path) == [".tmp-link"]


def test_writers_and_cleaners_of_several_processes_do_not_disturb_each_other(tmp_path):
    file, done = tmp_path / "pin.json", threading.Event()
    with subprocess.Popen([sys.executable, "-c", WRITES, file]) as other:

        def clean():
            while not done.is_set():
                state_dir.clean(tmp_path)

        cleaner = threading.Thread(target=clean)
        cleaner.start()
        try:
            while other.poll() is None or not file.exists():
                state_dir.write(file, b"7" * 5000)
                data = state_dir.read(file)
                assert data is not None
                assert len(data) % 5000 == 0
                assert set(data) <= set(b"0123456789")
        finally:
            done.set()
            cleaner.join()
        assert other.wait() == 0
    assert names(tmp_path) == ["pin.json"]


@pytest.mark.parametrize("links", [True, False])
def test_of_many_who_make_a_file_that_is_not_there_one_does(tmp_path, monkeypatch, links):
    if not links:

        def refuse(*_):
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    file, found = tmp_path / "state" / "unit_salt", []

    def make(number):
        state_dir.create(file, b"%d" % number * 64)
        found.append(file.read_bytes())

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8 if links else 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {file.read_bytes()}
    state_dir.create(file, b"late")
    assert found[0] == file.read_bytes() != b"late"
    assert names(tmp_path / "state") == ["unit_salt"]
