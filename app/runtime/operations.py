"""What an operator may do to the snapshots of a running server. Everything is idempotent and takes ids, never paths."""

from __future__ import annotations

import asyncio
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
from app.runtime.snapshot import Snapshot
from app.runtime.states import State
from app.vocab.manifest import FILE as MANIFEST
from app.vocab.manifest import Kind, is_version

Document = dict[str, object]
MAX_WAIT_S: Final = 600.0
OTHER_DEPLOYMENT: Final = "other_deployment"


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
        self._pending: set[asyncio.Task[Document]] = set()  # decisions that are being carried out

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
        resident, before = self._named(snapshot_id), self._pin()
        if not self._artifacts.may_stay(resident):
            message = "it was prepared for an earlier deployment.toml: with that text put back it serves at once"
            raise Rejected(OTHER_DEPLOYMENT, message, location=DEPLOYMENT)
        was = self._runtime.active
        pin: dict[Kind, str] = {"weights": resident.weights.version, "vocab": resident.vocab.version}
        await self._write_pin(pin, cause)
        try:
            snapshot = await self._artifacts.stage.promote(resident, cause)
        except Rejected:
            await self._restore(before, pin)
            raise
        self._decided(cause, was, began)
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
        before, was, began = self._pin(), self._runtime.active, asyncio.get_running_loop().time()
        await self._write_pin(versions, "promote")
        await self._artifacts.serve_at_once()
        carried = asyncio.create_task(self._carried_out(versions, before, was, began))
        self._pending.add(carried)
        carried.add_done_callback(self._carried)
        done, _ = await asyncio.wait((carried,), timeout=min(wait_s, MAX_WAIT_S))
        return carried.result() if done else {"state": "pending", "pin": self._pin()}

    async def _carried_out(
        self, versions: dict[Kind, str], before: dict[Kind, str] | None, was: Snapshot | None, began: float
    ) -> Document:
        """Until versions that are pinned serve, or something else is pinned. Raises Rejected where they are refused;
        the pin from before stands again then."""
        while not self._serves(versions):
            told = self._artifacts.told
            if self._pin() != versions:
                return {"state": "pending", "pin": self._pin()}
            try:
                self._check(versions)
            except WidebeamError:
                await self._restore(before, versions)
                raise
            await told.wait()
        self._decided("promote", was, began)
        active = self._runtime.active
        return {"snapshot": active.id if active else None, "state": "active", "pin": self._pin()}

    def _carried(self, carried: asyncio.Task[Document]) -> None:
        self._pending.discard(carried)
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

    async def _write_pin(self, versions: dict[Kind, str], cause: str) -> None:
        async with self._writing:
            if self._pin() != versions:
                data = msgspec.json.encode(versions) + b"\n"
                await asyncio.to_thread(state_dir.write, self._pin_file, data)
                self._artifacts.decided()  # the same again is no other decision: whoever asks often delays nothing
                self._note(cause, versions)
            self._last = cause, versions

    async def _restore(self, before: dict[Kind, str] | None, pin: dict[Kind, str]) -> None:
        """Put back what was asked for before a decision that could not be carried out, unless it is another's pin that
        stands by now."""
        async with self._writing:
            if self._pin() != pin:
                return
            if before is None:
                self._pin_file.unlink(missing_ok=True)
            else:
                await asyncio.to_thread(state_dir.write, self._pin_file, msgspec.json.encode(before) + b"\n")
            self._artifacts.decided()
            self._note("withdrawn", before or {})

    def _pin(self) -> dict[Kind, str] | None:
        """The pin that stands; None where there is none, or nobody can read it: `desired` says why."""
        try:
            return asked(self._pin_file, state_dir.PIN) or None
        except Rejected:
            return None

    def _decided(self, cause: str, was: Snapshot | None, began: float) -> None:
        """One line of the log for a decision that was carried out: why, what, and how long that took."""
        active = self._runtime.active
        assert active is not None, "what was decided serves"
        self._log.info(
            "decision", cause=cause, snapshot=active.id, before=was.id if was else None,
            weights=active.weights.version, vocab=active.vocab_ref.version,
            ms=round(1e3 * (asyncio.get_running_loop().time() - began), 1),
        )  # fmt: skip

    def _note(self, cause: str, versions: dict[Kind, str]) -> None:
        self._ledger.note("pin", cause=cause, versions=dict(versions))
        self._log.info("pin", cause=cause, versions=dict(versions))
        self._hint.set()
