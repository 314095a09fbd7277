"""The immutable set that a request is pinned to from admission to item mapping, and who still holds which."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.core import Contract
from app.engine.engine import Engine
from app.ops.upload import upload_beside
from app.policies.assign import Traffic
from app.policies.experiments import Loaded
from app.policies.plan import Plan
from app.runtime.takedowns import NOTHING, Takedowns
from app.vocab.aggregates import NOTHING as NOTHING_DECLARED
from app.vocab.aggregates import SideData
from app.vocab.vocab import Vocab

EVERYTHING = "*"
"""The kill switch's word for every policy and experiment."""


BatchKey = tuple[str, str, str]
"""Contract id, weights digest, vocab digest."""
Int64s = npt.NDArray[np.int64]


class DeadNodes(NamedTuple):
    """Prefixes of which every item is in a set: per step t the sorted trie nodes of depth t (prefix exhaustion).
    items: the set itself, sorted item numbers."""

    items: Int64s
    nodes: tuple[Int64s, ...]

    @classmethod
    def of(cls, vocab: Vocab, items: Int64s) -> DeadNodes | None:
        """What a set of items exhausts; None for no items."""
        if not len(items):
            return None
        unique = np.unique(items)
        return cls(unique, vocab.dead(unique))

    def plus(self, vocab: Vocab, items: Int64s) -> DeadNodes:
        """What these items exhaust together with the set, at the cost of these items and a copy of the set."""
        known, new = self.items, np.unique(items)
        new = new[np.searchsorted(known, new, "right") == np.searchsorted(known, new)]
        codes, below, levels = vocab.codes[new], np.zeros(len(new), np.int64), []
        for step, dead in enumerate(self.nodes):
            below = vocab.step(below, codes[:, step])
            nodes, count = np.unique(below, return_counts=True)
            low, high = vocab.items_below(nodes)
            left = high - low - (np.searchsorted(known, high) - np.searchsorted(known, low))
            levels.append(_merged(dead, nodes[count == left]))
        return DeadNodes(_merged(known, new), tuple(levels))


def _merged(ordered: Int64s, more: Int64s) -> Int64s:
    """Two sorted arrays without common values as one."""
    return np.insert(ordered, np.searchsorted(ordered, more), more)


class ArtifactRef(NamedTuple):
    """Which version of an artifact; `since` is wall-clock ISO time of its load."""

    version: str
    digest: str
    since: str


class DeviceTrie(NamedTuple):
    """The trie's arrays on the engine's device. widest [L]: most children of a node of depth t - 1; prefixes [L]: nodes
    of depth t; nodes in all; columns: what is declared of prefixes, [nodes + 1] by node, the last for node -1."""

    first: Tensor
    code: Tensor
    widest: tuple[int, ...]
    prefixes: tuple[int, ...]
    nodes: int
    columns: Mapping[str, Tensor] = {}

    @classmethod
    def of(cls, vocab: Vocab, device: torch.device, side: SideData = NOTHING_DECLARED) -> DeviceTrie:
        """Copy a vocab's trie, and what is declared of its prefixes, to a device, beside what runs there."""
        trie, columns = vocab.trie, side.columns
        hosts = [trie.first, trie.code, *(one.nodes for one in columns.values())]
        first, code, *nodes = upload_beside([torch.from_numpy(host) for host in hosts], device)
        return cls(
            first, code, trie.max_children, trie.prefixes[1:], trie.nodes, dict(zip(columns, nodes, strict=True))
        )


