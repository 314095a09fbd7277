"""The runtime server's front door (`front.Front`): admission, answers, status, draining."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version as distribution_version
from typing import Literal, TypeVar

from app.config import Deployment
from app.core import Item, Outcome, Ranked, Request, Timings, Versions
from app.errors import Cancelled, Draining, Expired, Fault, NotReady, Rejected, Underfilled, WidebeamError, let_go
from app.policies.assign import Facts
from app.policies.assignment import explain
from app.policies.plan import Plan
from app.runtime import in_force
from app.runtime.admission import Admission, Admitted
from app.runtime.background import Background
from app.runtime.batcher import Batcher
from app.runtime.canary import canary_jobs
from app.runtime.cutover import BESIDE_S, Cutover, Cutovers
from app.runtime.engines import Engines
from app.runtime.expectations import Canary, Requests, differs
from app.runtime.explainer import Explainer
from app.runtime.exposure import exposures, with_files
from app.runtime.job import Batch, Job, Served, seed_of
from app.runtime.load import Gauge
from app.runtime.loader import Loaded
from app.runtime.logs import Log
from app.runtime.metrics import Metrics
from app.runtime.recorder import Recorder, Tallies
from app.runtime.snapshot import BatchKey, Pins, Snapshot
from app.runtime.status import Reason, utc_seconds
from app.runtime.steps import StepLoop
from app.runtime.thread import EngineThread
from app.runtime.ticket import PendingTicket
from app.runtime.told import ToldTicket

T = TypeVar("T", PendingTicket, ToldTicket)
R = TypeVar("R")


class Runtime:
    """One engine, one queue, one active snapshot. Made and used on one event loop.

    `load` is called once, off the loop, by `start`; until it brings a snapshot the runtime is alive and not ready.
    """

    def __init__(
        self,
        deployment: Deployment,
        metrics: Metrics,
        log: Log,
        clock: Callable[[], float],
        recorder: Recorder | None = None,
        wall: Callable[[], float] = utc_seconds,
        threads: int | None = None,
        engines: Engines | None = None,
    ) -> None:
        """clock: monotonic seconds · wall: unix seconds, for ramps of experiments only · threads: see `EngineThread`

        `swapped` is called with every snapshot that becomes the active one, the one before it, and why; whoever follows
        swaps sets it.
        """
        self._deployment, self._metrics, self._log, self._clock = deployment, metrics, log, clock
        self._admission = Admission(deployment, wall)
        self._recorder, self._wall = recorder or Tallies(metrics, log, clock), wall
        self._pins, self._engines = Pins(), engines
        self.swapped: Callable[[Snapshot, Snapshot | None, str], None] = lambda *_: None
        self._steps = StepLoop(clock, metrics)
        self._thread = EngineThread(self._steps, threads)
        self._explainer = Explainer(self._thread, deployment.server.explain_per_s, clock, metrics, log)
        self._cutovers = Cutovers(clock, self._held)
        self._batcher = Batcher(self._thread, deployment.limits, clock, self._answer, self._dropped, self._formed)
        self._gauge = Gauge(deployment.load, clock())
        self._open: dict[int, tuple[Job, Admitted]] = {}
        self._reasons: tuple[Reason, ...] = (Reason("starting", "artifacts are being loaded"),)
        self._loaded: Loaded | None = None
        self._draining = False
        self._began = clock()
        metrics.queue_depth.set_function(lambda: self._batcher.depth)
        metrics.in_flight.set_function(lambda: self._batcher.running)
        metrics.load(lambda: self._gauge.read(clock()))

    # ---- life --------------------------------------------------------------------------------------------------

    async def start(self, load: Callable[[], Loaded], background: Background | None = None) -> None:
        """Load off the loop, warm up, and become ready; or say why not and stay alive.

        background: the thread to load in; without one a thread that the end of the event loop waits for
        """
        try:
            loaded = await (background.run(load) if background else asyncio.to_thread(load))
            self._loaded = replace(loaded, snapshot=None)  # nothing here keeps a snapshot in memory that is not in use
            if loaded.snapshot is None:
                self._reasons = loaded.reasons
            else:
                await self._activate(loaded.snapshot, loaded.canaries)  # not ready before it has served our requests
        except Exception as error:  # noqa: BLE001  a bug of ours must not leave a server that says "starting" for ever
            self._log.error("start_failed", exc_info=error)
            self._reasons = (Reason("internal", f"{type(error).__name__} while loading; the log has it"),)
        for reason in self._reasons:
            self._log.error("not_ready", code=reason.code, message=reason.message, location=reason.location)

    async def _activate(self, snapshot: Snapshot, canaries: Sequence[Canary]) -> None:
        try:
            await asyncio.to_thread(self.allocate, snapshot)
        except Rejected as error:
            self._reasons = (Reason(error.code, error.message, error.location),)
            return
        failed = await self.warm(snapshot, tuple(snapshot.policies.plans()))
        if failed:
            policy, why = next(iter(failed.items()))
            self._reasons = (Reason("canary_failed", why, f"policy {policy}"),)
            return
        for canary in canaries:
            if (problem := await self.expect(snapshot, canary)) is not None:
                place = f"{canary.kind}/{canary.version}/{problem.location}"
                self._reasons = (Reason(problem.code, problem.message, place),)
                return
        self.swap(snapshot, "start")
        gc.collect()
        gc.freeze()  # what was loaded lives long: collections need not walk it

    @property
    def loaded(self) -> Loaded | None:
        """What `start` was given, once it was."""
        return self._loaded

    @property
    def busy(self) -> bool:
        """Whether there are batches. In any thread."""
        return self._batcher.busy

    @property
    def active(self) -> Snapshot | None:
        """The snapshot that requests are admitted on."""
        return self._pins.active

    async def warm(self, snapshot: Snapshot, plans: Sequence[Plan], *, alone: bool = False) -> dict[str, str]:
        """Compile what policies add to the kernels, then serve made-up requests under each structure, before anybody
        else does; what went wrong, by policy.

        alone: one request at a time, so that nobody waits for a batch of ours
        """
        failed: dict[str, str] = {}
        if self._engines is not None:
            await asyncio.to_thread(self._engines.prepare_plans, snapshot.contract, snapshot.engine.device, plans)
        for plan in {plan.structure.id: plan for plan in plans}.values():
            for jobs in canary_jobs(snapshot, plan, alone=alone):
                for end in await self.serve_alone(Batch(jobs)):
                    if isinstance(end.result, WidebeamError):
                        self._log.error("canary_failed", policy=plan.policy, exc_info=end.result)
                        let_go(end.result)
                        failed[plan.policy] = end.result.message
        return failed

    async def once_nobody_waits(self, then: Callable[[], R], within_s: float) -> R:
        """The moment for a swap to another batch key. See `Batcher.once_nobody_waits`."""
        return await self._batcher.once_nobody_waits(then, within_s)

    def swap(self, snapshot: Snapshot, cause: str) -> None:
        """From now on requests are admitted on another snapshot; those that are queued or running keep theirs."""
        before = self._pins.active
        self._pins.active, self._reasons = snapshot, ()
        self.swapped(snapshot, before, cause)
        self._batcher.limits = snapshot.contract.limits
        versions = {"weights": snapshot.weights.version, "vocab": snapshot.vocab_ref.version}
        self._cutovers.swapped(before.id if before else None, snapshot.id, cause, versions)
        self._metrics.cutovers_total.labels(cause).inc()
        self._metrics.snapshot("active", {"id": snapshot.id, **versions})
        if before is not None and before.batch_key != snapshot.batch_key:
            old = {"weights": before.weights.version, "vocab": before.vocab_ref.version}
            self._metrics.snapshot("previous", {"id": before.id, **old})
        self._log.info(
            "snapshot_active", snapshot=snapshot.id, before=before.id if before else None, cause=cause,
            contract=snapshot.contract.id, policies=snapshot.policies.id, kernels=snapshot.engine.kernels, **versions,
        )  # fmt: skip

    def _held(self, cutover: Cutover, seconds: float) -> None:
        """A cutover has had its first batch."""
        self._metrics.cutover_hold_seconds.observe(seconds)
        facts = {name: value for name, value in cutover.document().items() if name not in {"at", "p99_after_ms"}}
        self._log.info("cutover", **facts)

    async def expect(self, snapshot: Snapshot, canary: Canary) -> Rejected | None:
        """Ask a snapshot what an artifact says that it must answer; the first difference, or why that cannot be."""
        facts = {"kind": canary.kind, "version": canary.version, "snapshot": snapshot.id}
        if not canary.fits(snapshot):
            self._log.warning("canary_skipped", recorded_with=canary.head.other, **facts)
            return None
        try:
            requests = await asyncio.to_thread(Requests.under, snapshot, canary.head.policy)
            problem = await differs(canary, requests, self.serve_alone)
        except Rejected as error:
            problem = error.bare()
        if problem is None:
            self._log.info("canary_passed", requests=len(canary.cases), **facts)
        return problem

    async def serve_alone(self, batch: Batch) -> Sequence[Served]:
        """Serve a batch of our own after those that were handed in before."""
        done: asyncio.Future[Sequence[Served]] = asyncio.get_running_loop().create_future()

        def resolve(_: Batch, served: Sequence[Served]) -> None:
            if not done.done():  # whoever waited may have been cancelled
                done.set_result(served)

        self._thread.run(batch, asyncio.get_running_loop(), resolve)
        return await done

    @property
    def swaps(self) -> int:
        """How often the active snapshot has changed."""
        return self._cutovers.count

    def held(self, key: BatchKey) -> int:
        """How many requests are queued or running on these weights and this vocab."""
        return self._pins.held_key(key)

    def on_idle(self, idle: Callable[[BatchKey], None]) -> None:
        """Call this with a batch key whenever its last request has ended."""
        self._pins.idle = idle

    def allocate(self, snapshot: Snapshot) -> None:
        """Take the state memory of a contract, and capture the decode steps of a weight slot, before their first batch;
        kernels come first. In any one thread. Raises Rejected("no_memory")."""
        if self._engines is not None:
            self._engines.prepare(snapshot.contract, snapshot.engine.device)
        taken = self._steps.prepare(snapshot)
        if taken.choices:
            products, seconds = [one.document() for one in taken.choices], sum(one.seconds for one in taken.choices)
            self._log.info("products_chosen", seconds=round(seconds, 3), products=products)
        if taken.refused:
            self._log.warning("graphs_refused", snapshot=snapshot.id, reason=taken.refused)
        if taken.graphs:
            self._log.info(
                "graphs_captured", snapshot=snapshot.id, graphs=taken.graphs, seconds=round(taken.seconds, 3),
                bytes=taken.bytes,
            )  # fmt: skip

    def forget(self, contract_id: str) -> None:
        """Give the state memory of a contract back that no snapshot uses any more."""
        self._thread.forget(contract_id)

    def begin_drain(self) -> None:
        """See `front.Front`."""
        self._draining = True

    async def drained(self, timeout_s: float) -> bool:
        """See `front.Front`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._batcher.idle()
                await self._explainer.idle()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End the engine thread and the records; nothing may be running."""
        self._thread.close()
        self._recorder.close()

    # ---- requests ----------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> PendingTicket:
        """See `front.Door`."""
        return self._admit(request, lambda: PendingTicket(request.deadline, self._clock, self._left))

    def hand_in(self, request: Request, tell: Callable[[Outcome | WidebeamError], None]) -> ToldTicket:
        """See `front.Front`."""
        return self._admit(request, lambda: ToldTicket(request.deadline, self._clock, self._left, tell))

    def _admit(self, request: Request, ticket_of: Callable[[], T]) -> T:
        if self._draining:
            raise Draining("this server is shutting down")
        snapshot = self._pins.active
        if snapshot is None:
            raise NotReady("; ".join(str(reason) for reason in self._reasons), retry_after_s=5)
        now = self._clock()
        if request.deadline is not None and now >= request.deadline:
            self._metrics.deadline_missed_total.labels("admission").inc()
            raise Expired("the deadline had passed at admission")
        choice = self._admission.choose(request, snapshot, self._gauge.read(now).level)
        plan, planned = choice.plan, choice.planned
        self._batcher.check(max(planned[:-1]), request.deadline)
        admitted = self._admission.admit(request, choice, snapshot)
        self._explainer.take(request)
        ticket = ticket_of()
        job = Job(
            request, ticket, snapshot, plan, admitted.inputs, planned, admitted.excluded, admitted.seen, now,
            admitted.fields,
        )  # fmt: skip
        if admitted.load is not None:
            self._metrics.load_requests_total.labels(admitted.load).inc()
        self._pins.pin()
        self._cutovers.admitted(snapshot.id, running=self._batcher.running > 0)
        self._open[id(ticket)] = (job, admitted)
        self._batcher.submit(job)
        self._gauge.observe(now, self._batcher.backlog)
        return ticket

    def _formed(self, batch: Batch) -> None:
        """A batch was handed to the engine."""
        self._gauge.observe(self._clock(), self._batcher.backlog)
        self._cutovers.formed(batch)

    def _left(self, ticket: PendingTicket | ToldTicket) -> None:
        """A client went or its time passed: out of the queue at once; out of a running batch at its next step."""
        held = self._open.get(id(ticket))
        if held is not None:
            self._batcher.forget(held[0])

    def _dropped(self, job: Job) -> None:
        """A job left the queue unserved."""
        missed = isinstance(job.ticket.gone(self._clock()), Expired)
        (self._metrics.deadline_missed_total if missed else self._metrics.cancelled_total).labels("queue").inc()
        self._gauge.observe(self._clock(), self._batcher.backlog)
        self._close(job)

    def _close(self, job: Job) -> Admitted:
        self._pins.release(job.snapshot)
        return self._open.pop(id(job.ticket))[1]

    def _answer(self, served: Sequence[Served]) -> None:
        """A batch ended: every job of it gets its outcome, whatever happens to the others'."""
        rows = max(end.rows for end in served)
        self._metrics.batch_size.observe(len(served))
        self._metrics.batch_rows.observe(rows)
        for end in served:
            try:
                result = self._end(end, self._open[id(end.job.ticket)][1], len(served), rows)
                if isinstance(result, Outcome) and end.job.request.explain is not None:
                    self._explainer.explain(end, result, partial(self._resolve, end.job))
                    continue  # its client waits for the explanation, nobody else does
            except Exception as error:  # noqa: BLE001  a bug of ours: nobody may wait for ever because of it
                self._log.error("answer_failed", request_id=end.job.request.request_id, exc_info=error)
                let_go(error)
                result = Fault.of(error)
            self._resolve(end.job, result)

    def _resolve(self, job: Job, result: Outcome | WidebeamError) -> None:
        self._close(job)
        assert isinstance(job.ticket, PendingTicket | ToldTicket)
        job.ticket.resolve(result)

    def _end(self, end: Served, admitted: Admitted, requests: int, rows: int) -> Outcome | WidebeamError:
        """What one job's client gets, after it was noted down."""
        job, result = end.job, end.result
        if isinstance(result, WidebeamError):
            if not isinstance(result, Expired | Cancelled):
                self._log.error("request_failed", request_id=job.request.request_id, code=result.code, exc_info=result)
                let_go(result)
            return result
        if job.plan.underfill == "error" and len(result.items) < job.request.k:
            return Underfilled(f"{len(result.items)} items, {job.request.k} were asked for")
        outcome = self._outcome(end, result, admitted, requests, rows)
        self._cutovers.answered(outcome.timings.total / 1e3)
        running = (self._pins.active or job.snapshot).policies.traffic
        self._recorder.answered(job.request, running, admitted.assignment, outcome)
        return outcome

    def _outcome(self, end: Served, ranked: Ranked, admitted: Admitted, requests: int, rows: int) -> Outcome:
        job = end.job
        snapshot, plan, request = job.snapshot, job.plan, job.request
        ids = snapshot.vocab.ids(ranked.items)
        found = tuple(map(Item, ids, ranked.scores.tolist(), map(tuple, ranked.sids.tolist())))
        status, reason = _status(len(found), request.k, min(plan.widths[-1] * plan.per_sid, plan.limit))
        queue_ms = 1e3 * (end.began - job.admitted)
        self._metrics.queue_seconds.observe(queue_ms / 1e3)
        return Outcome(
            request_id=request.request_id,
            items=found,
            status=status,
            reason=reason,
            versions=Versions(
                snapshot.id,
                snapshot.weights.version,
                snapshot.vocab_ref.version,
                plan.policy,
                plan.policy_id,
                snapshot.contract.id,
            ),
            experiments=exposures(admitted.assignment),
            seed=seed_of(request),
            load=admitted.load,
            level=admitted.level,
            unknown_history=admitted.unknown_history,
            unknown_exclude=admitted.unknown_exclude,
            timings=Timings(queue_ms, end.context_ms, end.decode_ms, 1e3 * (self._clock() - request.received)),
            batch_requests=requests,
            batch_rows=rows,
        )

    # ---- status ------------------------------------------------------------------------------------------------

    def reasons(self) -> tuple[str, ...]:
        """See `front.Front`."""
        own = [str(reason) for reason in self._reasons]
        if self._draining:
            own.append("draining")
        if not self._thread.alive:
            own.append("engine_stopped: the engine thread has ended")
        return tuple(own)

    def _experiments(self, active: Snapshot) -> dict[str, object]:
        counts = self._recorder.document(active.policies.traffic, self._wall())
        return with_files(counts, active.policies.experiments, active.killed)

    def assignment(
        self, experiment: str, unit: str, ctx: Mapping[str, str], user: Mapping[str, float]
    ) -> dict[str, object] | None:
        """See `front.Front`."""
        active = self._pins.active
        if active is None:
            raise NotReady("; ".join(self.reasons()), retry_after_s=5)
        facts = Facts(None, "", ctx, user)
        return explain(active.policies.traffic, experiment, unit, facts, self._wall(), active.killed)

    def engines(self) -> list[dict[str, object]]:
        """The compiled engines among the status's `artifacts`."""
        return self._engines.documents() if self._engines else []

    def _by_torch(self, active: Snapshot) -> dict[str, str]:
        return self._engines.left_to_torch(active.contract, active.engine.device) if self._engines else {}

    def status(self) -> dict[str, object]:
        """See `front.Front`."""
        active, reasons = self._pins.active, self.reasons()
        loaded = self._loaded
        return {
            "ready": not reasons,
            "reasons": list(reasons),
            "build": _build(),
            "uptime_s": round(self._clock() - self._began, 3),
            "device": loaded.device if loaded else self._deployment.device,
            "kernels": active.engine.kernels if active else None,
            "by_torch": self._by_torch(active) if active else {},
            "active": _active(active) if active else None,
            "engine": self._engines.document(active) if self._engines else None,
            "artifacts": [*([artifact.document() for artifact in loaded.artifacts] if loaded else []), *self.engines()],
            "policies": in_force.document(loaded.in_force, self._clock()) if loaded and loaded.in_force else {},
            "experiments": self._experiments(active) if active else {},
            "queue": {
                "depth": self._batcher.depth,
                "limit": self._batcher.limits.queue,
                "in_flight": self._batcher.running,
            },
            "latency": {**self._cutovers.latency()._asdict(), "seconds": BESIDE_S},
            "load": self._gauge.read(self._clock()).document(),
            "history": self._cutovers.documents(),
        }


def _status(found: int, k: int, most: int) -> tuple[Literal["ok", "underfilled", "no_candidates"], str | None]:
    if found == 0:
        return "no_candidates", "nothing of the catalogue is left for this request"
    if found < k:
        return "underfilled", "width" if k > most else "candidates"
    return "ok", None


@cache
def _build() -> str:
    """The version of this package, as it is installed."""
    return distribution_version("widebeam")


def _active(snapshot: Snapshot) -> dict[str, object]:
    def ref(version: str, digest: str, since: str) -> dict[str, object]:
        return {"version": version, "digest": digest, "since": since}

    return {
        "snapshot": snapshot.id,
        "contract": snapshot.contract.id,
        "weights": ref(*snapshot.weights),
        "vocab": ref(*snapshot.vocab_ref),
        "policies": {"generation": 1, "ok": True},
    }
