"""Which answers are explained, and when: a bounded number a second, each after its batch was answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from app.core import Explanation, Outcome, Request
from app.errors import ExplainBusy, Fault, InvalidRequest, WidebeamError, let_go
from app.runtime.job import Served
from app.runtime.logs import Log
from app.runtime.metrics import Metrics
from app.runtime.thread import EngineThread

Done = Callable[[Outcome | WidebeamError], None]


class Explainer:
    """Explains answers on the engine thread, one request at a time, between batches. Event loop only.

    The engine gives up one request's time for each, so only `per_second` are taken (tokens: a second's worth at once).
    """

    def __init__(
        self, thread: EngineThread, per_second: float, clock: Callable[[], float], metrics: Metrics, log: Log
    ) -> None:
        self._thread, self._per_second, self._clock = thread, per_second, clock
        self._metrics, self._log = metrics, log
        self._most = max(1.0, per_second)
        self._left, self._at = self._most, clock()
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def take(self, request: Request) -> None:
        """Reserve an explanation for a request that wants one.

        Raises ExplainBusy, and InvalidRequest where the deployment explains nothing.
        """
        if request.explain is None:
            return
        if not self._per_second:
            raise InvalidRequest("this deployment does not explain answers", path="$.explain")
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            wait = (1 - self._left) / self._per_second
            message = f"{self._per_second:g} answers a second are explained; the request is served without `explain`"
            raise ExplainBusy(message, retry_after_s=max(1, round(wait)))
        self._left -= 1

    def explain(self, end: Served, outcome: Outcome, done: Done) -> None:
        """Call `done`, later, with the outcome and its explanation; with an error where the client left meanwhile."""
        answer = end.result
        if isinstance(answer, WidebeamError):
            raise Fault("only answers are explained")
        self._open += 1
        self._idle.clear()
        loop = asyncio.get_running_loop()
        self._thread.explain(end.job, answer, loop, partial(self._explained, end, outcome, done))

    def _explained(self, end: Served, outcome: Outcome, done: Done, told: Explanation | WidebeamError) -> None:
        self._open -= 1
        if not self._open:
            self._idle.set()
        if isinstance(told, WidebeamError):
            self._metrics.explained_total.labels("failed").inc()
            if isinstance(told, Fault):
                self._log.error("explain_failed", request_id=end.job.request.request_id, exc_info=told)
            let_go(told)
            done(told)
            return
        result = "equal" if told.mismatch is None else "mismatch"
        self._metrics.explained_total.labels(result).inc()
        if told.mismatch is not None:
            self._log.warning(
                "explain_mismatch", request_id=end.job.request.request_id, policy=end.job.plan.policy,
                message=told.mismatch,
            )  # fmt: skip
        done(replace(outcome, explanation=told))

    async def idle(self) -> None:
        """Wait until nothing is being explained."""
        await self._idle.wait()