class Policies(Protocol):
    """The policies of a snapshot (policies.PolicySet)."""

    @property
    def id(self) -> str:
        """Content id."""

    @property
    def default(self) -> str:
        """The policy of a request that names none."""

    def plan(self, name: str) -> Plan | None:
        """The live plan of a policy, or None."""

    def plans(self) -> Iterable[Plan]:
        """Every live plan."""

    @property
    def traffic(self) -> Traffic:
        """How requests that name no policy are shared among policies."""

    @property
    def experiments(self) -> Mapping[str, Loaded]:
        """What became of each experiment file, by name."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """{contract, weights, vocab + item map, policies}: what one request sees, whole and unchanged.

    id      made from the ids of its parts, so equal sets have equal ids on every replica
    killed  names of policies and experiments that the kill switch stopped; `EVERYTHING` = all of them
    gone    the items of this vocab that are taken down, and what that exhausts; None where there are none
    side    what the deployment declares of this vocab's prefixes and items
    """

    id: str
    contract: Contract
    engine: Engine
    weights: ArtifactRef
    vocab: Vocab
    vocab_ref: ArtifactRef
    trie: DeviceTrie
    policies: Policies
    killed: frozenset[str] = frozenset()
    takedowns: Takedowns = NOTHING
    gone: DeadNodes | None = None
    side: SideData = NOTHING_DECLARED

    @property
    def batch_key(self) -> BatchKey:
        """Requests with equal keys share encode and decode: contract, weights and vocab, each by its content."""
        return self.contract.id, self.weights.digest, self.vocab_ref.digest

    def having(
        self,
        policies: Policies | None = None,
        killed: frozenset[str] | None = None,
        takedowns: Takedowns | None = None,
    ) -> Snapshot:
        """The same engine and vocab under other policies, with other names killed, or with other items taken down."""
        policies = self.policies if policies is None else policies
        killed = self.killed if killed is None else killed
        same = takedowns is None or takedowns is self.takedowns
        gone = self.gone if takedowns is None or same else DeadNodes.of(self.vocab, takedowns.items(self.vocab))
        takedowns = self.takedowns if takedowns is None else takedowns
        parts = (self.contract.id, self.weights.digest, self.vocab_ref.digest, policies.id, takedowns.digest)
        new_id = snapshot_id(*parts, killed)
        return replace(self, id=new_id, policies=policies, killed=killed, takedowns=takedowns, gone=gone)

    def excluding(self, items: Int64s) -> DeadNodes | None:
        """What these items and the taken-down ones exhaust; None for none at all. items: numbers in any order."""
        if self.gone is None or not len(items):
            return self.gone or DeadNodes.of(self.vocab, items)
        return self.gone.plus(self.vocab, items)

    def plan(self, name: str) -> Plan | None:
        """The plan that serves a policy: the default's where somebody has killed it; None = there is no such policy."""
        default = self.policies.default
        stopped = name != default and (name in self.killed or EVERYTHING in self.killed)
        return self.policies.plan(default if stopped and self.policies.plan(name) else name)


def snapshot_id(
    contract: str, weights: str, vocab: str, policies: str, takedowns: str = "", killed: frozenset[str] = frozenset()
) -> str:
    """The id of a snapshot from the ids and digests of its parts."""
    parts = [contract, weights, vocab, policies, *([f"takedowns {takedowns}"] if takedowns else [])]
    parts += [f"killed {name}" for name in sorted(killed)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


class Pins:
    """The active snapshot, and how many requests hold each. Event loop only.

    idle  called with the batch key of a snapshot that nobody holds any more and that is not the active one's
    """

    def __init__(self) -> None:
        self.active: Snapshot | None = None
        self.idle: Callable[[BatchKey], None] = lambda _: None
        self._held: dict[str, int] = {}
        self._keys: dict[BatchKey, int] = {}

    def pin(self) -> Snapshot | None:
        """The active snapshot with one more holder; None while there is none."""
        if self.active is not None:
            self._held[self.active.id] = self._held.get(self.active.id, 0) + 1
            self._keys[self.active.batch_key] = self._keys.get(self.active.batch_key, 0) + 1
        return self.active

    def release(self, snapshot: Snapshot) -> None:
        """One holder less."""
        _less(self._held, snapshot.id)
        if not _less(self._keys, snapshot.batch_key):
            self.idle(snapshot.batch_key)

    def held(self, snapshot_id: str) -> int:
        """How many requests hold a snapshot."""
        return self._held.get(snapshot_id, 0)

    def held_key(self, key: BatchKey) -> int:
        """How many requests hold a snapshot of these weights and this vocab, whatever its policies."""
        return self._keys.get(key, 0)


K = TypeVar("K")


def _less(counts: dict[K, int], key: K) -> int:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
    return left
