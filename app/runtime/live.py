"""Everything that changes while a server runs: one object that follows the root and swaps snapshots (RecoGEM 3.3)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from app.config import Deployment
from app.errors import InvalidRequest, Rejected
from app.policies.builtin import BUILT_IN
from app.policies.operators import Operators
from app.runtime import state_dir
from app.runtime.artifact_updates import ArtifactUpdates
from app.runtime.background import Background
from app.runtime.contracts import FOLDER as CONTRACTS
from app.runtime.contracts import Contracts
from app.runtime.exposure import with_files
from app.runtime.kill import FILE as KILL
from app.runtime.kill import NO_FOLDER, KillSwitch
from app.runtime.ledger import Ledger
from app.runtime.loader import Loaded
from app.runtime.logs import Log
from app.runtime.metrics import Metrics
from app.runtime.operations import Operations
from app.runtime.policy_updates import SHOWN, PolicyUpdates
from app.runtime.retries import Retries, passing
from app.runtime.runtime import Runtime
from app.runtime.snapshot import Snapshot
from app.runtime.stage import HEAVY
from app.runtime.status import Reason
from app.runtime.survey import survey
from app.runtime.takedown_updates import TakedownUpdates
from app.runtime.watch import Watch, scan
from app.vocab.manifest import Kind

KILL_PERIOD_S: Final = 0.5
RETRY_PERIOD_S: Final = 2.0
RESTART_S: Final = 1.0
FOLDERS: Final = (SHOWN, *HEAVY, "takedowns")


class Live:
    """A runtime that follows its root. `run` starts it and goes on until it is cancelled."""

    def __init__(
        self,
        root: Path,
        deployment: Deployment,
        runtime: Runtime,
        metrics: Metrics,
        log: Log,
        clock: Callable[[], float],
        contracts: Contracts,
        operators: Operators = BUILT_IN,
    ) -> None:
        state = root / deployment.server.state_dir
        if not (root / CONTRACTS).is_symlink():  # what lies elsewhere is somebody else's
            state_dir.clean(root / CONTRACTS)
        self._root, self._state, self._runtime, self._log = root, state, runtime, log
        self._contracts = contracts
        composing, ledger = asyncio.Lock(), Ledger(log, metrics)
        self._ledger = ledger
        self._watch = Watch(root, FOLDERS, log, events=deployment.server.watch == "events")
        self._hints = {name: self._watch.hint() for name in ("start", "policies", "artifacts", "takedowns")}
        self._kill, self._killing = KillSwitch(root / SHOWN, state), asyncio.Lock()
        if self._kill.unreadable:
            log.error(
                "kill_switch_unreadable", file=f"state/{state_dir.KILLED}", message="who was killed there is not known"
            )
        strict = deployment.server.strict
        self._policies = PolicyUpdates(root, state, runtime, composing, metrics, log, clock, operators, strict=strict)
        self._takedowns = TakedownUpdates(root, state, runtime, composing, self._compose, ledger, log)
        self._artifacts = ArtifactUpdates(
            root, deployment, runtime, self._policies, composing, self._compose, ledger, contracts,
            self._hints["artifacts"], log,
        )  # fmt: skip
        self._operations = Operations(root, state, runtime, self._artifacts, self._hints["artifacts"], ledger, log)
        self._background = Background("start")
        self.boot, self._decisions = secrets.token_hex(4), 0

    # ---- life ----------------------------------------------------------------------------------------------------

    async def run(self, load: Callable[[], Loaded]) -> None:
        """Load, become ready, and follow the root; what is not ready tries again when something in the root changes."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._for_ever("watch", self._watch.run))
            await self._for_ever("start", lambda: self._become_ready(load))
            hints, follow = self._hints, self._for_ever
            group.create_task(follow("policies", lambda: self._policies.run(hints["policies"])))
            group.create_task(follow("artifacts", self._artifacts.run))
            group.create_task(follow("takedowns", lambda: self._takedowns.run(hints["takedowns"])))
            group.create_task(follow("kill", self._follow_kill))

    async def _become_ready(self, load: Callable[[], Loaded]) -> None:
        tried, retries = "", Retries(time.monotonic)
        while True:
            now = await self._background.run(self._fingerprint)
            if now != tried or retries.due():
                tried = now
                await self._runtime.start(load, self._background)
                self._adopt()
                loaded = self._runtime.loaded
                retries.refused("start", passing(loaded.reasons, loaded.artifacts) if loaded else "")
            if self._runtime.active is not None:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_PERIOD_S):
                    await self._hints["start"].wait()
            self._hints["start"].clear()

    def _fingerprint(self) -> str:
        return f"{survey(self._root, self._state).fingerprint} {scan(self._root / SHOWN)}"

    def _adopt(self) -> None:
        """Take over what a start has found and made."""
        loaded, active = self._runtime.loaded, self._runtime.active
        if loaded is None:
            return
        for artifact in loaded.artifacts:
            self._ledger.adopt(artifact)
        if loaded.in_force is not None:
            self._policies.adopt(loaded.in_force)
        if active is not None:
            self._takedowns.adopt(active.takedowns)
            self._artifacts.start(active)
            self._apply_kill(self._kill.names)
        self._artifacts.tell()

    async def _for_ever(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Start a loop again whenever a bug of ours ends it."""
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001  whatever broke, a server must go on following its root
                self._log.error("loop_died", loop=name, exc_info=error)
                await asyncio.sleep(RESTART_S)
            else:
                return

    def close(self) -> None:
        """End the threads."""
        for part in (self._policies, self._artifacts, self._takedowns, self._background):
            part.close()

    def _compose(self, snapshot: Snapshot) -> Snapshot:
        """What is killed and taken down now."""
        return snapshot.having(killed=self._kill.names, takedowns=self._takedowns.takedowns)

    # ---- the kill switch: no compilation, no lock, no thread that others use -------------------------------------

    async def _follow_kill(self) -> None:
        said = ""
        while True:
            with suppress(OSError):
                self._apply_kill(self._kill.take(await asyncio.to_thread(self._kill.read)))
            if self._kill.unlistable not in {said, NO_FOLDER, ""}:
                message = f"{self._kill.unlistable}: {self._kill.instead}"
                self._log.error("kill_list_unusable", file=f"{SHOWN}/{KILL}", message=message)
            said = self._kill.unlistable
            await asyncio.sleep(KILL_PERIOD_S)

    def _apply_kill(self, names: frozenset[str]) -> None:
        active = self._runtime.active
        if active is not None and active.killed != names:
            self._runtime.swap(active.having(killed=names), "kill")
            self._log.warning("killed", names=sorted(names))
            self._ledger.note("killed", names=sorted(names))

    async def kill(self, add: Iterable[str], remove: Iterable[str]) -> dict[str, object]:
        """Kill or revive policies and experiments from the next admission on. Raises InvalidRequest for the default."""
        add = tuple(add)
        self._decisions += 1
        active = self._runtime.active
        if active is not None and active.policies.default in add:
            message = f"`{active.policies.default}` is the default: it can be rolled back, not killed"
            raise InvalidRequest(message, path="$.kill")
        async with self._killing:
            await asyncio.to_thread(self._kill.post, add, tuple(remove))
            self._apply_kill(self._kill.names)  # as of now: the KILL file may have been read meanwhile
        return {"killed": self._kill.document()}

    # ---- policies ------------------------------------------------------------------------------------------------

    def policies(self) -> dict[str, object]:
        """The document of `GET /admin/v1/policies`."""
        document = self._policies.document(self._kill.names)
        return {**document, "killed": self._kill.document(), "watch": self._watch.status()}

    async def reload_policies(self) -> dict[str, object]:
        """Read and compile the policy folder now; the same document."""
        await self._policies.reload()
        return self.policies()

    async def check_policy(self, name: str, text: str) -> dict[str, object]:
        """What a text would give as a policy of this folder; nothing is installed."""
        return await self._policies.check_text(name, text)

    async def explain_policy(self, name: str) -> dict[str, object] | None:
        """What a policy that serves does at each step."""
        return await self._policies.explain(name)

    # ---- snapshots -----------------------------------------------------------------------------------------------

    def snapshots(self) -> dict[str, object]:
        """The snapshots in memory, and what is asked for."""
        return self._operations.list()

    async def select(self, snapshot_id: str, cause: str) -> dict[str, object]:
        """Pin a snapshot in memory and admit on it."""
        self._decisions += 1
        return await self._operations.select(snapshot_id, cause)

    async def ask(self, versions: dict[Kind, str], wait_s: float) -> dict[str, object]:
        """Pin versions, and wait a while for what becomes of them."""
        self._decisions += 1
        return await self._operations.ask(versions, wait_s)

    def unpin(self, snapshot_id: str | None = None) -> dict[str, object]:
        """Follow the newest versions again."""
        self._decisions += 1
        return self._operations.unpin(snapshot_id)

    @property
    def epoch(self) -> str:
        """See `control.Control`. A decision counts before it waits: of two that name one epoch, one wins."""
        return f"{self.boot}-{self._runtime.swaps + self._decisions}"

    def events(self, after: int) -> list[dict[str, object]]:
        """What happened, oldest first."""
        return self._ledger.events(after)

    async def told(self, after: int) -> None:
        """Wait until there is an event with a number above `after`."""
        await self._ledger.told(after)

    def drain(self) -> dict[str, object]:
        """Refuse new requests; what is queued or running finishes. The process stays."""
        self._decisions += 1
        self._runtime.begin_drain()
        self._ledger.note("drain")
        return {"draining": True}

    # ---- status --------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """The document of `GET /admin/v1/status`."""
        document = self._runtime.status()
        if self._policies.in_force is not None:
            document |= {"policies": self._policies.status(self._kill.names)}
        active, state = document.get("active"), self._policies.in_force
        if isinstance(active, dict) and state is not None:
            active["policies"] = {"generation": state.generation, "ok": state.ok}
            # of the snapshot that admits, not of the list that is being put into the next one
            admitting = self._runtime.active
            active["takedowns"] = {"version": admitting.takedowns.version if admitting else ""}
        serving = document["experiments"]
        if isinstance(serving, dict) and state is not None:  # a refused edit changes no snapshot
            document["experiments"] = with_files(serving, state.policies.experiments, self._kill.names)
        return {
            **document,
            "epoch": self.epoch,
            "artifacts": [*self._ledger.documents(), *self._runtime.engines()],
            "snapshots": self._artifacts.snapshots(),
            "desired": self._artifacts.desired(),
            "deployment": self._artifacts.overlay(),
            "killed": self._kill.document(),
            "unsaved": [Reason(one.code, one.message, one.location).document() for one in self._unsaved()],
            "watch": self._watch.status(),
        }

    def _unsaved(self) -> Iterator[Rejected]:
        """What of the server's own is not on the disk, and will be when there is room."""
        yield from self._contracts.unkept
        if self._policies.unsaved is not None:
            yield self._policies.unsaved
        if self._takedowns.unsaved is not None:
            yield self._takedowns.unsaved
        if self._kill.unkept:
            yield Rejected("kill_list_not_kept", self._kill.unkept, location=f"state/{state_dir.KILL_LIST}")
