"""Whether files of versions in memory are what they were: found out beside everything else, in a thread of its own.

A store that links files together (`cp -al`, `rsync --link-dest`) touches those of all older versions whenever one comes
or goes, and only their bytes say that nothing else has changed. That is read, hashed and reported; no new version waits
for it, and what serves is the process's own copy.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

from app.errors import Rejected
from app.runtime.background import Background
from app.runtime.reading import nothing_unexpected
from app.runtime.survey import Candidate
from app.vocab.manifest import Kind, verify

Key = tuple[Kind, str]
"""(kind, version)."""


class Audit:
    """Doubts about versions, cleared up one after the other. Event loop only.

    found    called with (kind, the version as it was when it was doubted, what is wrong with it or None)
    between  called between pieces of work, in the thread that does it
    """

    def __init__(
        self, found: Callable[[Kind, Candidate, Rejected | None], None], between: Callable[[], None] = lambda: None
    ) -> None:
        self._found, self._between = found, between
        self._doubts: dict[Key, Candidate] = {}
        self._now: Key | None = None
        self._moot = threading.Event()
        self._news = asyncio.Event()
        self._background = Background("audit", heavy=True)

    @property
    def pending(self) -> frozenset[Key]:
        """What is doubted, or being looked at."""
        now = () if self._now is None or self._moot.is_set() else (self._now,)
        return frozenset((*self._doubts, *now))

    def doubt(self, kind: Kind, one: Candidate) -> None:
        """Files have changed. What was to be looked at for an older change is looked at once."""
        self._doubts[kind, one.version] = one
        self._news.set()

    def drop(self, kind: Kind, version: str) -> None:
        """Nobody wants to know any more: the version has left memory, or the disk."""
        self._doubts.pop((kind, version), None)
        if self._now == (kind, version):
            self._moot.set()

    def close(self) -> None:
        """End the thread; what it looks at is given up."""
        self._moot.set()
        self._background.close()

    async def run(self, hint: asyncio.Event) -> None:
        """Look at what is doubted, for ever. hint: set after each, for whoever decides by it."""
        while True:
            self._news.clear()
            while self._doubts:
                await self._next()
                hint.set()
            await self._news.wait()

    async def _next(self) -> None:
        """The doubt that has waited longest. A look that has begun ends, whatever changes meanwhile: the next one of
        that version comes behind those of others, so that each has its turn."""
        self._now = kind, version = next(iter(self._doubts))
        one, self._moot = self._doubts.pop((kind, version)), threading.Event()
        moot = self._moot
        try:
            problem = await self._background.run(partial(_problem, kind, one, moot, self._between))
        finally:
            self._now = None
        if not moot.is_set():
            self._found(kind, one, problem)


def _problem(kind: Kind, one: Candidate, moot: threading.Event, between: Callable[[], None]) -> Rejected | None:
    """What is wrong with the files; whatever it says once it is moot means nothing."""

    def go_on() -> None:
        if moot.is_set():
            raise Rejected("moot", "nobody wants to know any more")
        between()

    try:
        with nothing_unexpected():
            verify(one.found.directory, kind, between=go_on)
    except Rejected as error:
        return error.bare()
    return None
