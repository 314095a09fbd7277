"""The snapshots in memory: the active one, those that are kept for an instant rollback, and those that drain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

from app.config import Deployment
from app.runtime.desired import Option
from app.runtime.snapshot import BatchKey, Snapshot
from app.runtime.states import State
from app.runtime.status import now_iso
from app.vocab.manifest import Kind

MAX_NAMES: Final = 2000


@dataclass(frozen=True, slots=True)
class Resident:
    """Weights, vocab and contract in memory.

    snapshot    as it was put together last; its policies may be older than those in force
    deployment  the overlay that it was made for
    warmed      structures that were tried on it
    active_at   when it became the active one, the last time
    """

    snapshot: Snapshot
    weights: Option
    vocab: Option
    deployment: Deployment
    warmed: frozenset[str]
    ready_at: str
    active_at: str | None = None

    @property
    def key(self) -> BatchKey:
        """What tells residents apart."""
        return self.snapshot.batch_key

    @property
    def versions(self) -> tuple[str, str]:
        """The names of its weights and its vocab."""
        return self.weights.version, self.vocab.version


class Residents:
    """Event loop only. retire: called with a snapshot that nobody holds and nobody keeps any more."""

    def __init__(self, retire: Callable[[Resident], None]) -> None:
        self._retire = retire
        self._kept: dict[BatchKey, Resident] = {}
        self._draining: dict[BatchKey, Resident] = {}
        self._names: dict[str, BatchKey] = {}

    def __iter__(self) -> Iterator[Resident]:
        return iter(tuple(self._kept.values()))

    def put(self, resident: Resident) -> None:
        """Keep one, as the youngest."""
        self._draining.pop(resident.key, None)
        self._kept.pop(resident.key, None)
        self._kept[resident.key] = resident
        self.name(resident.snapshot)

    def learn(self, kind: Kind, option: Option) -> None:
        """What a version that is kept requires, as its manifest says now; its age stays."""
        for key, one in tuple(self._kept.items()):
            mine = one.weights if kind == "weights" else one.vocab
            if mine.digest == option.digest and mine != option:
                self._kept[key] = replace(one, weights=option) if kind == "weights" else replace(one, vocab=option)

    def name(self, snapshot: Snapshot) -> None:
        """Remember a snapshot's id: people name what they saw, whatever the policies were then."""
        self._names[snapshot.id] = snapshot.batch_key
        if len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]

    def get(self, key: BatchKey) -> Resident | None:
        """One that is kept."""
        return self._kept.get(key)

    def named(self, snapshot_id: str) -> Resident | None:
        """The one whose snapshot has, or had, an id."""
        key = self._names.get(snapshot_id)
        return self._kept.get(key) if key is not None else None

    def trim(self, serving: Collection[BatchKey | None], keep: int) -> tuple[BatchKey, ...]:
        """Keep those that serve, or are about to, and the `keep` youngest others; the rest drains until `idle`. Their
        keys."""
        others = [key for key in self._kept if key not in serving]
        leaving = tuple(others[: max(0, len(others) - keep)])
        for key in leaving:
            self._draining[key] = self._kept.pop(key)
        return leaving

    def leave_unserved(self, serving: Collection[BatchKey | None]) -> tuple[BatchKey, ...]:
        """Let those drain that were never admitted on and are not about to be; nobody can hold them. Their keys."""
        leaving = tuple(key for key, one in self._kept.items() if key not in serving and one.active_at is None)
        for key in leaving:
            self._draining[key] = self._kept.pop(key)
        return leaving

    def idle(self, key: BatchKey) -> None:
        """Nobody holds a key any more."""
        gone = self._draining.pop(key, None)
        if gone is not None:
            self._names = {name: known for name, known in self._names.items() if known != key}
            self._retire(gone)

    def uses(self, active: BatchKey) -> dict[tuple[Kind, str], tuple[State, str]]:
        """(kind, version) -> (the strongest state that a snapshot in memory gives it, its digest there)."""
        found: dict[tuple[Kind, str], tuple[State, str]] = {}
        for resident, state in self._states(active):
            options: tuple[tuple[Kind, Option], ...] = (("weights", resident.weights), ("vocab", resident.vocab))
            for kind, option in options:
                known = found.get((kind, option.version))
                if known is None or _ORDER.index(state) < _ORDER.index(known[0]):
                    found[kind, option.version] = state, option.digest
        return found

    def contracts(self) -> frozenset[str]:
        """The contracts that are in use."""
        return frozenset(one.snapshot.contract.id for one in (*self._kept.values(), *self._draining.values()))

    def documents(
        self, active: Snapshot, held: Callable[[BatchKey], int], asked: Deployment
    ) -> list[dict[str, object]]:
        """As `GET snapshots` lists them, the active one first. asked: what deployment.toml asks for."""
        shown: list[dict[str, object]] = [
            {
                "id": active.id if resident.key == active.batch_key else resident.snapshot.id,
                "state": str(state),
                "contract": resident.snapshot.contract.id,
                "deployment": "current" if resident.deployment == asked else "earlier",
                "weights": {"version": resident.weights.version, "digest": resident.weights.digest},
                "vocab": {"version": resident.vocab.version, "digest": resident.vocab.digest},
                "requests": held(resident.key),
                "ready_at": resident.ready_at,
                "active_at": resident.active_at,
            }
            for resident, state in self._states(active.batch_key)
        ]
        return sorted(shown, key=lambda one: _ORDER.index(State(str(one["state"]))))

    def _states(self, active: BatchKey) -> Iterator[tuple[Resident, State]]:
        for key, resident in self._kept.items():
            yield resident, State.ACTIVE if key == active else State.READY
        for resident in self._draining.values():
            yield resident, State.DRAINING


_ORDER = (State.ACTIVE, State.READY, State.DRAINING)


def adopted(snapshot: Snapshot, weights: Option, vocab: Option, deployment: Deployment) -> Resident:
    """A snapshot that serves already."""
    warmed = frozenset(plan.structure.id for plan in snapshot.policies.plans())
    return Resident(snapshot, weights, vocab, deployment, warmed, now_iso(), now_iso())
