"""The immutable set that a request is pinned to from admission to item mapping, and who still holds which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from app.core import Contract
from app.engine.engine import Engine
from app.policies.plan import Plan
from app.vocab.vocab import Vocab

EVERYTHING = "*"
"""The kill switch's word for every policy and experiment."""


class ArtifactRef(NamedTuple):
    """Which version of an artifact; `since` is wall-clock ISO time of its load."""

    version: str
    digest: str
    since: str


class DeviceTrie(NamedTuple):
    """The trie's arrays on the engine's device. widest [L]: most children of a node of depth t - 1; prefixes [L]: nodes
    of depth t; nodes in all."""

    first: Tensor
    code: Tensor
    widest: tuple[int, ...]
    prefixes: tuple[int, ...]
    nodes: int

    @classmethod
    def of(cls, vocab: Vocab, device: torch.device) -> DeviceTrie:
        """Copy a vocab's trie to a device."""
        trie = vocab.trie
        return cls(
            torch.from_numpy(trie.first).to(device),
            torch.from_numpy(trie.code).to(device),
            trie.max_children,
            trie.prefixes[1:],
            trie.nodes,
        )


class Policies(Protocol):
    """The policies of a snapshot (policies.PolicySet)."""

    @property
    def default(self) -> str:
        """The policy of a request that names none."""

    def plan(self, name: str) -> Plan | None:
        """The live plan of a policy, or None."""

    def plans(self) -> Iterable[Plan]:
        """Every live plan."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """{contract, weights, vocab + item map, policies}: what one request sees, whole and unchanged.

    id      made from the ids of its parts, so equal sets have equal ids on every replica
    killed  names of policies and experiments that the kill switch stopped; `EVERYTHING` = all of them
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

    @property
    def batch_key(self) -> tuple[str, str, str]:
        """Requests with equal keys share encode and decode: contract, weights and vocab, each by its content."""
        return self.contract.id, self.weights.digest, self.vocab_ref.digest

    def plan(self, name: str) -> Plan | None:
        """The plan that serves a policy: the default's where somebody has killed it; None = there is no such policy."""
        default = self.policies.default
        stopped = name != default and (name in self.killed or EVERYTHING in self.killed)
        return self.policies.plan(default if stopped and self.policies.plan(name) else name)


class Pins:
    """The active snapshot and how many requests hold each. Event loop only."""

    def __init__(self) -> None:
        self.active: Snapshot | None = None
        self._held: dict[str, int] = {}

    def pin(self) -> Snapshot | None:
        """The active snapshot with one more holder; None while there is none."""
        if self.active is not None:
            self._held[self.active.id] = self._held.get(self.active.id, 0) + 1
        return self.active

    def release(self, snapshot: Snapshot) -> None:
        """One holder less."""
        left = self._held[snapshot.id] - 1
        if left:
            self._held[snapshot.id] = left
        else:
            del self._held[snapshot.id]

    def held(self, snapshot_id: str) -> int:
        """How many requests hold a snapshot."""
        return self._held.get(snapshot_id, 0)
