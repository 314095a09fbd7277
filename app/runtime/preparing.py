"""From versions on the disk to weights, vocab and contract in memory, beside the requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch

from app.config import Deployment
from app.engine.slots import Slots
from app.errors import Rejected
from app.runtime.background import Background
from app.runtime.contracts import Contracts
from app.runtime.desired import Option
from app.runtime.loader import Parts, bind
from app.runtime.memory import check_fits
from app.runtime.reading import Weights, read_vocab, read_weights
from app.runtime.residents import Resident
from app.runtime.snapshot import Snapshot
from app.runtime.states import State
from app.vocab.aggregates import tables
from app.vocab.manifest import Kind, read_manifest


class Digested(Protocol):
    """Content that knows which bytes it was made of."""

    @property
    def digest(self) -> str:
        """The version's digest."""


T = TypeVar("T", bound=Digested)


class Want(NamedTuple):
    """A set to serve: weights, vocab, and the overlay that makes their contract."""

    weights: Option
    vocab: Option
    deployment: Deployment

    def met_by(self, resident: Resident) -> bool:
        """Whether a resident is just that."""
        return self == (resident.weights, resident.vocab, resident.deployment)

    @property
    def options(self) -> tuple[tuple[Kind, Option], ...]:
        """The versions by kind."""
        return ("weights", self.weights), ("vocab", self.vocab)


class Refused(Exception):
    """One version was refused, whatever else it would have been put together with."""

    def __init__(self, kind: Kind, version: str, error: Rejected) -> None:
        super().__init__(str(error))
        self.kind, self.version, self.error = kind, version, error


class NoSlot(Exception):
    """Every weight slot is in use: by what serves, by what is kept for a rollback, by requests on older versions."""


class Preparation:
    """One set on its way into memory.

    slots: where weights go · moved: called on the loop with (kind, version, state) as a version goes on
    """

    def __init__(
        self,
        root: Path,
        device: torch.device,
        slots: Slots,
        contracts: Contracts,
        background: Background,
        moved: Callable[[Kind, Option, State], None],
    ) -> None:
        self._root, self._device, self._slots, self._contracts = root, device, slots, contracts
        self._background, self._moved = background, moved

    async def parts(self, want: Want, residents: Iterable[Resident]) -> Parts:
        """Load what no resident has, and bind it. Raises Refused for a version, Rejected where two do not fit,
        NoSlot where weights have nowhere to go yet."""
        residents = tuple(residents)
        weights = _weights(want, residents)
        if weights is None:
            if self._slots.full:
                raise NoSlot("every weight slot is in use; requests on older versions have to end first")
            weights = await self._load("weights", want.weights, lambda path: self._read_weights(path, want.deployment))
        vocab = next((one.snapshot.vocab for one in residents if one.vocab.digest == want.vocab.digest), None)
        if vocab is None:
            vocab = await self._load("vocab", want.vocab, lambda path: read_vocab(path, want.deployment.sid.sizes))
        for kind, option in want.options:
            self._moved(kind, option, State.VALIDATING)
        known = _same_catalogue(want, residents)
        return await self._background.run(
            lambda: bind(want.deployment, weights, want.weights, vocab, want.vocab, known)
        )

    def _read_weights(self, directory: Path, deployment: Deployment) -> Weights:
        check_fits(directory, deployment, self._device, self._slots.free_bytes)
        return read_weights(directory, deployment, self._device, self._contracts, self._slots)

    async def _load(self, kind: Kind, option: Option, read: Callable[[Path], T]) -> T:
        """The manifest first, then the content, which is hashed while it is read. Raises Refused."""
        directory = self._root / kind / option.version
        try:
            self._moved(kind, option, State.VERIFYING)
            _check_same((await self._background.run(lambda: read_manifest(directory, kind))).digest, option)
            self._moved(kind, option, State.LOADING)
            found = await self._background.run(lambda: read(directory))
            _check_same(found.digest, option)
        except Rejected as error:
            raise Refused(kind, option.version, error) from error
        return found


def _weights(want: Want, residents: Iterable[Resident]) -> Weights | None:
    """The same weights, loaded for the same overlay."""
    mine = want.weights.digest, want.deployment
    for one in residents:
        if (one.weights.digest, one.deployment) == mine:
            return Weights(one.snapshot.engine, one.snapshot.contract)
    return None


def _same_catalogue(want: Want, residents: Iterable[Resident]) -> Snapshot | None:
    """A snapshot of the same vocab under the same declarations of its columns."""
    mine = want.vocab.digest, tables(want.deployment)
    snapshots = ((one.vocab.digest, one.snapshot) for one in residents)
    return next((one for digest, one in snapshots if (digest, one.side.declared) == mine), None)


def _check_same(digest: str, option: Option) -> None:
    if digest != option.digest:
        raise Rejected("changed_on_disk", "the version has changed while it was being looked at")
