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
from app.runtime.memory import check_columns_fit
from app.runtime.reading import Weights, again, nothing_unexpected, read_fitting_vocab, read_weights
from app.runtime.residents import Resident
from app.runtime.snapshot import Snapshot
from app.runtime.states import State
from app.vocab.aggregates import tables
from app.vocab.manifest import Kind, Manifest, read_manifest, verify
from app.vocab.vocab import Vocab


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

    def is_about_overlay(self, serving: Resident | None) -> bool:
        """Whether it differs from the set that serves by its overlay alone."""
        if serving is None or serving.deployment == self.deployment:
            return False
        return (serving.weights.digest, serving.vocab.digest) == (self.weights.digest, self.vocab.digest)

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

    slots: where weights go · between: called between pieces of work, in the thread that does it · moved: called on the
    loop with (kind, version, state) as a version goes on
    """

    def __init__(
        self,
        root: Path,
        device: torch.device,
        slots: Slots,
        contracts: Contracts,
        background: Background,
        between: Callable[[], None],
        moved: Callable[[Kind, Option, State], None],
    ) -> None:
        self._root, self._device, self._slots, self._contracts = root, device, slots, contracts
        self._background, self._between, self._moved = background, between, moved

    async def parts(self, want: Want, residents: Iterable[Resident]) -> Parts:
        """Load what no resident has, and bind it. Raises Refused for a version, Rejected where two do not fit,
        NoSlot where weights have nowhere to go yet."""
        residents = tuple(residents)
        weights, vocab = await self._weights(want, residents), await self._vocab(want, residents)
        for kind, option in want.options:
            self._moved(kind, option, State.VALIDATING)
        known = _same_catalogue(want, residents)
        return await self._background.run(
            lambda: bind(want.deployment, weights, want.weights, vocab, want.vocab, known, self._between)
        )

    async def _weights(self, want: Want, residents: tuple[Resident, ...]) -> Weights:
        """Those of a resident that was loaded for the same limits and precision, else from the disk."""
        deployment, contracts = want.deployment, self._contracts
        known = _loaded(want, residents)
        if known is None:
            if self._slots.full:
                raise NoSlot("every weight slot is in use; requests on older versions have to end first")
            return await self._load(
                "weights",
                want.weights,
                lambda path: read_weights(path, deployment, self._device, contracts, self._slots, self._between),
            )
        await self._look_at_name("weights", want.weights, (one.weights for one in residents))
        weights = Weights(known.snapshot.engine, known.snapshot.contract)
        if known.deployment == deployment:
            return weights
        return await self._load("weights", want.weights, lambda path: again(weights, path, deployment, contracts))

    async def _vocab(self, want: Want, residents: tuple[Resident, ...]) -> Vocab:
        """That of a resident, where there is room for the columns that it would be given, else from the disk."""
        deployment, device = want.deployment, self._device
        vocab = next((one.snapshot.vocab for one in residents if one.vocab.digest == want.vocab.digest), None)
        if vocab is None:
            return await self._load(
                "vocab", want.vocab, lambda path: read_fitting_vocab(path, deployment, device, self._between)
            )
        await self._look_at_name("vocab", want.vocab, (one.vocab for one in residents))
        if _same_catalogue(want, residents) is None:
            try:
                check_columns_fit(vocab, deployment, device)
            except Rejected as error:
                raise Refused("vocab", want.vocab.version, error) from error
        return vocab

    async def _look_at_name(self, kind: Kind, option: Option, resident: Iterable[Option]) -> None:
        """What is in memory is to be called by another version's name: its files must be what its manifest says, too,
        since a start may find no others. Raises Refused."""
        if not any((one.version, one.digest) == (option.version, option.digest) for one in resident):
            await self._load(kind, option, lambda path: _verified(path, kind, self._between))

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


def _verified(directory: Path, kind: Kind, between: Callable[[], None]) -> Manifest:
    with nothing_unexpected():
        return verify(directory, kind, between=between)


def _loaded(want: Want, residents: Iterable[Resident]) -> Resident | None:
    """The same weights, loaded for an overlay that says the same of them; just that overlay first."""
    limits, precision = want.deployment.limits, want.deployment.precision
    found = [
        one
        for one in residents
        if one.weights.digest == want.weights.digest
        and (one.deployment.limits, one.deployment.precision) == (limits, precision)
    ]
    return min(found, key=lambda one: one.deployment != want.deployment, default=None)


def _same_catalogue(want: Want, residents: Iterable[Resident]) -> Snapshot | None:
    """A snapshot of the same vocab under the same declarations of its columns."""
    mine = want.vocab.digest, tables(want.deployment)
    snapshots = ((one.vocab.digest, one.snapshot) for one in residents)
    return next((one for digest, one in snapshots if (digest, one.side.declared) == mine), None)


def _check_same(digest: str, option: Option) -> None:
    if digest != option.digest:
        raise Rejected("changed_on_disk", "the version has changed while it was being looked at")
