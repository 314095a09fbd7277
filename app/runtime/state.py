"""Candidate state of one batch: rows, prefixes and the arena, from step to step (RecoGEM 3.2, OneLA 3.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from app.core import Arena, Rows, StateSpec, Survivors
from app.ops.download import Download
from app.ops.transition import Written, advance, compact
from app.ops.upload import upload, upload_ints


class Transition(Protocol):
    """Moves the engine's row-scoped state from step t to t + 1, so that the survivors find their prefix.

    `advance` reads nothing back from the device and allocates no state.
    """

    @property
    def arena(self) -> Arena:
        """What the engine reads and writes now."""

    def open(self, rows: int, device: torch.device) -> None:
        """A batch of `rows` first rows starts; nothing of an earlier one is looked at."""

    def advance(self, t: int, parent: Tensor, code: Tensor, sids: Tensor) -> Written:
        """Step t is done, and row b of the next step continues row parent[b] by code[b]; below 0: a tombstone, row 0 by
        code 0. sids [N, t - 1] int64: what the rows of step t have written. Returns that of the next ones."""

    def ancestry(self) -> tuple[Tensor, bool]:
        """(h [N, t - 1] int32, whether it is the identity) for the rows of the next step."""


class Ancestry:
    """Append-only slots and an index: a survivor costs one index row, and no K/V moves. The default."""

    def __init__(self, arena: Arena, states: Sequence[StateSpec]) -> None:
        del states
        self.arena = arena
        self._index = torch.empty(0, 0, dtype=torch.int32)

    def open(self, rows: int, device: torch.device) -> None:
        """See `Transition`."""
        self._index = torch.empty(rows, 0, dtype=torch.int32, device=device)

    def advance(self, t: int, parent: Tensor, code: Tensor, sids: Tensor) -> Written:
        """See `Transition`."""
        del t
        written = advance(parent, code, sids, self._index)
        assert written.ancestry is not None, "one was given"
        self._index = written.ancestry
        return written

    def ancestry(self) -> tuple[Tensor, bool]:
        """See `Transition`."""
        return self._index, False


class Compaction:
    """RecoGEM's double-buffered compaction: survivors' slots are gathered into the standby buffer, which then becomes
    the active one. Both buffers have fixed addresses."""

    def __init__(self, arena: Arena, states: Sequence[StateSpec]) -> None:
        self._row_states = tuple((state.name, state.first) for state in states if state.scope == "row")
        self._buffers: tuple[Arena, Arena] = (
            arena,
            {**arena, **{name: torch.empty_like(arena[name]) for name, _ in self._row_states}},
        )
        self._active = 0
        self._shape = (0, 0)
        self._device = torch.device("cpu")

    @property
    def arena(self) -> Arena:
        """The active buffer."""
        return self._buffers[self._active]

    def open(self, rows: int, device: torch.device) -> None:
        """See `Transition`."""
        self._shape, self._device, self._active = (rows, 0), device, 0

    def advance(self, t: int, parent: Tensor, code: Tensor, sids: Tensor) -> Written:
        """See `Transition`."""
        self._shape, row = (len(parent), t), parent.clamp(min=0)
        for name, first in self._row_states:
            active, standby = (self._buffers[one][name] for one in (self._active, 1 - self._active))
            if first:
                active, standby = active[:, :, first:], standby[:, :, first:]
            compact(active, standby, row, min(t, len(active)))
        self._active = 1 - self._active
        return advance(parent, code, sids, None)

    def ancestry(self) -> tuple[Tensor, bool]:
        """See `Transition`."""
        rows, steps = self._shape
        own = torch.arange(rows, dtype=torch.int32, device=self._device)
        return own.unsqueeze(1).expand(rows, steps), True


TRANSITIONS: Mapping[str, type[Ancestry] | type[Compaction]] = {"ancestry": Ancestry, "compaction": Compaction}
"""By name. `ancestry` is the default; docs/architecture.md says what was measured."""


class Finalists(NamedTuple):
    """The survivors of a batch's last step on the host: rows row_start[r]:row_start[r + 1] are request r's. order, node
    [N] int64, score [N] float32, sids [N, L] int64."""

    row_start: Sequence[int]
    order: Tensor
    node: Tensor
    score: Tensor
    sids: Tensor


class Placed(NamedTuple):
    """Which rows are whose, on the device. number, number32 [N] int64, int32: 0 for the rows of the first, then 1, .. ·
    start [R + 1] int32: the rows of r are start[r]:start[r + 1]."""

    number: Tensor
    number32: Tensor
    start: Tensor


@lru_cache(maxsize=128)
def placed(row_start: tuple[int, ...], device: torch.device) -> Placed:
    """row_start as host integers. Batches are often of the shape of others, and then nothing is uploaded."""
    counts = [stop - start for start, stop in pairwise(row_start)]
    number = upload(torch.from_numpy(np.repeat(np.arange(len(counts)), counts)), device)
    return Placed(number, number.to(torch.int32), upload_ints(row_start, torch.int32, device))


@lru_cache(maxsize=128)
def _first(requests: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, sids, node (or order) and score of the first rows; nobody writes them."""
    node = torch.zeros(requests, dtype=torch.int64, device=device)
    return node.to(torch.int32), node.new_empty(requests, 0), node, node.to(torch.float32)


class BatchState:
    """The rows of a batch at one step: whose they are, what they have written so far, how they rank.

    row_start  [R + 1] host integers; a request that has left has no rows
    request    [N] int64, and start [R + 1] int32: the same on the device (`Placed`)
    sids       [N, t - 1] int64 codes of the prefix
    node, order, score  [N] of the row (`core.Survivors`)
    """

    def __init__(self, transition: Transition, requests: int, steps: int, device: torch.device) -> None:
        self._transition = transition
        self._steps = steps
        self._device = device
        transition.open(requests, device)
        self.place(range(requests + 1))
        self._codes, self.sids, self.node, self.score = _first(requests, device)
        self.order = self.node

    @property
    def arena(self) -> Arena:
        """The engine's memory for this step."""
        return self._transition.arena

    def rows(self, *, full: bool) -> Rows:
        """What the engine decodes next."""
        ancestry, is_compact = self._transition.ancestry()
        return Rows(self._codes, self._request32, self.start, ancestry, is_compact, full)

    def advance(self, t: int, survivors: Survivors, row_start: Sequence[int]) -> None:
        """The survivors of step t become the rows; a tombstone keeps row 0's memory and code 0, and a score of -inf."""
        moved = (survivors.parent, survivors.code, self.sids)
        # nothing reads the state after the last step
        written = self._transition.advance(t, *moved) if t < self._steps else advance(*moved, None)
        self.sids, self._codes = written.sids, written.codes
        self.node, self.order, self.score = survivors.node, survivors.order, survivors.score
        self.place(row_start)

    def place(self, row_start: Sequence[int]) -> None:
        """Which rows are whose."""
        self.row_start = tuple(row_start)
        self.request, self._request32, self.start = placed(self.row_start, self._device)

    @property
    def survivors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `Finalists` has of the rows, on the device."""
        return self.order, self.node, self.score, self.sids

    def finalists(self) -> Finalists:
        """The rows on the host; waits for the device."""
        return Finalists(self.row_start, *Download(self.survivors).wait())
