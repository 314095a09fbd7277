import errno
import fcntl
import io
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from msgspec import UNSET, Struct, UnsetType

from app.runtime.logs import PIPE_BYTES, Line, StdlibHandler, make_log


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_the_event_first():
    stream = io.BytesIO()
    make_log(stream).bind(snapshot="s").info("loaded", version="v1\nforged", shape=(1, 2), odd=object)
    assert stream.getvalue().count(b"\n") == 1
    (line,) = lines(stream)
    assert list(line) == ["at", "level", "event", "snapshot", "version", "shape", "odd"]
    assert (line["level"], line["event"], line["version"]) == ("info", "loaded", "v1\nforged")


@pytest.mark.parametrize(("level", "seen"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels_below_the_deployment_s_are_not_written(level, seen):
    stream = io.BytesIO()
    log = make_log(stream, level)
    for write in (log.debug, log.info, log.warning, log.error):
        write("event")
    assert len(lines(stream)) == seen


def test_an_error_carries_its_traceback_once():
    stream = io.BytesIO()
    try:
        int("no number")
    except ValueError as error:
        make_log(stream).error("failed", exc_info=error)
    assert lines(stream)[0]["exception"].count("ValueError: ") == 1


def test_what_is_no_text_is_written_all_the_same():
    stream = io.BytesIO()
    make_log(stream).error("x", name="\ud800", thing={1, 2})
    assert {"event": "x", "name": "\ud800", "thing": "{1, 2}"}.items() <= lines(stream)[0].items()


class Versions(Struct):
    snapshot: str


class Told(Line, kw_only=True):
    event: str = "told"
    name: str
    n: int | None = None
    versions: Versions | UnsetType = UNSET
    arms: dict[str, str] | UnsetType = UNSET


def test_a_line_of_known_facts_reads_as_one_that_the_processors_made():
    stream = io.BytesIO()
    log = make_log(stream, "debug")
    log.line(Told(level="debug", name="a\nb", versions=Versions("s")))
    log.debug("told", name="a\nb", n=None, versions={"snapshot": "s"})
    direct, processed = (line.partition(b'"level"') for line in stream.getvalue().splitlines())
    assert direct[1:] == processed[1:]
    assert len(direct[0]) == len(processed[0])  # the time


@pytest.mark.parametrize(("least", "seen"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_a_line_below_the_deployment_s_level_is_not_written_and_who_asks_is_told(least, seen):
    stream = io.BytesIO()
    log = make_log(stream, least)
    levels = ("debug", "info", "warning", "error")
    for level in levels:
        log.line(Told(level=level, name="x"))
    assert [line["level"] for line in lines(stream)] == [level for level in levels if log.writes(level)]
    assert len(lines(stream)) == seen


def test_a_line_whose_name_is_no_text_is_written_all_the_same():
    stream = io.BytesIO()
    make_log(stream).line(Told(name="\ud800"))
    assert list(lines(stream)[0]) == ["at", "level", "event", "name", "n"]
    assert lines(stream)[0]["name"] == "\ud800"


def test_records_of_other_libraries_become_lines():
    stream = io.BytesIO()
    logger = logging.getLogger("some.library")
    handler = StdlibHandler(make_log(stream))
    logger.addHandler(handler)
    try:
        logger.warning("odd %s", "thing")
        logger.error("bad", exc_info=KeyError("x"))
    finally:
        logger.removeHandler(handler)
    warning, error = lines(stream)
    assert (warning["level"], warning["logger"], warning["message"]) == ("warning", "some.library", "odd thing")
    assert error["level"] == "error"
    assert "KeyError" in error["exception"]


class Disk(io.RawIOBase):
    """A disk with room for `left` bytes, written to without a buffer."""

    def __init__(self, left):
        self.left, self.data = left, b""

    def writable(self):
        return True

    def write(self, data):
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = bytes(data[: self.left])
        self.left, self.data = self.left - len(taken), self.data + taken
        return len(taken)


@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_disk_loses_lines_and_nothing_else_and_says_how_many(buffered):
    disk = Disk(250)
    log = make_log(io.BufferedWriter(disk, 8192) if buffered else disk)
    for number in range(20):
        log.info("event", number=number)
    disk.left = 1 << 20
    log.info("event", number=20)
    log.info("event", number=21)
    whole = []
    for line in disk.data.splitlines():
        try:
            whole.append(json.loads(line))
        except ValueError:
            whole.append("half a line")
    before = whole.index("half a line")
    assert [one["number"] for one in whole[:before]] == list(range(before))
    told, *after = whole[before + 1 :]
    assert (told["level"], told["event"], told["lines"]) == ("warning", "log_lines_lost", 20 - before)
    assert [one["number"] for one in after] == [20, 21]


def test_a_pipe_that_nobody_reads_any_more_ends_no_writer():
    source, sink = os.pipe()
    os.close(source)
    with os.fdopen(sink, "wb", buffering=0) as stream:
        make_log(stream).info("event")


WIDE = pytest.mark.skipif(
    int(Path("/proc/sys/fs/pipe-max-size").read_text()) < PIPE_BYTES, reason="this machine has no wide pipes"
)
PROCESS = """
import sys
from app.runtime.logs import make_log
log = make_log(sys.stderr.buffer)
for number in range(40):
    log.info(sys.argv[1] * (12_000 if number % 2 else 40), number=number)
"""


@WIDE
def test_lines_of_several_processes_are_whole_while_their_reader_is_behind():
    """More than a pipe holds by itself: who waits for room writes in pieces, and another one's line comes between."""
    read, write = os.pipe()
    with os.fdopen(read, "rb") as stream:
        made = [subprocess.Popen([sys.executable, "-c", PROCESS, name], stderr=write) for name in "ab"]
        os.close(write)
        try:
            assert [one.wait(100) for one in made] == [0, 0], "nobody has waited for the reader"
        finally:
            for one in made:
                one.kill()
        found = [json.loads(line) for line in stream]
    for name in "ab":
        assert [one["number"] for one in found if one["event"][0] == name] == list(range(40))


@WIDE
def test_a_pipe_that_holds_more_stays_as_it_is():
    read, write = os.pipe()
    with os.fdopen(read, "rb"), os.fdopen(write, "wb", buffering=0) as stream:
        size = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
        make_log(stream)
        wide = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
        assert wide > size
        make_log(stream)
        assert fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) == wide


def test_lines_of_several_threads_are_whole_however_long_they_are():
    read, write = os.pipe()
    found = []

    def reader():
        with os.fdopen(read, "rb") as stream:
            found.extend(map(json.loads, stream))

    def writer(name, way):
        for number in range(20):
            way(f"{name}{number}" * 20_000)  # more than a pipe holds

    with os.fdopen(write, "wb", buffering=0) as stream:
        log = make_log(stream)
        ways = [log.info, lambda text: log.line(Told(level="info", event=text, name="n"))]
        threads = [threading.Thread(target=reader)]
        threads += [threading.Thread(target=writer, args=pair) for pair in zip("ab", ways, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads[1:]:
            thread.join()
    threads[0].join()
    assert len(found) == 40
