"""The step loop: RecoGEM figure 11 (3.2) for one batch. Runs on the engine thread and knows no HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from app.core import Arena, Contract, Explanation, Ranked, Rows, StepOutput
from app.engine.captures import Recorder, Taken
from app.engine.context_graphs import PADS, ContextGraphs
from app.engine.cuda_graphs import CudaRecorder
from app.engine.engine import Engine
from app.engine.graphs import Graphs
from app.errors import Expired, Fault, ModelOutput, WidebeamError
from app.ops import cuda
from app.ops.download import Download
from app.ops.product import Choice, choose
from app.runtime.context_lane import ContextLane, own_arena
from app.runtime.explain import explain
from app.runtime.final import rank_items
from app.runtime.flight import Flight, Pause, go
from app.runtime.job import Batch, Job, Served
from app.runtime.laps import Laps
from app.runtime.memory import check_state_fits
from app.runtime.metrics import Metrics
from app.runtime.selection import Selection, judge
from app.runtime.snapshot import Snapshot
from app.runtime.state import TRANSITIONS, Ancestry, BatchState, Finalists, Transition
from app.runtime.turns import Turns


def cuda_graphs(engine: Engine) -> Recorder | None:
    """How decode steps are captured: CUDA graphs where our kernels compute; None elsewhere."""
    return CudaRecorder(engine.device) if engine.kernels == "cuda" else None


def on_a_gpu(engine: Engine) -> bool:
    """Whether contexts, and step 1 of those, have a lane of their own beside the decode of the batch before."""
    return engine.device.type == "cuda"


class Lane(NamedTuple):
    """The state memory of one contract, the decode steps that are captured over it, if any are, and the lane that
    contexts are encoded in."""

    transition: Transition
    graphs: Graphs | None
    contexts: ContextLane


class _Here(threading.local):
    """Of a thread: how many graphs it has captured, and whether what it makes is being counted."""

    graphs, counted = 0, False


class StepLoop:
    """Drives batches from contexts to ranked items. Owns one arena a contract (one lane)."""

    def __init__(
        self,
        clock: Callable[[], float],
        metrics: Metrics,
        transition: str = "ancestry",
        recorder: Callable[[Engine], Recorder | None] = cuda_graphs,
        beside: Callable[[Engine], bool] = on_a_gpu,
    ) -> None:
        """recorder: of graphs for an engine's steps; None = they run as they are, as they always do under compaction:
        its state moves from buffer to buffer. beside: whether contexts have a lane of their own."""
        self._clock, self._metrics, self._beside = clock, metrics, beside
        self._transition, self._recorder = TRANSITIONS[transition], recorder
        self._lanes: dict[str, Lane] = {}
        self._entered = ""
        self._turns, self._here = Turns(), _Here()

    def serve(self, batch: Batch) -> list[Served]:
        """Every job of the batch with its result or its error, once each."""
        return self.finish(self.launch(batch))

    def launch(self, batch: Batch) -> Flight:
        """Ask the device for everything from the contexts to the last survivors. A GPU is not waited for: another batch
        may be launched behind this one, which it then finds in the same state memory."""
        flight = Flight(batch, [], self.run(batch))
        with self._made_in("request"), self._turns.launch():
            go(flight, self._clock, Pause.LAUNCHED)
        return flight

    def await_last(self, flight: Flight) -> None:
        """Wait until the device is at the last step of a batch that was launched. In any one thread."""
        with self._made_in("request"):
            go(flight, self._clock, Pause.LAST)

    def finish(self, flight: Flight) -> list[Served]:
        """Wait for a batch that was launched: every job of it with its result or its error, once each; a bug of ours
        fails the jobs still open. In any one thread, while others are launched."""
        with self._made_in("request"):
            return go(flight, self._clock)

    @contextmanager
    def _made_in(self, where: str) -> Iterator[None]:
        """Count the kernels that this thread compiles meanwhile, and the graphs that it captures. In the middle of a
        batch all of them are that batch's, whatever for: they make it wait."""
        here = self._here
        if here.counted:
            yield
            return
        before, here.counted = here.graphs + cuda.compilations_here(), True
        try:
            yield
        finally:
            here.counted = False
            if made := here.graphs + cuda.compilations_here() - before:
                self._metrics.compiles_total.labels(where).inc(made)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Iterator[Served | Pause]:
        """The batch, step by step; jobs that leave early come first."""
        jobs, snapshot = batch.jobs, batch.snapshot
        engine, steps = snapshot.engine, len(snapshot.contract.steps)
        began, laps, lane = self._clock(), Laps(engine.device, self._clock), self._enter(snapshot)
        state = BatchState(lane.transition, len(jobs), steps, engine.device)
        # beside the decode of the batch before: step 1's output, too; None where step 1 is decoded as the others are
        output = lane.contexts.encode(engine, [job.inputs for job in jobs], state.arena, laps, self._decode)
        selection = Selection(jobs, snapshot.trie, snapshot.contract.sizes, engine.device)
        left, widest, counts = set[int](), 0, list[Tensor]()
        for t in range(1, steps + 1):  # each step with its own vocabulary, its own shapes
            if output is None:
                output = self._decode(lane.graphs, engine, t, state.rows(full=selection.needs_full(t)), state.arena)
            gone = self._leaving(jobs, left)  # cancelled or late requests leave here, and only here
            keep = [0 if r in left or r in gone else job.planned[t] for r, job in enumerate(jobs)]
            found = selection.select(t, output, state, keep)  # exact top K in order T0, one launch a structure
            gone = {**found.failed, **gone}
            widest = max(widest, state.row_start[-1])
            counts.append(found.counts)
            state.advance(t, found.survivors, (0, *accumulate(keep)))  # an index row a survivor, no K/V moves
            laps.mark()
            yield from (self._end(jobs[r], error, began, 0.0, widest) for r, error in gone.items())
            left |= gone.keys()
            output = None
            if len(left) == len(jobs):
                return
        ends = Download((torch.stack(counts), *state.survivors))
        yield Pause.LAUNCHED
        laps.wait_for_last()
        yield Pause.LAST
        counted, *rows = ends.wait()
        encoded, spent = self._timed(laps)
        began = max(began, self._clock() - spent)  # the device may have had another batch before
        broken = self._broken(counted, snapshot.contract.sizes)
        yield from (self._end(jobs[r], error, began, encoded, widest) for r, error in broken.items() if r not in left)
        left |= broken.keys()
        if len(left) == len(jobs):
            return
        items = rank_items(jobs, Finalists(state.row_start, *rows), snapshot.vocab, steps)
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

    def _decode(self, graphs: Graphs | None, engine: Engine, t: int, rows: Rows, arena: Arena) -> StepOutput:
        """Step t by its graph, or as it is where there is none: nothing is captured here."""
        output = graphs.step(engine, t, rows) if graphs else None
        if output is None:
            if engine.device.type == "cuda":
                self._metrics.engine_eager_steps_total.inc()
            output = engine.step(t, rows, arena)
        return output

    def _broken(self, counts: Tensor, sizes: Sequence[int]) -> dict[int, WidebeamError]:
        """Requests that the model wrote too many bad numbers for; each fails alone, and its rows are not looked at."""
        found = judge(counts, sizes)
        if found.bad_logits:
            self._metrics.bad_scores_total.labels("logits").inc(found.bad_logits)
        if found.bad_scores:
            self._metrics.bad_scores_total.labels("expression").inc(found.bad_scores)
        return {
            request: ModelOutput(f"more than 1 % of the logits of step {t} are NaN or infinite")
            for request, t in found.broken.items()
        }

    def _timed(self, laps: Laps) -> tuple[float, float]:
        """Note down how long the context and each step took; seconds of the context, and of all."""
        context, _, *steps = laps.seconds()  # between them the decode of the batch before may have gone on
        for label, seconds in (("context", context), *((str(t), one) for t, one in enumerate(steps, 1))):
            self._metrics.step_seconds.labels(label).observe(seconds)
        return context, context + sum(steps)

    def _end(self, job: Job, result: Ranked | WidebeamError, began: float, encoded: float, rows: int) -> Served:
        """encoded: seconds of the context stage."""
        return Served(job, result, began, 1e3 * encoded, 1e3 * (self._clock() - began - encoded), rows)

    def explain(self, job: Job, answer: Ranked) -> Explanation | WidebeamError:
        """How an answered job came to its answer. Between batches, and for clients that are still there."""
        try:
            with self._made_in("request"):
                return job.ticket.gone(self._clock()) or explain(job, self._lane(job.snapshot).transition, answer)
        except Exception as error:  # noqa: BLE001  whatever broke: the loop lives on
            return Fault.of(error)

    def prepare(self, snapshot: Snapshot) -> Taken:
        """Before a snapshot's first batch: a contract's state memory, once, and the graphs of its weights' slot, which
        may be there already; before the very first, algorithms for the products of its steps. In any one thread. Raises
        Rejected("no_memory")."""
        with self._made_in("background"):
            return self._prepare(snapshot)

    def _prepare(self, snapshot: Snapshot) -> Taken:
        lane, engine = self._lane(snapshot), snapshot.engine
        lane.contexts.settle()
        choices: tuple[Choice, ...] = ()
        if lane.graphs and not self._entered:  # what is measured while batches run is not true
            choices = choose(lane.graphs.largest(engine))
        parts = lane.graphs, lane.contexts.graphs, lane.contexts.captured
        taken = Taken.of([one.prepare(engine) for one in parts if one])
        self._here.graphs += taken.graphs
        if taken.graphs and engine.slot:
            engine.slot.slots.beside = taken.bytes
        return taken._replace(choices=choices)

    def forget(self, contract_id: str) -> None:
        """Free a contract's state memory. Engine thread only, when no batch of that contract will come any more."""
        self._lanes.pop(contract_id, None)

    def _enter(self, snapshot: Snapshot) -> Lane:
        """The lane of a batch. Contracts have nothing beside each other: what torch's products compute in is shared by
        graphs that were captured in one stream, and streams are a pool of 32."""
        lane = self._lane(snapshot)
        if self._entered != snapshot.contract.id:
            lane.contexts.settle()
            self._entered = snapshot.contract.id
        return lane

    def _lane(self, snapshot: Snapshot) -> Lane:
        """This lane's state memory: allocated once a contract, at its first (warm-up) batch."""
        contract = snapshot.contract
        lane = self._lanes.get(contract.id)
        if lane is None:
            lane = self._lanes[contract.id] = self._made(contract, snapshot.engine)
        return lane

    def _made(self, contract: Contract, engine: Engine) -> Lane:
        beside, moves = self._beside(engine), self._transition is not Ancestry
        early = beside and engine.first_step == 1
        pads = PADS if beside and engine.contexts_on_device else 0
        parts = {"requests": 1 + beside, "pads": pads, "rows": 1 + moves, "firsts": int(early)}
        check_state_fits(contract, engine.device, **parts)
        arena = engine.new_arena(contract.limits)
        own = own_arena(arena, contract, first=early, pads=pads) if beside else {}
        graphs = self._graphs(arena, contract, engine, range(1 + early, len(contract.sizes) + 1))
        first = self._graphs(own, contract, engine, range(1, 2)) if early else None
        captured = self._captured(own, contract, engine) if pads else None
        contexts = ContextLane(own, contract.states, engine.device, first, captured)
        return Lane(self._transition(arena, contract.states), graphs, contexts)

    def _graphs(self, arena: Arena, contract: Contract, engine: Engine, steps: range) -> Graphs | None:
        """What can be captured over an arena."""
        recorder = self._recorder(engine) if self._transition is Ancestry else None
        if recorder is None:
            return None
        return Graphs(arena, contract.limits, contract.sizes, engine.device, recorder, self._turns.capture, steps)

    def _captured(self, own: Arena, contract: Contract, engine: Engine) -> ContextGraphs | None:
        """Contexts that can be captured, over memory of their own."""
        recorder = self._recorder(engine) if self._transition is Ancestry else None
        if recorder is None:
            return None
        specs, turn = engine.input_specs(), self._turns.capture
        return ContextGraphs(own, contract.limits, specs, engine.device, recorder, turn)
