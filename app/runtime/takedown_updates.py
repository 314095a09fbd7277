"""Live take-downs: the newest list on the disk is in the next admission's exclude set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final

from app.errors import Rejected
from app.runtime.background import Background
from app.runtime.ledger import Ledger
from app.runtime.logs import Log
from app.runtime.retries import PASSING
from app.runtime.runtime import Runtime
from app.runtime.snapshot import Snapshot
from app.runtime.states import State
from app.runtime.status import Reason, unfinished
from app.runtime.survey import Candidate, Survey, survey
from app.runtime.takedowns import KEPT, NOTHING, Takedowns, keep, kept, load_takedowns
from app.vocab.manifest import strays, verify, version_key

PERIOD_S: Final = 2.0
PLACE: Final = f"state/{KEPT}"
NAMED: Final = 20
"""Things that are no version and are named all the same: a folder may hold very many."""
IGNORED: Final = "takes nothing down: a list is a folder that `widebeam takedown publish FILE --root ROOT` makes"


class TakedownUpdates:
    """Follows takedowns/ in a thread of its own: nobody waits behind weights that are being loaded. Event loop only.

    compose  puts what else belongs to a snapshot into it, `takedowns` among that
    unsaved  why what is in force is not among the server's own files, where it is not: it is tried again
    """

    def __init__(
        self,
        root: Path,
        state: Path,
        runtime: Runtime,
        composing: asyncio.Lock,
        compose: Callable[[Snapshot], Snapshot],
        ledger: Ledger,
        log: Log,
    ) -> None:
        self._root, self._state_dir = root, state
        self._runtime, self._composing, self._compose = runtime, composing, compose
        self._ledger, self._log = ledger, log
        self._background = Background("takedowns")
        self._survey: Survey | None = None
        self._refused: dict[str, str] = {}
        self._looked_at = ""
        self._kept = _name(NOTHING)
        self.takedowns: Takedowns = NOTHING
        self.unsaved: Rejected | None = None

    def close(self) -> None:
        """End the thread."""
        self._background.close()

    def adopt(self, takedowns: Takedowns) -> None:
        """What the active snapshot was made with."""
        self.takedowns = takedowns

    async def run(self, hint: asyncio.Event) -> None:
        """Look after every hint, and every two seconds whatever hints say. A bug of ours is logged, and it goes on."""
        while True:
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001  the loop that repairs things must not end
                self._log.error("takedown_update_failed", exc_info=error)
            try:
                async with asyncio.timeout(PERIOD_S):
                    await hint.wait()
            except TimeoutError:
                pass
            hint.clear()

    async def check(self) -> None:
        """Put the newest usable list in force. A list that is gone from the disk stays in force until another comes."""
        await self._keep()
        seen = await self._background.run(lambda: survey(self._root, self._state_dir, self._survey, ("takedowns",)))
        ignored = await self._background.run(lambda: strays(self._root, "takedowns")[:NAMED])
        self._survey = seen
        self._forget({*ignored, *(one.version for one in seen.candidates["takedowns"])})
        self._say_ignored(ignored)
        ask = seen.ask.get("takedowns")
        for one in seen.candidates["takedowns"]:
            if ask not in {None, one.version} or self._refused.get(one.version) == one.fingerprint:
                continue
            same = one.manifest is not None and one.manifest.digest == self.takedowns.digest
            if one.version == self.takedowns.version and (same or one.manifest is None):
                await self._look_at_active(one)
                return
            if one.manifest is None and one.problem is None:
                self._move(one.version, State.INCOMPLETE, reason=unfinished("takedowns", one.version))
                continue
            if ask is None and version_key(one.version) < version_key(self.takedowns.version):
                return
            if await self._install(one):
                return

    def _forget(self, there: Collection[str]) -> None:
        """What is neither on the disk nor in force any more."""
        for version in self._ledger.versions("takedowns"):
            if version not in there and version != self.takedowns.version:
                self._refused.pop(version, None)
                self._ledger.forget("takedowns", version)

    def _say_ignored(self, names: Iterable[str]) -> None:
        """What somebody has put there, maybe as a list, and is none: said once, and in the status while it is there."""
        for name in names:
            if self._ledger.state("takedowns", name) is None:
                reason = Reason("no_version", IGNORED, f"takedowns/{name}")
                self._move(name, State.INCOMPLETE, reason=reason)
                self._log.warning("takedowns_ignored", **reason.document())

    async def _look_at_active(self, one: Candidate) -> None:
        """The files of the list in force may have changed. What counts is the copy in memory."""
        if self._looked_at == one.fingerprint:
            return
        self._looked_at = one.fingerprint
        try:
            await self._background.run(lambda: _loaded(one))
        except Rejected as error:
            message = f"what is in memory serves on; on the disk: {error}"
            reason = Reason("changed_on_disk", message, f"takedowns/{one.version}")
            self._ledger.move("takedowns", one.version, State.ACTIVE, reason=reason)
            if error.code in PASSING:
                self._looked_at = ""
        else:
            self._ledger.move("takedowns", one.version, State.ACTIVE)

    async def _install(self, one: Candidate) -> bool:
        try:
            takedowns = await self._background.run(lambda: _loaded(one))
        except Rejected as error:
            if error.code not in PASSING:  # else the next look tries it again
                self._refused[one.version] = one.fingerprint
            if one.version == self.takedowns.version:  # the copy in memory is good
                reason = Reason(error.code, error.message, f"takedowns/{one.version}")
                self._ledger.move("takedowns", one.version, State.ACTIVE, reason=reason)
            else:
                self._ledger.reject("takedowns", one.version, error)
            return False
        async with self._composing:
            before, self.takedowns = self.takedowns, takedowns
            active = self._runtime.active
            if active is not None:
                made = await self._background.run(lambda: active.having(takedowns=takedowns))
                self._runtime.swap(self._compose(made), "takedowns")
        for state in (State.VERIFYING, State.LOADING, State.VALIDATING, State.READY, State.ACTIVE):
            self._move(one.version, state, takedowns.digest)
        if before.version and before.version != one.version:
            self._move(before.version, State.DRAINING)
            self._move(before.version, State.RETIRED)
        self._log.info("takedowns_live", version=one.version, items=len(takedowns.ids))
        await self._keep()
        return True

    async def _keep(self) -> None:
        """Write down what is in force, once; where that fails, the next look tries it again."""
        now = self.takedowns
        if _name(now) == self._kept:
            return
        try:
            await self._background.run(lambda: _write(self._state_dir, now))
        except OSError as error:
            problem = Rejected("takedowns_not_kept", f"cannot be written: {error.strerror}", location=PLACE)
            if self.unsaved is None:
                self._log.error(problem.code, version=now.version, message=problem.message, location=PLACE)
            self.unsaved = problem
        else:
            if self.unsaved is not None:
                self._log.info("takedowns_kept", version=now.version, location=PLACE)
            self._kept, self.unsaved = _name(now), None

    def _move(self, version: str, state: State, digest: str | None = None, reason: Reason | None = None) -> None:
        known = self._ledger.state("takedowns", version)
        if known is None or (known in {State.REJECTED, State.RETIRED, State.INCOMPLETE} and state is not known):
            self._ledger.move("takedowns", version, State.DISCOVERED)
        self._ledger.move("takedowns", version, state, digest=digest, reason=reason)


def _write(state: Path, takedowns: Takedowns) -> None:
    if _name(kept(state)) != _name(takedowns):
        keep(state, takedowns)


def _name(takedowns: Takedowns) -> tuple[str, str]:
    return takedowns.version, takedowns.digest


def _loaded(one: Candidate) -> Takedowns:
    if one.manifest is None:
        raise one.problem.bare() if one.problem else Rejected("manifest_missing", "the manifest is gone")
    verify(one.found.directory, "takedowns")
    return load_takedowns(one.found.directory)[0]
