"""The process that exports: it never outlives whoever asked for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from app.config import Limits, SidConfig
from app.engine.apart import export_apart
from app.engine.families.base import ModelFiles
from app.errors import Rejected
from app.runtime.background import Background
from tests.engine.toy import Toy

ENDLESS = """
import os, time
from tests.engine.toy import Toy

class Endless(Toy):
    @classmethod
    def build(cls, files, sid, limits, dtype):
        with open(files.config["tell"], "w") as stream:
            stream.write(f"{os.getpid()}\\n")
        time.sleep(600)
"""
ASKS = """
import sys
from pathlib import Path
import torch
from app.config import Limits, SidConfig
from app.engine.apart import export_apart
from app.engine.families.base import ModelFiles
from endless import Endless

files = ModelFiles({"tell": sys.argv[1]}, Path("."), {})
export_apart(Endless, files, SidConfig(sizes=(4, 5)), Limits(widths=(2, 2)), torch.float32)
"""


def until(true, what, seconds=100.0):
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return found


@pytest.mark.slow
@pytest.mark.timeout(240)  # two processes that import torch: seconds on an idle machine
def test_an_export_ends_with_the_process_that_asked_for_it_however_that_ends(tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    tell = tmp_path / "pid"
    paths = os.pathsep.join([str(tmp_path), os.getcwd(), os.environ.get("PYTHONPATH", "")])  # noqa: PTH109
    with subprocess.Popen([sys.executable, "-c", ASKS, tell], env={**os.environ, "PYTHONPATH": paths}) as asks:
        try:
            until(lambda: asks.poll() is not None or (tell.exists() and tell.read_text().endswith("\n")), "begun")
            assert asks.poll() is None
            other = int(tell.read_text())
            assert (os.getpgid(other), other != asks.pid) == (os.getpgid(asks.pid), True)
        finally:
            asks.kill()
    until(lambda: _gone(other), "the export ends, too")


class Nice(Toy):
    """Says how its process gives way, as what is wrong."""

    @classmethod
    def build(cls, *_):
        raise Rejected("bad_config", f"nice {os.nice(0)}")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_export_gives_way_where_it_is_asked_for_beside_requests_and_hurries_at_a_start():
    own = os.nice(0)
    if own:
        pytest.skip("this process gives way itself")

    def said():
        with pytest.raises(Rejected) as caught:
            export_apart(Nice, ModelFiles({}, Path(), {}), SidConfig(sizes=(4, 5)), Limits(), torch.float32)
        return caught.value.message

    async def asked(heavy):
        background = Background("test", heavy=heavy)
        try:
            return await background.run(said)
        finally:
            background.close()

    assert asyncio.run(asked(False)) == "nice 0"
    assert asyncio.run(asked(True)) == "nice 10"


def _gone(pid: int) -> bool:
    """Whether a process has ended; as one that nobody has asked after yet, it has."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:  # noqa: PTH123
            return stream.read().rpartition(b")")[2].split()[0] in {b"Z", b"X"}
    except (FileNotFoundError, ProcessLookupError):
        return True
