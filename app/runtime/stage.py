"""From a wanted set to a resident, and from a resident to the snapshot that new requests are admitted on.

Everything slow happens beside the requests. What becomes visible is one reference swap: nothing drains, nothing is
refused, and what is queued or running finishes on what it was admitted on. Other weights or another vocab are swapped
to at a moment when nobody is queued, if one comes soon: a batch holds requests of one set, so who waited on the old one
would be a batch of their own.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from app.config import Deployment
from app.engine.slots import Slots
from app.errors import Rejected
from app.runtime.apart import NO_DEFAULT, POLICY_LOST
from app.runtime.background import Background
from app.runtime.contracts import Contracts
from app.runtime.desired import Option
from app.runtime.expectations import read_canary
from app.runtime.in_force import InForce
from app.runtime.ledger import Ledger
from app.runtime.pace import Pace
from app.runtime.policy_updates import PolicyUpdates
from app.runtime.preparing import Preparation, Refused, Want
from app.runtime.residents import Resident, Residents, adopted
from app.runtime.runtime import Runtime
from app.runtime.snapshot import BatchKey, Snapshot
from app.runtime.states import MOVES, State
from app.runtime.status import now_iso
from app.vocab.manifest import Kind

IN_MEMORY: Final = frozenset({State.ACTIVE, State.READY, State.DRAINING})
HEAVY: Final[tuple[Kind, ...]] = ("weights", "vocab")
_BEFORE: Final = {State.LOADING: State.VERIFYING, State.WARMING: State.VALIDATING}
"""What lies between DISCOVERED and these."""
FIXED_SLOTS: Final = 2
"""Weight slots beside those for rollbacks: one serves, one is written."""
WAIT_S: Final = 0.25
"""Seconds that a swap waits at most for a moment when nobody is queued. One comes with each batch that takes all who
wait, so within the time of a batch; under overload none comes."""


class Overtaken(Exception):
    """Somebody has decided otherwise before a set was admitted on."""


class _Next(NamedTuple):
    """A resident as it is to be admitted on.

    state     the policies in force, compiled for it
    swaps     how many there had been, and in_force: what policies there were, when it was put together: once somebody
              has swapped or edited, it is put together anew
    """

    resident: Resident
    state: InForce
    swaps: int
    in_force: InForce | None


class Stage:
    """The sets in memory, and their way there. Event loop only.

    background  the thread for loading · composing: held by whoever makes the next snapshot out of the active one
    compose     puts what else belongs to a snapshot into it: kills and take-downs
    """

    def __init__(
        self,
        root: Path,
        runtime: Runtime,
        policies: PolicyUpdates,
        background: Background,
        composing: asyncio.Lock,
        compose: Callable[[Snapshot], Snapshot],
        ledger: Ledger,
        contracts: Contracts,
    ) -> None:
        self._root, self._runtime, self._policies, self._ledger = root, runtime, policies, ledger
        self._contracts, self._pace = contracts, Pace(lambda: runtime.busy)
        self._background, self._composing, self._compose = background, composing, compose
        self._promoting = asyncio.Lock()  # one after another, in the order in which they were asked for
        self._coming: BatchKey | None = None  # of the one whose turn it is: its memory stays
        self._preparing: str | None = None  # the contract of the set that is tried: its memory stays, too
        self._composer, self._preparer = Background("compose"), Background("prepare")
        self._burials: set[asyncio.Future[None]] = set()
        self.residents = Residents(self._retire)

    def close(self) -> None:
        """End the threads."""
        self._composer.close()
        self._preparer.close()

    def start(self, snapshot: Snapshot, deployment: Deployment) -> None:
        """Take over what the runtime has started with."""
        weights = Option(snapshot.weights.version, snapshot.weights.digest, {})
        vocab = Option(snapshot.vocab_ref.version, snapshot.vocab_ref.digest, {})
        self.residents.put(adopted(snapshot, weights, vocab, deployment))
        self._runtime.on_idle(self.residents.idle)
        self._runtime.swapped = self._swapped

    @property
    def serving(self) -> Resident | None:
        """The set that new requests are admitted on."""
        active = self._runtime.active
        return self.residents.get(active.batch_key) if active else None

    def resident(self, want: Want) -> Resident | None:
        """A set that is in memory."""
        return next((one for one in self.residents if want.met_by(one)), None)

    async def prepare(self, want: Want) -> Resident:
        """Everything up to `ready`. Raises Refused for a version, Rejected where the set does not work together, or a
        policy that serves could not with a new version, NoSlot where its weights have nowhere to go until requests on
        older ones have ended."""
        active = self._runtime.active
        assert active is not None, "updates begin when something serves"
        slots = active.engine.slot.slots if active.engine.slot else Slots()
        slots.most = FIXED_SLOTS + active.contract.limits.rollback
        if slots.full:
            self._supersede(active.batch_key)
        preparation = Preparation(
            self._root, active.engine.device, slots, self._contracts, self._background, self._pace, self._moved
        )
        parts = await preparation.parts(want, self.residents)
        snapshot, state = await self._composed(parts.snapshot(active.policies), self._preparer)
        serving = self.serving
        if serving is not None and serving.deployment == want.deployment:  # an edited overlay is meant as it is written
            _check_kept(active, state)
        self._preparing = snapshot.contract.id
        try:
            resident = await self._tried(want, snapshot, state)
            self.residents.put(resident)
        finally:
            self._preparing = None
            self._forget(snapshot.contract.id)
        self._mark()
        return resident

    async def _tried(self, want: Want, snapshot: Snapshot, state: InForce) -> Resident:
        """A set that has its state memory and has served requests of ours. Raises as `prepare`."""
        await self._background.run(lambda: self._runtime.allocate(snapshot))
        for kind, option in want.options:
            self._moved(kind, option, State.WARMING)
        warmed = await self._warmed(snapshot, state, frozenset())
        await self._expected(snapshot, want)
        return Resident(snapshot, want.weights, want.vocab, want.deployment, warmed, now_iso())

    def _forget(self, contract: str) -> None:
        """Give a contract's state memory back, unless a set needs it."""
        if contract != self._preparing and contract not in self.residents.contracts():
            self._runtime.forget(contract)

    def _supersede(self, active: BatchKey) -> None:
        """Give up what was made ready and never served: something newer needs its slot."""
        for key in self.residents.leave_unserved({active, self._coming}):
            self.residents.idle(key)
        self._mark()

    async def promote(self, resident: Resident, cause: str, moot: Callable[[], bool] = lambda: False) -> Snapshot:
        """Admit new requests on a resident, at a moment when nobody is queued, `WAIT_S` after it is ready for that at
        the latest. Raises Rejected where the policies in force cannot serve with it.

        It waits without `composing`: edits and take-downs are live at once, and are in what is then swapped to. moot:
        whether somebody has decided otherwise, before this is begun or while it waits; then it raises Overtaken.
        """
        async with self._promoting:
            self._coming = resident.key
            try:
                return await self._promoted(resident, cause, moot)
            finally:
                self._coming = None

    async def _promoted(self, resident: Resident, cause: str, moot: Callable[[], bool]) -> Snapshot:
        """`promote`, when it is its turn."""
        clock, latest = asyncio.get_running_loop().time, math.inf
        while True:
            async with self._composing:
                active = self._runtime.active
                same = active is not None and active.batch_key == resident.key
                if active is not None and same and _versions(active) == resident.versions:
                    return active
                del active  # it may leave memory as soon as something else serves
                made = await self._made(resident)
                latest = min(latest, clock() + WAIT_S)
                if moot():
                    raise Overtaken
                if same or clock() >= latest:  # batches are of one key: an equal one splits none
                    return self._cut_over(made, cause)
            moment = partial(self._cut_over_unless_changed, made, cause, moot)
            snapshot = await self._runtime.once_nobody_waits(moment, latest - clock())
            if snapshot is not None:
                return snapshot
            resident = made.resident  # what was tried on it is known

    async def _made(self, resident: Resident) -> _Next:
        """With the policies in force, tried. Under `composing`, so that only kills come meanwhile."""
        snapshot, state = await self._composed(resident.snapshot, self._composer)
        warmed = await self._warmed(snapshot, state, resident.warmed)
        resident = replace(resident, snapshot=snapshot, warmed=warmed | resident.warmed)
        return _Next(resident, state, self._runtime.swaps, self._policies.in_force)

    def _cut_over_unless_changed(self, made: _Next, cause: str, moot: Callable[[], bool]) -> Snapshot | None:
        """None where somebody has changed what serves since it was made, or is about to."""
        changed = moot() or self._runtime.swaps != made.swaps or self._policies.in_force is not made.in_force
        return None if changed or self._composing.locked() else self._cut_over(made, cause)

    def _cut_over(self, made: _Next, cause: str) -> Snapshot:
        """The swap, and all that is to be noted with it, in one turn of the loop: a cancellation comes before or
        after it."""
        snapshot = self._compose(made.resident.snapshot)  # somebody may have been killed meanwhile
        self._runtime.swap(snapshot, cause)
        self._policies.adopt(made.state)
        self.residents.put(replace(made.resident, snapshot=snapshot, active_at=now_iso()))
        self._mark()
        self._trim()
        return snapshot

    def _swapped(self, snapshot: Snapshot, before: Snapshot | None, cause: str) -> None:
        """Whoever has made the next snapshot: versions, policies, take-downs, a kill."""
        self.residents.name(snapshot)
        self._ledger.note("cutover", snapshot=snapshot.id, before=before.id if before else None, cause=cause)

    async def _composed(self, snapshot: Snapshot, background: Background) -> tuple[Snapshot, InForce]:
        """A snapshot with the policies in force, compiled for it. Raises Rejected where the default cannot serve.

        background: a thread that rollbacks have for themselves, or that of what is being prepared, which rests"""
        rest = Pace(lambda: self._runtime.busy) if background is self._preparer else lambda: None
        state = await self._policies.compiled_for(snapshot, background, rest)
        if state.policies.plan(state.policies.default) is None:
            message = f"the default policy `{state.policies.default}` cannot serve with it"
            raise Rejected(NO_DEFAULT, message, location="policies/")
        # take-downs of another vocab are looked up anew, which takes its time
        made = await background.run(lambda: self._compose(snapshot.having(policies=state.policies)))
        return made, state

    async def _warmed(self, snapshot: Snapshot, state: InForce, known: frozenset[str]) -> frozenset[str]:
        """Serve a made-up request under every structure that was not tried on this snapshot. Raises Rejected."""
        plans = tuple(plan for plan in state.policies.plans() if plan.structure.id not in known)
        failed = await self._runtime.warm(snapshot, plans, alone=True)
        if failed:
            raise Rejected("canary_failed", next(iter(failed.values())))
        return frozenset(plan.structure.id for plan in plans)

    async def _expected(self, snapshot: Snapshot, want: Want) -> None:
        """Ask what the versions say that they must answer. Raises Refused for the one that is answered otherwise."""
        for kind, option in want.options:
            directory = self._root / kind / option.version
            try:
                canary = await self._background.run(partial(read_canary, directory, kind))
                problem = await self._runtime.expect(snapshot, canary) if canary else None
            except Rejected as error:
                problem = error.bare()
            if problem is not None:
                raise Refused(kind, option.version, problem)

    def _moved(self, kind: Kind, option: Option, state: State) -> None:
        """A version goes on, or begins anew. What is in memory already keeps the state that it has there."""
        now = self._ledger.state(kind, option.version)
        if now in IN_MEMORY or now == state:
            return
        if now is not None and state not in MOVES[now]:
            self._ledger.move(kind, option.version, State.DISCOVERED)
            if state in _BEFORE:  # it was in memory when this was begun, and has left it meanwhile
                self._ledger.move(kind, option.version, _BEFORE[state])
        self._ledger.move(kind, option.version, state, digest=option.digest)

    def _mark(self) -> None:
        """Give every version the state that the snapshots in memory give it."""
        active = self._runtime.active
        uses = self.residents.uses(active.batch_key) if active else {}
        for (kind, version), (state, digest) in uses.items():
            now = self._ledger.state(kind, version)
            if now in {State.RETIRED, State.REJECTED}:
                self._ledger.move(kind, version, State.DISCOVERED)
            if now in {State.DISCOVERED, State.WAITING, State.RETIRED, State.REJECTED, None}:
                self._ledger.move(kind, version, State.VALIDATING)
            if state is not State.READY and self._ledger.state(kind, version) not in IN_MEMORY:
                self._ledger.move(kind, version, State.READY)
            reason = self._ledger.reason(kind, version) if now in IN_MEMORY else None
            self._ledger.move(kind, version, state, digest=digest, reason=reason)
        for kind in HEAVY:
            for version in self._ledger.versions(kind):
                now = self._ledger.state(kind, version)
                if (kind, version) not in uses and now in IN_MEMORY:
                    if now is State.ACTIVE:
                        self._ledger.move(kind, version, State.DRAINING)
                    self._ledger.move(kind, version, State.RETIRED)

    def _trim(self) -> None:
        active = self._runtime.active
        if active is not None:
            self._keep(active.contract.limits.rollback)

    def make_room(self) -> bool:
        """Give up what is kept for rollbacks; whether there was anything."""
        return self._keep(0)

    def _keep(self, others: int) -> bool:
        active = self._runtime.active
        leaving = self.residents.trim({active.batch_key, self._coming}, others) if active else ()
        self._mark()
        for key in leaving:
            if not self._runtime.held(key):
                self.residents.idle(key)
        return bool(leaving)

    def _retire(self, resident: Resident) -> None:
        """Nobody holds a set any more: its memory goes back, in the background, since freeing takes time, too."""
        self._mark()
        self._forget(resident.snapshot.contract.id)
        self._ledger.note("retired", snapshot=resident.snapshot.id)
        burial = asyncio.ensure_future(self._background.run([resident].clear))
        self._burials.add(burial)
        burial.add_done_callback(self._burials.discard)

    def documents(self, asked: Deployment) -> list[dict[str, object]]:
        """The snapshots in memory, the active one first. asked: what deployment.toml asks for."""
        active = self._runtime.active
        return self.residents.documents(active, self._runtime.held, asked) if active else []


def _check_kept(active: Snapshot, state: InForce) -> None:
    """What serves goes on serving. Raises Rejected, all findings together, for policies that serve, whose files are
    there, that nobody has killed, and that could not serve with new versions."""
    policies = state.policies.policies
    stopped = {plan.policy for plan in active.policies.plans() if active.plan(plan.policy) is not plan}
    lost = []
    for plan in active.policies.plans():
        loaded = policies.get(plan.policy)
        if loaded is not None and loaded.plan is None and loaded.errors and plan.policy not in stopped:
            first = loaded.errors[0]
            message = f"policy `{plan.policy}` serves, and could not with it: {first.message}"
            lost.append(Rejected(POLICY_LOST, message, location=f"{first.span.file}:{first.span.line}"))
    if lost:
        raise Rejected.together(lost)


def _versions(snapshot: Snapshot) -> tuple[str, str]:
    """What it is called: another name of equal content is no other snapshot, but answers are to say it."""
    return snapshot.weights.version, snapshot.vocab_ref.version
