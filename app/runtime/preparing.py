"""From versions on the disk to weights, vocab and contract in memory, beside the requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch

from app.config import Deployment
from app.errors import Rejected
from app.runtime.background import Background
from app.runtime.desired import Option
from app.runtime.loader import Parts, Weights, bind, read_weights
from app.runtime.memory import check_fits
from app.runtime.residents import Resident
from app.runtime.states import State
from app.vocab.aggregates import SideData, tables
from app.vocab.artifact import load_vocab
from app.vocab.manifest import Kind, verify

T = TypeVar("T")


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


class Preparation:
    """One set on its way into memory. moved: called on the loop with (kind, version, state) as a version goes on."""

    def __init__(
        self,
        root: Path,
        device: torch.device,
        background: Background,
        moved: Callable[[Kind, Option, State], None],
    ) -> None:
        self._root, self._device, self._background, self._moved = root, device, background, moved

    async def parts(self, want: Want, residents: Iterable[Resident]) -> Parts:
        """Load what no resident has, and bind it. Raises Refused for a version, Rejected where two do not fit."""
        residents = tuple(residents)
        weights = _weights(want, residents)
        if weights is None:
            weights = await self._load("weights", want.weights, lambda path: self._read_weights(path, want.deployment))
        vocab = next((one.snapshot.vocab for one in residents if one.vocab.digest == want.vocab.digest), None)
        if vocab is None:
            vocab = await self._load("vocab", want.vocab, lambda path: load_vocab(path, want.deployment.sid.sizes))
        for kind, option in want.options:
            self._moved(kind, option, State.VALIDATING)
        side = _side(want, residents)
        return await self._background.run(lambda: bind(want.deployment, weights, want.weights, vocab, want.vocab, side))

    def _read_weights(self, directory: Path, deployment: Deployment) -> Weights:
        check_fits(directory, deployment, self._device)
        return read_weights(directory, deployment, self._device)

    async def _load(self, kind: Kind, option: Option, read: Callable[[Path], T]) -> T:
        """Digests first, then the content. Raises Refused."""
        directory = self._root / kind / option.version
        try:
            self._moved(kind, option, State.VERIFYING)
            await self._background.run(lambda: _verified(directory, kind, option))
            self._moved(kind, option, State.LOADING)
            return await self._background.run(lambda: read(directory))
        except Rejected as error:
            raise Refused(kind, option.version, error) from error


def _weights(want: Want, residents: Iterable[Resident]) -> Weights | None:
    """The same weights, loaded for the same overlay."""
    mine = want.weights.digest, want.deployment
    for one in residents:
        if (one.weights.digest, one.deployment) == mine:
            return Weights(one.snapshot.engine, msgspec.json.decode(one.snapshot.contract.config))
    return None


def _side(want: Want, residents: Iterable[Resident]) -> SideData | None:
    """What the same tables declare of the same vocab."""
    mine = want.vocab.digest, tables(want.deployment)
    sides = ((one.vocab.digest, one.snapshot.side) for one in residents)
    return next((side for digest, side in sides if (digest, side.declared) == mine), None)


def _verified(directory: Path, kind: Kind, option: Option) -> None:
    if verify(directory, kind).digest != option.digest:
        raise Rejected("changed_on_disk", "the version has changed while it was being looked at")
