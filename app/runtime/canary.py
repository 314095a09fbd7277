"""Made-up requests that a snapshot serves before anybody's: they touch every batch shape's memory and prove that the
model, the catalogue and the default policy work together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from app.config import Deployment
from app.core import History, HistoryIds, Request
from app.errors import WidebeamError
from app.runtime.job import Job, plan_rows
from app.runtime.snapshot import Snapshot

HISTORY = 8


class _Present:
    """A client that never leaves."""

    def gone(self, now: float) -> WidebeamError | None:
        """See `job.Leaving`."""
        del now
        return None


def canary_jobs(snapshot: Snapshot, deployment: Deployment) -> Iterator[tuple[Job, ...]]:
    """Batches of one request, and of as many as one decode step takes, under each structure's first policy."""
    items = np.arange(min(HISTORY, len(snapshot.vocab)), dtype=np.int64)
    inputs = snapshot.engine.prepare(History(snapshot.vocab.sids(items)))
    for plan in snapshot.policies.plans():
        planned = plan_rows(plan, snapshot.contract, snapshot.trie.prefixes)
        request = Request("canary", HistoryIds(()), k=1)
        job = Job(request, _Present(), snapshot, plan, inputs, planned, None, None, 0.0)
        many = max(1, min(deployment.limits.batch, deployment.limits.rows // job.rows, 4))
        yield (job,)
        if many > 1:
            yield tuple(Job(request, _Present(), snapshot, plan, inputs, planned, None, None, 0.0) for _ in range(many))
