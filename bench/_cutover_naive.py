"""`widebeam serve` as it must not be: a new version is read, checked and built on the engine thread, between batches.

RecoGEM's earlier updater (5.6) rebuilt the engine where it served. Only `bench cutover --mode naive` uses this.

    python -m bench._cutover_naive ROOT
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from app.cli import loop
from app.cli.compose import Overrides, compose
from app.cli.serve import run, use_short_turns
from app.runtime.background import Background, _answer
from app.runtime.live import Live
from app.runtime.runtime import Runtime

T = TypeVar("T")


class OnTheEngine:
    """Work in line with the batches, in place of `background.Background`."""

    def __init__(self, runtime: Runtime) -> None:
        self._engine = runtime._thread._engine  # noqa: SLF001  this is the point

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call on the engine thread, when its turn comes."""
        event_loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = event_loop.create_future()
        self._engine.put(partial(_answer, call, event_loop, future))
        return await future


def main() -> None:
    root = Path(sys.argv[1])
    use_short_turns()
    service = compose(root, Overrides(None, 0, 0, None), sys.stdout.buffer)
    made = service.live

    def live(runtime: Runtime) -> Live:
        found = made(runtime)
        found._artifacts.stage._background = cast(Background, OnTheEngine(runtime))  # noqa: SLF001
        return found

    loop.run(run(replace(service, live=live), root))


if __name__ == "__main__":
    main()
