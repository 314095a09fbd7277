"""What an operator may do to the snapshots of a running server. Everything is idempotent and takes ids, never paths."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from app.config import DEPLOYMENT
from app.errors import InvalidRequest, Rejected, WidebeamError
from app.runtime import state_dir
from app.runtime.artifact_updates import ArtifactUpdates
from app.runtime.desired import asked
from app.runtime.ledger import Ledger
from app.runtime.logs import Log
from app.runtime.residents import Resident
from app.runtime.runtime import Runtime
from app.runtime.states import State
from app.vocab.manifest import FILE as MANIFEST
from app.vocab.manifest import Kind, is_version

Document = dict[str, object]
MAX_WAIT_S: Final = 600.0
OTHER_DEPLOYMENT: Final = "other_deployment"


@dataclass(frozen=True, eq=False, slots=True)
class Decision:
    """A pin that is not carried out yet. before: what stood until it came, the latest first: pins that were not carried
    out either, and last what was, or what this process found (None: no pin)"""

    versions: dict[Kind, str]
    before: tuple[dict[Kind, str] | None, ...]


class Operations:
    """Promote, rollback, pin, unpin. A decision is a pin on the disk first, and a swap after it; so it outlives the
    server, and what watches the disk works towards the same end."""

    def __init__(
        self,
        root: Path,
        state: Path,
        runtime: Runtime,
        artifacts: ArtifactUpdates,
        hint: asyncio.Event,
        ledger: Ledger,
        log: Log,
    ) -> None:
        self._root, self._pin_file = root, state / state_dir.PIN
        self._runtime, self._artifacts, self._hint = runtime, artifacts, hint
        self._ledger, self._log = ledger, log
        self._writing = asyncio.Lock()  # who has written the pin last is the last to come to the stage, too
        self._last: tuple[str, object] | None = None  # the cause of this server's last pin, and the pin
        self._open: Decision | None = None  # the one that stands
        self._pending: dict[Decision, asyncio.Task[Document]] = {}  # those that are being carried out

    def list(self) -> Document:
        """The snapshots in memory, what is asked for, and the pin that stands: `cause` is null where it is not this
        process's."""
        versions, last = self._pin(), self._last
        cause = last[0] if last is not None and last[1] == versions else None
        pin = None if versions is None else {"versions": versions, "cause": cause}
        return {"snapshots": self._artifacts.snapshots(), "desired": self._artifacts.desired(), "pin": pin}

    async def select(self, snapshot_id: str, cause: str) -> Document:
        """Pin a snapshot in memory and admit on it: an instant promotion or rollback.

        Raises InvalidRequest where it is not in memory, Rejected where the policies cannot serve with it, or where it
        was prepared for another deployment.toml than the one on the disk: that would be back a moment later.
        """
        began = asyncio.get_running_loop().time()
        resident = self._named(snapshot_id)
        if not self._artifacts.may_stay(resident):
            message = "it was prepared for an earlier deployment.toml: with that text put back it serves at once"
            raise Rejected(OTHER_DEPLOYMENT, message, location=DEPLOYMENT)
        was = self._active_id()
        pin: dict[Kind, str] = {"weights": resident.weights.version, "vocab": resident.vocab.version}
        decision = await self._write_pin(pin, cause)
        try:
            snapshot = await self._artifacts.stage.promote(resident, cause)
        except Rejected:
            await self._withdraw(decision)
            raise
        self._decided(decision, cause, was, began)
        return {"snapshot": snapshot.id, "state": "active", "pin": self._pin()}

    async def ask(self, versions: dict[Kind, str], wait_s: float) -> Document:
        """Pin versions that may have to be loaded first, and wait a while for what becomes of them. What is in memory
        serves at once, whatever is being loaded. What is refused leaves no pin, also after the wait.

        Raises InvalidRequest for what cannot be a version or is not there, Rejected with the gate's reason.
        """
        for kind, version in versions.items():
            if not is_version(version):
                raise InvalidRequest(f"{version[:128]!r} cannot be a version", path=f"$.{kind}")
        self._check(versions)
        was, began = self._active_id(), asyncio.get_running_loop().time()
        decision = await self._write_pin(versions, "promote")
        await self._artifacts.serve_at_once()
        carried = self._carry(decision, was, began)
        done, _ = await asyncio.wait((carried,), timeout=min(wait_s, MAX_WAIT_S))
        if done:
            return carried.result()
        desired = self._artifacts.desired()
        known = desired.get("asked")
        seen = isinstance(known, dict) and versions.items() <= known.items()  # else it is what was asked for before
        problem = desired.get("problem") if seen else None  # what it waits for, where that is known
        return {"state": "pending", "pin": self._pin(), **({"problem": problem} if problem else {})}

    def _carry(self, decision: Decision, was: str | None, began: float) -> asyncio.Task[Document]:
        """The one task that carries a decision out, however often it is asked for."""
        known = self._pending.get(decision)
        if known is None:
            known = self._pending[decision] = asyncio.create_task(self._carried_out(decision, was, began))
            known.add_done_callback(partial(self._carried, decision))
        return known

    async def _carried_out(self, decision: Decision, was: str | None, began: float) -> Document:
        """Until versions that are pinned serve, or something else is pinned. Raises Rejected where they are refused;
        the pin from before stands again then."""
        while not self._serves(decision.versions):
            told = self._artifacts.told
            if not self._stands(decision):
                return {"state": "pending", "pin": self._pin()}
            try:
                self._check(decision.versions)
            except WidebeamError:
                with suppress(OSError):  # no room, say: the bad pin must not stay, so once more after the next look
                    await self._withdraw(decision)
                    raise
            await told.wait()
        self._decided(decision, "promote", was, began)
        return {"snapshot": self._active_id(), "state": "active", "pin": self._pin()}

    def _carried(self, decision: Decision, carried: asyncio.Task[Document]) -> None:
        del self._pending[decision]
        if not carried.cancelled():
            carried.exception()  # whoever asked has it, or has gone; the version's reason says the same

    def unpin(self, snapshot_id: str | None = None) -> Document:
        """Follow release.json, or the newest versions, again. snapshot_id: only where just that one is pinned.

        Raises InvalidRequest where it is not in memory.
        """
        if snapshot_id is not None:
            weights, vocab = self._named(snapshot_id).versions
            if self._pin() != {"weights": weights, "vocab": vocab}:
                return {"pin": self._pin()}
        self._open = None
        if self._pin_file.exists():
            self._pin_file.unlink(missing_ok=True)
            self._artifacts.decided()
            self._note("unpin", {})
        return {"pin": None}

    def _named(self, snapshot_id: str) -> Resident:
        resident = self._artifacts.stage.residents.named(snapshot_id)
        if resident is None:
            raise InvalidRequest(f"no snapshot {snapshot_id[:64]!r} is in memory", path="$.snapshot")
        return resident

    def _check(self, versions: dict[Kind, str]) -> None:
        """Raise what is known to be wrong with versions, or with serving them together; the same each time."""
        for kind, version in versions.items():
            state, reason = self._ledger.state(kind, version), self._ledger.reason(kind, version)
            if state is None and not (self._root / kind / version / MANIFEST).is_file():  # it may be a second old
                raise InvalidRequest(f"{kind} {version!r} is not there", path=f"$.{kind}")
            if state is State.REJECTED and reason is not None:
                raise Rejected(reason.code, reason.message, location=reason.location)
        apart = self._artifacts.apart(versions)
        if apart is not None:
            raise apart

    def _serves(self, versions: dict[Kind, str]) -> bool:
        active = self._runtime.active
        if active is None:
            return False
        mine = {"weights": active.weights.version, "vocab": active.vocab_ref.version}
        return all(mine[kind] == version for kind, version in versions.items())

    async def _write_pin(self, versions: dict[Kind, str], cause: str) -> Decision:
        """Pin versions; the decision that stands then, which is the same where it is pending already."""
        async with self._writing:
            pin, last = self._pin(), self._open
            pending = last is not None and last.versions == pin  # else it is done, or somebody else's pin stands
            if last is not None and pending and pin == versions:
                decision = last
            else:
                older = (pin, *last.before) if last is not None and pending else (pin,)
                decision = Decision(versions, tuple(one for n, one in enumerate(older) if one not in older[n + 1 :]))
            if pin != versions:
                await asyncio.to_thread(state_dir.write, self._pin_file, msgspec.json.encode(versions) + b"\n")
                self._artifacts.decided()  # the same again is no other decision: whoever asks often delays nothing
                self._note(cause, versions)
            self._open, self._last = decision, (cause, versions)
            return decision

    def _active_id(self) -> str | None:
        """Of what serves; who waits for something else keeps it not in memory, nor its weight slot."""
        active = self._runtime.active
        return active.id if active else None

    def _stands(self, decision: Decision) -> bool:
        return self._open is decision and self._pin() == decision.versions

    async def _withdraw(self, decision: Decision) -> None:
        """Put back what was asked for before a decision that could not be carried out, unless it is another's pin that
        stands by now. What has been refused meanwhile, too, does not come back."""
        async with self._writing:
            if not self._stands(decision):
                return
            before = decision.before
            while len(before) > 1 and self._is_refused(before[0]):
                before = before[1:]
            pin = before[0]
            if pin is None:
                self._pin_file.unlink(missing_ok=True)
            else:
                await asyncio.to_thread(state_dir.write, self._pin_file, msgspec.json.encode(pin) + b"\n")
            self._open = None
            self._artifacts.decided()
            self._note("withdrawn", pin or {})
            if pin is not None and len(before) > 1:  # it was not carried out when something else was asked for
                self._open = Decision(pin, before[1:])
                self._carry(self._open, self._active_id(), asyncio.get_running_loop().time())

    def _is_refused(self, pin: dict[Kind, str] | None) -> bool:
        try:
            self._check(pin or {})
        except WidebeamError:
            return pin is not None
        return False

    def _pin(self) -> dict[Kind, str] | None:
        """The pin that stands; None where there is none, or nobody can read it: `desired` says why."""
        try:
            return asked(self._pin_file, state_dir.PIN) or None
        except Rejected:
            return None

    def _decided(self, decision: Decision, cause: str, was: str | None, began: float) -> None:
        """One line of the log for a decision that was carried out: why, what, and how long that took."""
        if self._open is decision:
            self._open = None
        active = self._runtime.active
        assert active is not None, "what was decided serves"
        self._log.info(
            "decision", cause=cause, snapshot=active.id, before=was,
            weights=active.weights.version, vocab=active.vocab_ref.version,
            ms=round(1e3 * (asyncio.get_running_loop().time() - began), 1),
        )  # fmt: skip

    def _note(self, cause: str, versions: dict[Kind, str]) -> None:
        self._ledger.note("pin", cause=cause, versions=dict(versions))
        self._log.info("pin", cause=cause, versions=dict(versions))
        self._hint.set()
