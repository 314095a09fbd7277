"""Live weights and vocab: what the disk asks for, what can be used, and step by step towards it (RecoGEM 3.3).

Slow work runs in one thread of low priority, one set after another: a slow older load never replaces a newer version.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Hashable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from app.config import DEPLOYMENT, Deployment, read_overlay
from app.errors import Rejected
from app.runtime.apart import BY_POLICIES, Apart
from app.runtime.audit import Audit
from app.runtime.background import Background
from app.runtime.contracts import Contracts
from app.runtime.desired import PIN, Ask, Option, choose, usable
from app.runtime.ledger import Ledger
from app.runtime.logs import Log
from app.runtime.memory import EXHAUSTED
from app.runtime.overlay import Overlay, overlay
from app.runtime.pace import Pace
from app.runtime.policy_updates import PolicyUpdates
from app.runtime.preparing import NoSlot, Refused, Want
from app.runtime.residents import Resident
from app.runtime.retries import Retries
from app.runtime.runtime import Runtime
from app.runtime.snapshot import Snapshot
from app.runtime.stage import HEAVY, IN_MEMORY, Overtaken, Stage
from app.runtime.states import State
from app.runtime.status import Reason, unfinished
from app.runtime.survey import Candidate, Survey, asked_anew, survey
from app.runtime.waiting import CHANGED, cause, note_chosen, note_gone, note_no_slot, together, unmet
from app.vocab.manifest import Kind, version_key

PERIOD_S: Final = 5.0
QUIET_S: Final = 0.2
RESTLESS_S: Final = 2.0
"""After so long of edits without a pause of `QUIET_S`, one of `SHORT_S` will do."""
SHORT_S: Final = 0.03
MOST_RESTLESS_S: Final = 4.0
"""And after so long nobody waits for one."""
CONTRACT: Final = "contract"


class ArtifactUpdates:
    """Follows the versions of a root. Event loop only.

    hint   set after anything below the root has moved
    stage  the sets in memory
    told   set, and replaced by a new one, whenever something was decided
    """

    def __init__(
        self,
        root: Path,
        deployment: Deployment,
        runtime: Runtime,
        policies: PolicyUpdates,
        composing: asyncio.Lock,
        compose: Callable[[Snapshot], Snapshot],
        ledger: Ledger,
        contracts: Contracts,
        hint: asyncio.Event,
        log: Log,
    ) -> None:
        self._root, self._state_dir = root, root / deployment.server.state_dir
        self._deployment, self._began = deployment, read_overlay(root)
        self._policies, self._ledger, self._hint, self._log = policies, ledger, hint, log
        self._background = Background("artifacts", heavy=True)
        self._decisions, self._busy = 0, lambda: runtime.busy
        self._audit = Audit(self._audited, Pace(self._busy))
        self._survey: Survey | None = None
        self._settled: tuple[str, object, object] = ("", None, None)  # a survey, and what served when it was done with
        self._refused: dict[tuple[Kind, str], str] = {}
        self._retries = Retries(time.monotonic)
        self._apart = Apart(self._retries)
        self._contracts, self._full = contracts, False  # there was no room for a contract, and it is not time to look
        self._overlay = Overlay(deployment)
        self._said = self._overlay.document(deployment)  # what a start asks for is no news when it serves
        self.stage = Stage(root, runtime, policies, self._background, composing, compose, ledger, contracts)
        self.told = asyncio.Event()

    def close(self) -> None:
        """End the threads."""
        self._audit.close()
        self._background.close()
        self.stage.close()

    def start(self, snapshot: Snapshot) -> None:
        """Take over what the runtime has started with."""
        self.stage.start(snapshot, self._deployment)

    # ---- following the disk ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the disk, and look at the files of what is in memory beside that."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._audit.run(self._hint))
            await self._follow()

    async def _follow(self) -> None:
        """Look after every hint, and every five seconds whatever hints say. A bug of ours is logged, and it goes on."""
        while True:
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001  the loop that repairs things must not end
                self._log.error("artifact_update_failed", exc_info=error)
            self.tell()
            await self._hinted()

    async def _hinted(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_S * random.uniform(0.8, 1.0)):  # noqa: S311  not all replicas at once
                await self._hint.wait()
        self._hint.clear()

    async def check(self) -> None:
        """Bring what serves up to what the disk asks for."""
        while True:
            seen = await self._still_survey()
            self._look(seen)
            note_gone(self._ledger, self.stage.serving, seen)
            self._try_again(seen)
            await self._keep_contract()
            edition = self._policies.edition
            if edition != self._settled[1]:
                self._apart.policies_changed()
                if self._overlay.problem is not None and self._overlay.problem.code in BY_POLICIES:
                    self._look_at_overlay(seen)
            # a pin that came and went between two surveys leaves the same disk and another set that serves
            serving = self.stage.serving
            now = (seen.fingerprint, edition, serving.snapshot.batch_key if serving else None)
            if self._settled == now:
                return
            if not await self._pursue(seen):
                self._settled = now
                return
            self.tell()

    async def _still_survey(self) -> Survey:
        """What the disk says; an overlay that has changed is believed when two surveys agree on it. One that is edited
        without a pause is believed sooner, and where that does not help what was known of it holds: versions go on."""
        believed = known = self._survey
        began = time.monotonic()
        while True:
            seen = await self._surveyed(self._survey)
            if believed is None or known is None or seen.deployment == known.deployment:
                return seen
            waited, known = time.monotonic() - began, seen
            if waited > MOST_RESTLESS_S:
                return seen._replace(deployment=believed.deployment)
            await asyncio.sleep(QUIET_S if waited < RESTLESS_S else SHORT_S)

    async def _surveyed(self, known: Survey | None) -> Survey:
        look = partial(survey, self._root, self._state_dir, known, HEAVY, Pace(self._busy))
        return await self._background.run(look)

    async def _pursue(self, seen: Survey) -> bool:
        """One step towards what is wanted; False where there is nothing left to do for this survey."""
        want = self._wanted(seen, seen.ask)
        if want is not None and not self._serves(want):
            resident = self.stage.resident(want) or await self._beside(self._prepare(want))
            decisions = self._decisions
            if resident is not None and await self._still(want, seen):
                await self._try(want, resident, cause(seen, want, self.stage.serving), decisions)
            return True
        ahead = self._wanted(seen, {}) if seen.asked_by == f"state/{PIN}" else None
        if ahead is not None and self.stage.resident(ahead) is None:  # it waits, ready, for the pin to go
            await self._beside(self._prepare(ahead))
            return True
        return False

    async def _beside(self, preparing: Coroutine[None, None, Resident | None]) -> Resident | None:
        """Prepare a set; what is asked for meanwhile, and is in memory, does not wait for that."""
        obeying = asyncio.ensure_future(self._obey())
        try:
            return await preparing
        finally:
            obeying.cancel()  # what it was about to do, the next look at the disk does
            await asyncio.wait((obeying,))

    async def _obey(self) -> None:
        while True:
            await self._hinted()
            try:
                await self.serve_at_once()
            except Exception as error:  # noqa: BLE001  as in `_follow`
                self._log.error("artifact_update_failed", exc_info=error)

    def decided(self) -> None:
        """Somebody has said anew what shall serve: what is about to serve because of something older does not."""
        self._decisions += 1

    async def serve_at_once(self) -> None:
        """What is asked for now and is in memory serves, whatever is being loaded; `check` comes to everything else."""
        decisions, known = self._decisions, self._survey
        seen = await asyncio.to_thread(asked_anew, known, self._root, self._state_dir) if known else None
        found = self._in_memory(seen) if seen else None
        if seen and found and not self._serves(found[0]):
            await self._try(*found, cause(seen, found[0], self.stage.serving), decisions)
            self.tell()

    def _in_memory(self, seen: Survey) -> tuple[Want, Resident] | None:
        """What is asked for, as it is in memory: with the newest that goes with it, else with what serves beside it;
        under the overlay as it is on the disk, else as it is in force."""
        serving = self.stage.serving
        if serving is None:
            return None
        same = dict(zip(HEAVY, serving.versions, strict=True))
        wants = [self._wanted(seen, seen.ask), self._wanted(seen, {**same, **seen.ask})]
        overlays = self._overlay.deployment, serving.deployment
        every = [want._replace(deployment=one) for want in wants if want for one in overlays]
        return next(((want, one) for want in every if (one := self.stage.resident(want))), None)

    async def _still(self, want: Want, seen: Survey) -> bool:
        """Whether nobody has asked for something else while a set was being prepared."""
        now = await self._surveyed(seen)
        return now.ask == seen.ask or self._wanted(now, now.ask) == want

    async def _try(self, want: Want, resident: Resident, cause: str, decisions: int) -> None:
        """decisions: how many there were when somebody looked at what is wanted"""
        try:
            await self.stage.promote(resident, cause, lambda: self._decisions != decisions)
            self._say_overlay()
        except Overtaken:
            return  # the next look at the disk sees what was decided
        except Rejected as error:
            self._set_apart(want, error)

    def _try_again(self, seen: Survey) -> None:
        """What was refused for a reason that may have passed counts as new."""
        for what in self._retries.due():
            if what == CONTRACT:
                self._full = False
                continue
            self._settled = ("", None, None)
            if what == DEPLOYMENT:
                self._look_at_overlay(seen)
            self._refused = {known: why for known, why in self._refused.items() if known != what}
            self._doubt_again(what, seen)
            self._apart.again(what)

    async def _keep_contract(self) -> None:
        """What serves has its contract on the disk, as soon as there is room for it."""
        serving = self.stage.serving
        if serving is None or self._full or not self._contracts.waits(serving.snapshot.contract.id):
            return
        if await self._background.run(partial(self._contracts.keep, serving.snapshot.contract.id)):
            self._retries.forget(CONTRACT)
        else:
            self._full = True
            self._retries.refused(CONTRACT, "contract_not_stored")

    def _wanted(self, seen: Survey, ask: Ask) -> Want | None:
        """The set that should serve, of what can be used now; None where nothing that is asked for can."""
        if seen.problem is not None:
            return None
        chosen = choose(self._options(seen, "weights", ask), self._options(seen, "vocab", ask), self._apart.pairs)
        if not ask:
            note_chosen(self._ledger, chosen)
        if chosen.weights is None or chosen.vocab is None:
            return None
        return Want(chosen.weights, chosen.vocab, self._overlay.deployment)

    def _options(self, seen: Survey, kind: Kind, ask: Mapping[Kind, str]) -> tuple[Option, ...]:
        """Usable versions of a kind, newest first. What serves keeps its place although its files may be gone or bad,
        what else is in memory comes last then. What has come in the place of one, under its name, counts once it was
        looked at."""
        serving = self.stage.serving
        residents = sorted(self.stage.residents, key=lambda one: one is not serving)
        resting = [one.weights if kind == "weights" else one.vocab for one in residents]
        digests, doubted = {option.digest for option in resting}, self._audit.pending
        refused = {version for known, version in self._refused if known == kind}
        found = [
            option
            for option in usable(seen.candidates[kind], ask.get(kind), refused)
            if (kind, option.version) not in doubted or option.digest in digests
        ]
        for resident, option in zip(residents, resting, strict=True):
            if option.digest not in {one.digest for one in found} and ask.get(kind) in {None, option.version}:
                newer = [one for one in found if version_key(one.version) >= version_key(option.version)]
                found.insert(len(newer) if resident is serving else len(found), option)
        return tuple(found)

    def _serves(self, want: Want) -> bool:
        serving = self.stage.serving
        return serving is not None and want.met_by(serving)

    # ---- what the disk says, written down ------------------------------------------------------------------------

    def _look(self, seen: Survey) -> None:
        """Bring ledger, overlay and refusals up to a survey."""
        known, self._survey = self._survey, seen
        self._drop_doubts(seen)
        digests = {digest for one in self.stage.residents for digest in (one.weights.digest, one.vocab.digest)}
        if known is None or known.deployment != seen.deployment:
            self._retries.forget(DEPLOYMENT)
            self._look_at_overlay(seen)
        for kind in HEAVY:
            there = {one.version: one for one in seen.candidates[kind]}
            before = {one.version: one for one in known.candidates[kind]} if known else {}
            for version, one in there.items():
                if version not in before or before[version].fingerprint != one.fingerprint:
                    self._retries.forget((kind, version))
                    self._look_at(kind, one, first=known is None)
            digests |= {one.manifest.digest for one in there.values() if one.manifest is not None}
            for version in set(self._ledger.versions(kind)) - set(there):
                self._refused.pop((kind, version), None)
                self._audit.drop(kind, version)
                self._retries.forget((kind, version))
                if self._ledger.state(kind, version) not in IN_MEMORY:
                    self._ledger.forget(kind, version)
        self._apart.keep(digests)

    def _look_at_overlay(self, seen: Survey) -> None:
        before = self._overlay
        self._overlay = overlay(seen.deployment, self._began, self._deployment, before.deployment)
        if self._overlay.deployment != before.deployment:
            self._refused.clear()  # another contract: what did not fit may fit now
            self._apart.clear()
        self._say_overlay()

    def _look_at(self, kind: Kind, one: Candidate, *, first: bool) -> None:
        """A version is new, or its files have changed. first: nothing was known before but what the start has seen."""
        state = self._ledger.state(kind, one.version)
        if state in IN_MEMORY and state is not None:
            if not first:
                self._doubt(kind, one)
            if one.manifest is not None:
                self.stage.residents.learn(kind, Option.of(one.manifest))
            return
        if first and state is State.REJECTED:
            self._refused[kind, one.version] = one.fingerprint
            reason = self._ledger.reason(kind, one.version)
            self._retries.refused((kind, one.version), reason.code if reason else "")
        if self._refused.get((kind, one.version)) == one.fingerprint:
            return
        self._refused.pop((kind, one.version), None)
        if state is not State.DISCOVERED:  # else it stays for the reason that it has
            self._ledger.move(kind, one.version, State.DISCOVERED)
        if one.problem is not None:
            self._refuse(kind, one.version, one.problem)
        elif one.manifest is None:
            self._ledger.move(kind, one.version, State.INCOMPLETE, reason=unfinished(kind, one.version))

    def _doubt(self, kind: Kind, one: Candidate) -> None:
        """The files of a version in memory have changed. What serves is the process's own copy and goes on."""
        if one.manifest is not None:
            self._audit.doubt(kind, one)
            return
        self._audit.drop(kind, one.version)
        self._audited(kind, one, one.problem or Rejected("manifest_missing", "the manifest is gone"))

    def _doubt_again(self, what: Hashable, seen: Survey) -> None:
        """Files of a version in memory that could not be looked at may be read by now."""
        for kind in HEAVY:
            for one in seen.candidates[kind]:
                reason = self._ledger.reason(kind, one.version) if (kind, one.version) == what else None
                if reason is not None and reason.code == CHANGED:
                    self._doubt(kind, one)

    def _drop_doubts(self, seen: Survey) -> None:
        """What has left memory is a version on the disk like any other, which whoever loads it looks at."""
        for kind, version in self._audit.pending:
            if self._ledger.state(kind, version) not in IN_MEMORY:
                self._audit.drop(kind, version)
                self._refused.pop((kind, version), None)
        for kind in HEAVY:
            for one in seen.candidates[kind]:
                key = kind, one.version
                if key in self._refused and self._ledger.state(*key) is State.RETIRED:
                    del self._refused[key]
                    self._settled = ("", *self._settled[1:])
                    self._look_at(kind, one, first=False)

    def _audited(self, kind: Kind, one: Candidate, problem: Rejected | None) -> None:
        """Whether the files of a version in memory are good is known now, and with that which versions can be used."""
        self._refused.pop((kind, one.version), None)
        self._settled = ("", *self._settled[1:])
        state, reason = self._ledger.state(kind, one.version), None
        if state is None or state not in IN_MEMORY:  # it has left meanwhile: whoever loads it again will see
            return
        if problem is not None:
            message = f"what is in memory serves on; on the disk: {problem}"
            reason = Reason(CHANGED, message, f"{kind}/{one.version}")
            self._refused[kind, one.version] = one.fingerprint
            self._retries.refused((kind, one.version), problem.code)
        self._ledger.move(kind, one.version, state, reason=reason)

    def _refuse(self, kind: Kind, version: str, error: Rejected) -> None:
        """A version is bad until its files change, or what was wrong may have passed."""
        self._retries.refused((kind, version), error.code)
        seen = self._survey
        found = next((one for one in seen.candidates[kind] if one.version == version), None) if seen else None
        self._refused[kind, version] = found.fingerprint if found else ""
        state = self._ledger.state(kind, version)
        if state is not None and state in IN_MEMORY:  # published again under the same name; the copy in memory is good
            self._ledger.move(kind, version, state, reason=Reason(error.code, error.message, f"{kind}/{version}"))
        else:
            self._ledger.reject(kind, version, error)

    def _set_apart(self, want: Want, error: Rejected) -> None:
        """A set does not work together. An edited overlay is blamed where all else serves already, or new versions."""
        if want.is_about_overlay(self.stage.serving):
            running = self.stage.serving.deployment if self.stage.serving else self._deployment
            self._overlay = Overlay(running, self._overlay.restart, error.bare())
            self._retries.refused(DEPLOYMENT, error.code)
            self._say_overlay()
            self._log.error("deployment_rejected", code=error.code, message=error.message, location=error.location)
            return
        self._apart.add((want.weights.digest, want.vocab.digest), error.code)
        for kind, one in want.options:
            if self._ledger.state(kind, one.version) not in IN_MEMORY:
                self._ledger.reject(kind, one.version, error)

    async def _prepare(self, want: Want) -> Resident | None:
        """A set in memory, or None where something was refused and written down."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            resident = await self.stage.prepare(want)
        except Refused as error:
            self._note_refused(want, error.error, error)
        except Rejected as error:
            self._note_refused(want, error)
        except EXHAUSTED as error:
            self._note_refused(want, Rejected("no_memory", f"there was none left while it was prepared: {error}"))
        except NoSlot as error:
            note_no_slot(self._ledger, want.weights.version, str(error))
            await asyncio.sleep(QUIET_S)  # and once more, for whatever is wanted then
        else:
            versions = {kind: option.version for kind, option in want.options}
            took = round(1e3 * (clock() - began), 1)
            self._log.info("snapshot_ready", snapshot=resident.snapshot.id, prepare_ms=took, **versions)
            return resident
        return None

    def _note_refused(self, want: Want, error: Rejected, of: Refused | None = None) -> None:
        """A set was refused, for one of its versions or as a set. Where memory is short, rollbacks go first."""
        if error.code == "no_memory" and self.stage.make_room():
            return  # and once more
        if of is not None and not want.is_about_overlay(self.stage.serving):
            self._refuse(of.kind, of.version, error)
        else:
            self._set_apart(want, error)

    def tell(self) -> None:
        """Something was decided, or a start has looked."""
        told, self.told = self.told, asyncio.Event()
        told.set()

    # ---- saying so -------------------------------------------------------------------------------------------------

    def desired(self) -> dict[str, object]:
        """What is asked for, by whom, and which set that comes to, or why it cannot be followed."""
        seen = self._survey
        if seen is None:
            return {}
        shown: dict[str, object] = {"asked": dict(seen.ask), "by": seen.asked_by}
        wanted = self._wanted(seen, seen.ask)
        if wanted is not None:
            shown["wanted"] = {"weights": wanted.weights.version, "vocab": wanted.vocab.version}
        problem = seen.problem or (None if wanted else unmet(self._ledger, seen))
        if problem is not None:
            shown["problem"] = {"code": problem.code, "message": problem.message, "location": problem.location}
        return shown

    def snapshots(self) -> list[dict[str, object]]:
        """The snapshots in memory, the active one first."""
        return self.stage.documents(self._overlay.deployment)

    def may_stay(self, resident: Resident) -> bool:
        """Whether a set in memory is one that deployment.toml allows, as it is on the disk or as it still serves."""
        serving = self.stage.serving
        return resident.deployment in (self._overlay.deployment, serving and serving.deployment)

    def apart(self, ask: Ask) -> Rejected | None:
        """Why versions cannot serve together; None where they can, are not known yet, or what they need may come."""
        seen = self._survey
        weights, vocab = (self._options(seen, kind, ask) if seen else () for kind in HEAVY)
        return together(weights, vocab, self._apart.pairs, ask)

    def overlay(self) -> dict[str, object]:
        """What became of the last edit of deployment.toml."""
        return self._overlay.document(self.stage.serving.deployment if self.stage.serving else None)

    def _say_overlay(self) -> None:
        """Write down what became of it, where that is news."""
        now = self.overlay()
        if now != self._said:
            self._said = now
            self._ledger.note("deployment", **now)
            (self._log.info if self._overlay.problem is None else self._log.error)("deployment", **now)
