"""`export_family` in a process of its own: an export holds the interpreter for seconds and is a state of its process,
so none is ever made where requests are served.

    python -m app.engine.apart     reads a `Task` as JSON, writes a `Result` as JSON

It never outlives whoever asked: that process holds the other end of a pipe, and lets go of it however it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Final

import msgspec
import torch

from app.config import Limits, SidConfig
from app.engine.families.base import Family, ModelFiles
from app.engine.functions import Function
from app.errors import Fault, Rejected

TIMEOUT_S: Final = 900.0
NICE: Final = 5
"""How much further an export gives way than a thread that gives way itself; others' run as they do."""


class Task(msgspec.Struct, frozen=True):
    """family: "module:class" · dtype: as torch names it · path: where modules are found · lifeline: the pipe that ends
    with whoever asks; the rest as `Family.build`."""

    family: str
    config: dict[str, object]
    directory: str
    shapes: dict[str, tuple[int, ...]]
    sid: SidConfig
    limits: Limits
    dtype: str
    path: tuple[str, ...]
    lifeline: int


class Result(msgspec.Struct, frozen=True):
    """functions, or why there are none: code, message, location."""

    functions: tuple[Function, ...] = ()
    refused: tuple[str, str, str | None] | None = None


def export_apart(
    kind: type[Family], files: ModelFiles, sid: SidConfig, limits: Limits, dtype: torch.dtype
) -> tuple[Function, ...]:
    """Trace a family's functions in another process. Takes seconds; raises Rejected.

    Rejected("export_failed") where that process did not answer (no memory, no more processes): worth another try.
    """
    name = str(dtype).removeprefix("torch.")
    where = f"{kind.__module__}:{kind.__qualname__}", dict(files.config), str(files.directory.absolute())
    try:
        with _lifeline() as held:
            task = Task(*where, dict(files.shapes), sid, limits, name, tuple(sys.path), held)
            done = subprocess.run(
                [sys.executable, "-m", "app.engine.apart"], pass_fds=(held,),
                input=msgspec.json.encode(task), capture_output=True, timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        result = msgspec.json.decode(done.stdout, type=Result) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise Rejected("export_failed", f"no contract could be made: {error}", location="contracts") from error
    if result is None:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        raise Rejected("export_failed", f"no contract could be made: {last[0]}", location="contracts")
    if result.refused is not None:
        code, message, location = result.refused
        raise Rejected(code, message, location=location)
    return result.functions


@contextmanager
def _lifeline() -> Iterator[int]:
    """A pipe that nobody writes to: the end to hand on. It reads as ended when this process lets go of the other."""
    held, own = os.pipe()
    try:
        yield held
    finally:
        os.close(own)
        os.close(held)


def _end_with(held: int) -> None:
    """Wait for the end of whoever asked for this process. It has nobody to tell anything then."""
    os.read(held, 1)
    os._exit(1)


def main() -> None:
    """The other process. What a family prints goes to stderr."""
    if os.nice(0) > 0:  # of the thread that asks: beside requests it gives way, at a start nothing serves yet
        os.nice(NICE)
    torch.set_num_threads(1)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    threading.Thread(target=_end_with, args=(task.lifeline,), daemon=True).start()
    with answer:
        answer.write(msgspec.json.encode(_done(task)))


def _done(task: Task) -> Result:
    from app.engine.export import export_family  # noqa: PLC0415  the tracer is seconds of imports, here only

    sys.path += [one for one in task.path if one not in sys.path]
    module, _, name = task.family.partition(":")
    kind: object = import_module(module)
    for part in name.split("."):
        kind = getattr(kind, part)
    if not (isinstance(kind, type) and issubclass(kind, Family)):
        raise Fault(f"{task.family} is no family")
    files = ModelFiles(task.config, Path(task.directory), task.shapes)
    try:
        family = kind.build(files, task.sid, task.limits, getattr(torch, task.dtype))
        return Result(export_family(family, task.sid.sizes))
    except Rejected as error:
        return Result(refused=(error.code, error.message, error.location))


if __name__ == "__main__":
    main()
