"""Made-up requests that a snapshot serves before anybody's: they touch every batch shape's memory and prove that the
model, the catalogue and the default policy work together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from app.core import History, HistoryIds, Request
from app.errors import WidebeamError
from app.policies.plan import Plan
from app.runtime.fields import made_up
from app.runtime.job import Job, plan_rows
from app.runtime.snapshot import Snapshot

HISTORY = 8


class Present:
    """A client that never leaves."""

    def gone(self, now: float) -> WidebeamError | None:
        """See `job.Leaving`."""
        del now
        return None


def canary_jobs(snapshot: Snapshot, plan: Plan, *, alone: bool) -> Iterator[tuple[Job, ...]]:
    """A batch of one request under a plan, and unless `alone` one of as many as a decode step takes (4 at most)."""
    items = np.arange(min(HISTORY, len(snapshot.vocab)), dtype=np.int64)
    inputs = snapshot.engine.prepare(History(snapshot.vocab.sids(items)))
    planned = plan_rows(plan, snapshot.contract, snapshot.trie.prefixes)
    fields = made_up(plan.asks, snapshot.contract.request)
    request, limits = Request("canary", HistoryIds(()), k=1), snapshot.contract.limits

    def job() -> Job:
        return Job(request, Present(), snapshot, plan, inputs, planned, None, None, 0.0, fields)

    yield (job(),)
    many = min(limits.batch, limits.rows // job().rows, 4)
    if many > 1 and not alone:
        yield tuple(job() for _ in range(many))
