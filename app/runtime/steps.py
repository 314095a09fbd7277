"""The step loop: RecoGEM figure 11 (3.2) for one batch. Runs on the engine thread and knows no HTTP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate

import torch

from app.core import Explanation, Ranked
from app.errors import Expired, Fault, ModelOutput, WidebeamError
from app.runtime.contexts import batch_inputs
from app.runtime.explain import explain
from app.runtime.final import rank_items
from app.runtime.job import Batch, Job, Served
from app.runtime.metrics import Metrics
from app.runtime.selection import Selection, StepResult
from app.runtime.snapshot import Snapshot
from app.runtime.state import TRANSITIONS, BatchState, Transition


class StepLoop:
    """Drives batches from contexts to ranked items. Owns one arena a contract (one lane)."""

    def __init__(self, clock: Callable[[], float], metrics: Metrics, transition: str = "ancestry") -> None:
        self._clock, self._metrics = clock, metrics
        self._transition = TRANSITIONS[transition]
        self._lanes: dict[str, Transition] = {}

    def serve(self, batch: Batch) -> list[Served]:
        """Every job of the batch with its result or its error, once each; a bug of ours fails the jobs still open."""
        served: list[Served] = []
        try:
            served.extend(self.run(batch))
        except Exception as error:  # noqa: BLE001  whatever broke: the jobs still open end here, and the loop lives on
            done = {id(end.job) for end in served}
            fault = Fault.of(error)
            served += [Served(job, fault, self._clock(), 0.0, 0.0, 0) for job in batch.jobs if id(job) not in done]
        return served

    @torch.inference_mode()
    def run(self, batch: Batch) -> Iterator[Served]:
        """The batch, step by step; jobs that leave early come first."""
        jobs, snapshot = batch.jobs, batch.snapshot
        engine, steps = snapshot.engine, len(snapshot.contract.steps)
        began = self._clock()
        state = BatchState(self._lane(snapshot), len(jobs), steps, engine.device)
        selection = Selection(jobs, snapshot.trie, snapshot.contract.sizes, engine.device)
        contexts = batch_inputs(engine.input_specs(), [job.inputs for job in jobs], engine.device)
        output = engine.encode(contexts, state.arena)  # token models: step 1's output; others: None
        encoded, left, widest = self._clock(), set[int](), 0
        self._metrics.step_seconds.labels("context").observe(encoded - began)
        for t in range(1, steps + 1):  # each step with its own vocabulary, its own shapes
            step_began = self._clock()
            if output is None:
                output = engine.step(t, state.rows(full=selection.needs_full(t)), state.arena)
            gone = self._leaving(jobs, left)  # cancelled or late requests leave here, and only here
            keep = [0 if r in left or r in gone else job.planned[t] for r, job in enumerate(jobs)]
            found = selection.select(t, output, state, keep)  # exact top K in order T0, one launch a structure
            gone = {**found.failed, **gone}
            widest = max(widest, state.row_start[-1])
            self._metrics.step_seconds.labels(str(t)).observe(self._clock() - step_began)
            gone |= self._broken(t, found)
            state.advance(t, found.survivors, (0, *accumulate(keep)))  # an index row a survivor, no K/V moves
            yield from (self._end(jobs[r], error, began, encoded, widest) for r, error in gone.items())
            left |= gone.keys()
            output = None
            if len(left) == len(jobs):
                return
        items = rank_items(jobs, state, snapshot.vocab, steps)
        if bad := sum(one.bad for r, one in enumerate(items) if r not in left):
            self._metrics.bad_scores_total.labels("final").inc(bad)
        yield from (self._end(jobs[r], items[r], began, encoded, widest) for r in range(len(jobs)) if r not in left)

    def _leaving(self, jobs: Sequence[Job], left: Collection[int]) -> dict[int, WidebeamError]:
        now = self._clock()
        asked = {r: job.ticket.gone(now) for r, job in enumerate(jobs) if r not in left}
        gone = {r: error for r, error in asked.items() if error is not None}
        for error in gone.values():
            missed = isinstance(error, Expired)
            (self._metrics.deadline_missed_total if missed else self._metrics.cancelled_total).labels("step").inc()
        return gone

    def _broken(self, t: int, found: StepResult) -> dict[int, WidebeamError]:
        """Requests that the model wrote too many bad numbers for; each fails alone, and its rows are not looked at."""
        if found.bad_logits:
            self._metrics.bad_scores_total.labels("logits").inc(found.bad_logits)
        if found.bad_scores:
            self._metrics.bad_scores_total.labels("expression").inc(found.bad_scores)
        message = f"more than 1 % of the logits of step {t} are NaN or infinite"
        return {request: ModelOutput(message) for request in found.broken}

    def _end(self, job: Job, result: Ranked | WidebeamError, began: float, encoded: float, rows: int) -> Served:
        return Served(job, result, began, 1e3 * (encoded - began), 1e3 * (self._clock() - encoded), rows)

    def explain(self, job: Job, answer: Ranked) -> Explanation | WidebeamError:
        """How an answered job came to its answer. Between batches, and for clients that are still there."""
        try:
            return job.ticket.gone(self._clock()) or explain(job, self._lane(job.snapshot), answer)
        except Exception as error:  # noqa: BLE001  whatever broke: the loop lives on
            return Fault.of(error)

    def prepare(self, snapshot: Snapshot) -> None:
        """Allocate a contract's state memory before its first batch; any thread, once a contract."""
        self._lane(snapshot)

    def forget(self, contract_id: str) -> None:
        """Free a contract's state memory. Engine thread only, when no batch of that contract will come any more."""
        self._lanes.pop(contract_id, None)

    def _lane(self, snapshot: Snapshot) -> Transition:
        """This lane's state memory: allocated once a contract, at its first (warm-up) batch."""
        lane = self._lanes.get(snapshot.contract.id)
        if lane is None:
            arena = snapshot.engine.new_arena(snapshot.contract.limits)
            lane = self._lanes[snapshot.contract.id] = self._transition(arena, snapshot.contract.states)
        return lane
