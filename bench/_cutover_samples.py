"""One part of `bench cutover` as arrays: when each request was sent, how long it took, which updates it overlapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Row = dict[str, Any]
BLOCK_S = 3.0
AFTER_S = 0.25
"""An update's window ends so long after the old version gave its memory back."""


@dataclass(frozen=True)
class Samples:
    """One part's requests in time order: intended [n] s, latency [n] ms of answers, batch [n] ms; the windows of its
    updates and of those before anything counts, [updates, 2] s."""

    intended: Floats
    latency: Floats
    batch: Floats
    windows: Floats
    first: Floats
    marks: Floats

    @classmethod
    def of(cls, part: Row) -> Samples:
        """The answered requests of all clients."""
        rows = [client["columns"] for client in part["clients"] if client["columns"]]
        columns = {name: np.concatenate([np.array(one[name], float) for one in rows])
                   for name in ("intended", "latency_ms", "status", "batch_ms")}  # fmt: skip
        order = np.argsort(columns["intended"], kind="stable")
        order = order[columns["status"][order] == 200]
        windows, first = (
            np.array([(one["published"], one["gone"] + AFTER_S) for one in part[which]]).reshape(-1, 2)
            for which in ("updates", "first")
        )
        return cls(columns["intended"][order], columns["latency_ms"][order], columns["batch_ms"][order], windows, first,
                   np.array(part["marks"]))  # fmt: skip

    @property
    def stretch(self) -> npt.NDArray[np.int64]:
        """Where each request was sent: 0 before, 1 steady, 2 updates, 3 steady, 4 after."""
        return np.searchsorted(self.marks, self.intended, "right")

    def overlaps(self, windows: Floats) -> npt.NDArray[np.bool_]:
        """Which requests were on their way during one of these windows, which begin and end in time order."""
        if not len(windows):
            return np.zeros(len(self.intended), bool)
        end = self.intended + self.latency / 1e3
        # of the windows that begin before a request's end, the last one reaches furthest
        last = np.searchsorted(windows[:, 0], end, "right") - 1
        return (last >= 0) & (windows[np.maximum(last, 0), 1] >= self.intended)

    def blocks(self, which: npt.NDArray[np.bool_]) -> list[Floats]:
        """The latencies of some requests in blocks of three seconds: neighbours in time are not independent."""
        number = ((self.intended[which] - self.marks[0]) // BLOCK_S).astype(int)
        cuts = np.flatnonzero(np.diff(number)) + 1
        return [one for one in np.split(self.latency[which], cuts) if len(one)]
