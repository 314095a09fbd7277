"""Everything that changes while a server runs: one object that follows the root and swaps snapshots (RecoGEM 3.3)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from app.config import Deployment
from app.errors import InvalidRequest
from app.runtime.exposure import with_files
from app.runtime.kill import KillSwitch
from app.runtime.loader import Loaded
from app.runtime.logs import Log
from app.runtime.metrics import Metrics
from app.runtime.policy_updates import SHOWN, PolicyUpdates
from app.runtime.runtime import Runtime
from app.runtime.watch import Watch

KILL_PERIOD_S: Final = 0.5
RESTART_S: Final = 1.0


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
    ) -> None:
        state = root / deployment.server.state_dir
        self._runtime, self._log = runtime, log
        self._composing = asyncio.Lock()
        self._watch = Watch(
            root, (SHOWN, "weights", "vocab", "takedowns"), log, events=deployment.server.watch == "events"
        )
        self._policies = PolicyUpdates(root, state, runtime, self._composing, metrics, log, clock)
        self._kill = KillSwitch(root / SHOWN, state)

    async def run(self, load: Callable[[], Loaded]) -> None:
        """Load, become ready, and follow the root."""
        await self._runtime.start(load)
        loaded = self._runtime.loaded
        if loaded is not None and loaded.in_force is not None:
            self._policies.start(loaded.in_force)
        self._apply_kill(self._kill.names)
        hint = self._watch.hint()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._for_ever("watch", self._watch.run))
            group.create_task(self._for_ever("policies", lambda: self._policies.run(hint)))
            group.create_task(self._for_ever("kill", self._follow_kill))

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
        self._policies.close()

    # ---- the kill switch: no compilation, no lock, no thread that others use -------------------------------------

    async def _follow_kill(self) -> None:
        while True:
            with suppress(OSError):
                self._apply_kill(self._kill.take(await asyncio.to_thread(self._kill.read)))
            await asyncio.sleep(KILL_PERIOD_S)

    def _apply_kill(self, names: frozenset[str]) -> None:
        active = self._runtime.active
        if active is not None and active.killed != names:
            self._runtime.swap(active.having(killed=names), "kill")
            self._log.warning("killed", names=sorted(names))

    def kill(self, add: Iterable[str], remove: Iterable[str]) -> dict[str, object]:
        """Kill or revive policies and experiments from the next admission on. Raises InvalidRequest for the default."""
        add = tuple(add)
        active = self._runtime.active
        if active is not None and active.policies.default in add:
            message = f"`{active.policies.default}` is the default: it can be rolled back, not killed"
            raise InvalidRequest(message, path="$.kill")
        self._apply_kill(self._kill.post(add, remove))
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

    # ---- status --------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """The document of `GET /admin/v1/status`."""
        document = self._runtime.status()
        if self._policies.in_force is not None:
            document |= {"policies": self._policies.status(self._kill.names)}
        active, state = document.get("active"), self._policies.in_force
        if isinstance(active, dict) and state is not None:
            active["policies"] = {"generation": state.generation, "ok": state.ok}
        serving = document["experiments"]
        if isinstance(serving, dict) and state is not None:  # a refused edit changes no snapshot
            document["experiments"] = with_files(serving, state.policies.experiments, self._kill.names)
        return {**document, "killed": self._kill.document(), "watch": self._watch.status()}
