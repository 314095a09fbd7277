"""Live policies: from an edited file to the snapshot that new requests are admitted on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from app.errors import NotReady, Rejected
from app.policies import load
from app.policies.builtin import BUILT_IN
from app.policies.cache import Cache
from app.policies.compile import check_policy
from app.policies.explain import explain as explained
from app.policies.last_good import Kept
from app.policies.operators import Operators
from app.policies.resolve import Library
from app.policies.source import Source
from app.runtime import state_dir
from app.runtime.background import Background
from app.runtime.columns import catalogue_of
from app.runtime.in_force import InForce, compiler, document, renew
from app.runtime.logs import Log
from app.runtime.metrics import Metrics
from app.runtime.pace import Pace
from app.runtime.runtime import Runtime
from app.runtime.snapshot import Snapshot
from app.runtime.watch import Listing, scan, settled

SHOWN: Final = "policies"
PLACE: Final = f"state/{state_dir.LAST_GOOD}"
QUIET_S: Final = 0.05
PERIOD_S: Final = 2.0


class PolicyUpdates:
    """Watches one policy folder and swaps what it gives into the active snapshot. Event loop only.

    composing  held by whoever makes the next snapshot out of the active one
    operators  those that policies may use
    strict     what the folder holds goes live as a whole or not at all
    unsaved    why the last good policies are not on the disk, where they are not: it is tried again
    """

    def __init__(
        self,
        root: Path,
        state: Path,
        runtime: Runtime,
        composing: asyncio.Lock,
        metrics: Metrics,
        log: Log,
        clock: Callable[[], float],
        operators: Operators = BUILT_IN,
        *,
        strict: bool = False,
    ) -> None:
        self._directory, self._state_dir = root / SHOWN, state
        self._runtime, self._composing = runtime, composing
        self._metrics, self._log, self._clock = metrics, log, clock
        self._background = Background("policies")
        self._operators, self._cache = operators, Cache(operators)
        self._savings: set[asyncio.Future[None]] = set()
        self._strict = strict
        state_dir.clean(state)
        self._saved: Mapping[str, Kept] = state_dir.load_last_good(state)
        self.unsaved: Rejected | None = None
        self.in_force: InForce | None = None

    def close(self) -> None:
        """End the thread."""
        self._background.close()

    # ---- following the disk ------------------------------------------------------------------------------------

    async def run(self, hint: asyncio.Event) -> None:
        """Look after every hint, and every two seconds whatever hints say. A bug of ours is logged, and it goes on."""
        while True:
            try:
                async with asyncio.timeout(PERIOD_S):
                    await hint.wait()
            except TimeoutError:
                pass
            hint.clear()
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001  the loop that repairs things must not end
                self._log.error("policy_update_failed", exc_info=error)

    async def check(self) -> bool:
        """Bring what is in force up to the disk; False where the folder does not stand still."""
        listing = await self._background.run(partial(scan, self._directory))
        state = self.in_force
        if state is not None and listing == state.listing and not state.pending:
            self._show(state)
            if self.unsaved is not None and not self._savings:
                self._begin_saving(state)
            return True
        return await self.reload(listing)

    async def reload(self, listing: Listing | None = None) -> bool:
        """Read and compile the folder now, changed or not. listing: a scan of this moment."""
        read = partial(load.snapshot, shown=SHOWN, root=self._directory.parent)
        found = await settled(self._directory, read, self._background, QUIET_S, listing)
        if found is None:
            return False
        listing, folder = found
        async with self._composing:
            active = self._runtime.active
            if active is not None:
                await self._install(active, await self._renewed(active, folder, listing))
        return True

    def adopt(self, state: InForce) -> None:
        """What the active snapshot was made with, where somebody else made it."""
        self._remember(state)

    async def compiled_for(self, snapshot: Snapshot, background: Background, between: Callable[[], None]) -> InForce:
        """The folder as it is in force, compiled for the contract and the catalogue of another snapshot; a new one of
        these compiles every policy anew. background: the thread to do that in · between: called there between pieces of
        work"""
        state, active = self._started(), self._runtime.active
        same = active is not None and active.contract.id == snapshot.contract.id
        running = state.policies.traffic if same else None
        catalogue = catalogue_of(snapshot.vocab, snapshot.side)
        compile_ = compiler(snapshot.contract, catalogue, self._cache, running, between)
        files = state.folder if state.held else state.disk
        made = await background.run(lambda: renew(state, files, state.listing, compile_, self._clock()))
        return replace(made, disk=state.disk, held=state.held, bad={**made.bad, **state.bad}) if state.held else made

    async def check_text(self, name: str, text: str) -> dict[str, object]:
        """What a policy's text would give in this folder: nothing is installed."""
        active, state = self._runtime.active, self._started()
        if active is None:
            raise NotReady("there is no contract to check against yet")
        source = Source(f"{SHOWN}/{name}.yaml", text.encode("utf-8", "surrogatepass"))
        folder = replace(state.folder, sources={**state.folder.sources, name: source})
        cache, traffic = Cache(self._operators), active.policies.traffic
        compile_ = compiler(active.contract, catalogue_of(active.vocab, active.side), cache, traffic)
        loaded = (await self._background.run(lambda: compile_(folder, {}))).policies[name]
        return {
            "ok": not loaded.errors,
            "policy_id": loaded.plan.policy_id if loaded.plan else None,
            "diagnostics": [one.data() for one in loaded.findings],
        }

    async def explain(self, name: str) -> dict[str, object] | None:
        """What a policy that serves does at each step, and where each value came from; None where there is none."""
        active, state = self._runtime.active, self._started()
        plan, kept = active.policies.plan(name) if active else None, state.kept.get(name)
        if active is None or plan is None or kept is None:
            return None

        def made() -> dict[str, object]:
            catalogue = catalogue_of(active.vocab, active.side)
            library = Library(kept.files, self._operators)
            policy, _ = check_policy(name, library, active.contract, catalogue)
            return explained(policy, plan, active.contract, catalogue)

        return await self._background.run(made)

    # ---- putting in force --------------------------------------------------------------------------------------

    async def _renewed(self, active: Snapshot, folder: load.Folder, listing: Listing) -> InForce:
        before, traffic = self.in_force, active.policies.traffic
        catalogue, rest = catalogue_of(active.vocab, active.side), Pace(lambda: self._runtime.busy)
        compile_ = compiler(active.contract, catalogue, self._cache, traffic, rest)

        def make() -> InForce:
            self._cache.turn()
            state = renew(before, folder, listing, compile_, self._clock(), self._saved)
            return state.unless_wrong(before, self._clock()) if self._strict else state

        began = time.perf_counter()
        state = await self._background.run(make)
        self._metrics.policy_compile_seconds.observe(time.perf_counter() - began)
        return state

    async def _install(self, active: Snapshot, state: InForce) -> None:
        """Try what is structurally new, then swap."""
        if state.policies.id != active.policies.id:
            known = {plan.structure.id for plan in active.policies.plans()}
            new = [plan for plan in state.policies.plans() if plan.structure.id not in known]
            failed = await self._runtime.warm(active.having(policies=state.policies), new)
            if failed:
                state = state.without(failed, self.in_force, self._clock())
            if state.policies.id != active.policies.id and state.policies.plan(state.policies.default) is not None:
                current = self._runtime.active or active  # somebody may have been killed meanwhile
                self._runtime.swap(current.having(policies=state.policies), "policies")
        self._remember(state)

    def _remember(self, state: InForce) -> None:
        before, self.in_force = self.in_force, state
        self._show(state)
        told = before.problems() if before else {}
        for name, problem in state.problems().items():
            if told.get(name) != problem:
                self._log.error("policy_rejected", policy=name, diagnostics=problem)
        if before is None or before.generation != state.generation:
            ids = {plan.policy: plan.policy_id for plan in state.policies.plans()}
            self._log.info("policies_live", generation=state.generation, default=state.policies.default, policies=ids)
        self._begin_saving(state)

    def _begin_saving(self, state: InForce) -> None:
        saving = asyncio.ensure_future(self._background.run(partial(self._save, state)))
        self._savings.add(saving)
        saving.add_done_callback(self._savings.discard)

    def _save(self, state: InForce) -> None:
        """Write down what serves, in the background and in order: a disk may take its time."""
        try:
            state_dir.save_last_good(self._state_dir, state.kept, self._saved)
            self._saved = state.kept
            state_dir.save_policies(self._state_dir, state.texts())
        except OSError as error:
            problem = Rejected("last_good_not_saved", f"cannot be written: {error.strerror}", location=PLACE)
            if self.unsaved is None:
                self._log.error("last_good_not_saved", code=problem.code, message=problem.message, location=PLACE)
            self.unsaved = problem
        else:
            if self.unsaved is not None:
                self._log.info("last_good_saved", location=PLACE)
            self.unsaved = None

    def _show(self, state: InForce) -> None:
        now = self._clock()
        self._metrics.policy_reload_ok.set(state.ok)
        self._metrics.policy_generation.set(state.generation)
        self._metrics.policy_structures.set(len({plan.structure.id for plan in state.policies.plans()}))
        live = {plan.policy: plan.policy_id for plan in state.policies.plans()}
        self._metrics.policies(live, {name: now - since for name, since in state.bad.items()})

    def _started(self) -> InForce:
        if self.in_force is None:
            raise NotReady("no policies have been read yet")
        return self.in_force

    @property
    def generation(self) -> int:
        """How often the policies in force have changed; 0 = none have been read."""
        return self.in_force.generation if self.in_force else 0

    @property
    def edition(self) -> object:
        """Equal as long as neither the files nor what is in force of them has changed."""
        return (self.in_force.generation, self.in_force.listing) if self.in_force else None

    # ---- saying so ---------------------------------------------------------------------------------------------

    def status(self, killed: frozenset[str]) -> dict[str, object]:
        """The status document's `policies` by name."""
        return document(self.in_force, self._clock(), killed) if self.in_force else {}

    def document(self, killed: frozenset[str]) -> dict[str, object]:
        """The document of `GET /admin/v1/policies`."""
        state = self._started()
        return {
            "generation": state.generation,
            "loaded_at": state.loaded_at,
            "last_attempt_at": state.attempt_at,
            "last_attempt_ok": state.ok,
            "folder": "present" if state.listing.present else "missing",
            "default": state.policies.default,
            "policies": document(state, self._clock(), killed),
            "errors": [one.data() for one in state.policies.findings],
        }
