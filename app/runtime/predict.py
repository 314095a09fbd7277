"""How long a batch takes, learnt from the batches that ran: admission refuses what cannot finish in time."""

from __future__ import annotations


class BatchTime:
    """seconds(rows) = a + b * rows, least squares with exponential forgetting over the batches that ran.

    Predicts nothing before `MIN_BATCHES` batches: an unknown server refuses nobody.
    """

    MIN_BATCHES = 8
    FORGET = 0.97

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._seen = 0

    def observe(self, rows: int, seconds: float, *, rested: bool = False) -> None:
        """A batch of so many rows (summed over requests, widest step) took so long. rested: none has run for a while;
        it counts for as much as all that was before, since a slow time may be over."""
        keep = min(self.FORGET, 1 / max(1.0, self._n)) if rested else self.FORGET
        self._seen += 1
        self._n = keep * self._n + 1
        self._x = keep * self._x + rows
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + rows * rows
        self._xy = keep * self._xy + rows * seconds

    def seconds(self, rows: int) -> float | None:
        """The expected time of a batch; None while too little is known. Never falls as rows grow, never below 0."""
        if self._seen < self.MIN_BATCHES:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / spread) if spread > 1e-9 * max(1.0, self._xx) else 0.0
        return max(0.0, mean_y + slope * (rows - mean_x))
