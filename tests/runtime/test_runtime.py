"""The front door: admission, batching, deadlines, cancellation and draining over a real engine thread."""

from __future__ import annotations

import asyncio
import io
import json
import math
import threading
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import torch

from app.core import HistoryIds, Request, TokenIds
from app.engine.engine import Engine
from app.errors import Cancelled, DeadlineTooShort, Draining, Expired, InvalidRequest, NotReady, QueueFull, Underfilled
from app.ops.product import Choice
from app.ops.product.lt import Algorithm
from app.ops.product.table import Chosen, Key
from app.runtime import batcher
from app.runtime.loader import Loaded
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from app.runtime.runtime import Runtime
from app.runtime.status import Reason
from app.runtime.steps import StepLoop
from app.vocab.vocab import Vocab
from tests import support

SIZES = (4, 5, 6)
WIDTHS = "widebeam: 1\nwidths: [{0}, {0}, {0}]\n"


class Gate:
    """An engine whose context stage waits for permission: a way to hold a batch for as long as a test likes."""

    def __init__(self, engine):
        self._engine = engine
        self.open, self.entered = threading.Event(), threading.Event()
        self.open.set()
        self.batches = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def encode(self, contexts, arena):
        self.batches.append(len(next(iter(contexts.values())).start) - 1)
        self.entered.set()
        assert self.open.wait(100)
        return self._engine.encode(contexts, arena)


class World:
    def __init__(self, policies=None, **limits):
        self.deployment = support.deployment_of(SIZES, **limits)
        engine = support.onerec_engine(SIZES, self.deployment.limits)
        vocab = support.catalogue(support.random_sids(SIZES, 40), SIZES)
        self.snapshot = support.snapshot_of(engine, vocab, self.deployment, policies)
        self.gate = Gate(engine)
        self.snapshot = replace(self.snapshot, engine=self.gate)
        self.metrics = Metrics()
        self.logged = io.BytesIO()
        self.runtime = Runtime(self.deployment, self.metrics, make_log(self.logged), time.monotonic)

    def ask(self, *history, k=5, ms=None, **fields):
        now = time.monotonic()
        deadline = None if ms is None else now + ms / 1e3
        request = {"request_id": "r", "context": HistoryIds(history), "k": k, "received": now, "deadline": deadline}
        return self.runtime.admit(Request(**{**request, **fields}))

    async def busy(self):
        """Hold the engine in the middle of a batch of one."""
        self.gate.open.clear()
        self.gate.entered.clear()
        held = self.ask("i1")
        await asyncio.to_thread(self.gate.entered.wait)
        return held

    def sample(self, name, **labels):
        return self.metrics.registry.get_sample_value(name, labels) or 0


@asynccontextmanager
async def started(policies=None, **limits):
    world = World(policies, **limits)
    await world.runtime.start(lambda: Loaded(snapshot=world.snapshot))
    assert world.runtime.reasons() == ()
    world.gate.batches.clear()
    try:
        yield world
    finally:
        world.gate.open.set()
        assert await world.runtime.drained(60)
        assert world.runtime._pins.held(world.snapshot.id) == 0
        assert world.runtime._open == {}
        assert world.sample("widebeam_queue_depth") == world.sample("widebeam_in_flight") == 0
        world.runtime.close()


async def test_an_answer_names_its_versions_and_counts_unknown_ids():
    async with started() as world:
        outcome = await world.ask("i1", "nope", "i2", k=3, exclude=("i3", "gone", "away")).outcome()
        assert len(outcome.items) == 3
        assert (outcome.status, outcome.reason) == ("ok", None)
        assert (outcome.unknown_history, outcome.unknown_exclude) == (1, 2)
        assert outcome.versions.snapshot == "s1"
        assert outcome.versions.policy == "base"
        assert outcome.seed == (await world.ask("i1", k=1).outcome()).seed
        assert outcome.timings.total >= outcome.timings.decode > 0


async def test_the_time_that_it_takes_to_make_an_answer_is_in_its_total(monkeypatch):
    async with started() as world:
        request, made = Request("r", HistoryIds(("i1",)), k=3, received=time.monotonic()), []
        ids = Vocab.ids

        def slow(vocab, items):
            found = ids(vocab, items)
            made.append(time.monotonic())
            return found

        monkeypatch.setattr(Vocab, "ids", slow)
        outcome = await world.runtime.admit(request).outcome()
    assert outcome.timings.total / 1e3 >= made[-1] - request.received


async def test_the_log_says_which_algorithms_were_chosen(monkeypatch):
    key = Key(0, torch.bfloat16, 896, 3584, onto=True)
    choices = (
        Choice(key, Chosen(Algorithm(bytes(64), 0), 2048), 16384, 0.17821, 0.15718, 0.51),
        Choice(key._replace(onto=False), Chosen(None), 16384, 0.0505, 0.0505, 0.4),
    )
    prepare = StepLoop.prepare
    monkeypatch.setattr(StepLoop, "prepare", lambda loop, snapshot: prepare(loop, snapshot)._replace(choices=choices))
    async with started() as world:
        lines = [json.loads(line) for line in world.logged.getvalue().splitlines()]
    [line] = [one for one in lines if one["event"] == "products_chosen"]
    shape = {"outputs": 896, "inputs": 3584, "dtype": "bfloat16", "rows": 16384}
    assert line["seconds"] == 0.91
    assert line["products"] == [
        {**shape, "onto": True, "from_rows": 2048, "us_before": 178.2, "us": 157.2},
        {**shape, "onto": False, "from_rows": None, "us_before": 50.5, "us": 50.5},
    ]


async def test_a_history_that_nobody_knows_is_named_where_the_model_misses_it(monkeypatch):
    async with started() as world:
        prepare = Engine.prepare

        def wants_some(engine, context):  # as a model of tokens without a prefix
            if not len(context.codes):
                raise InvalidRequest("the context is empty", path="$.context")
            return prepare(engine, context)

        monkeypatch.setattr(Engine, "prepare", wants_some)
        with pytest.raises(InvalidRequest) as refused:
            world.ask("sku3", "nope")
        assert (refused.value.path, refused.value.message) == (
            "$.context.history", "the context is empty; no item of the history is in the catalogue",
        )  # fmt: skip
        with pytest.raises(InvalidRequest) as refused:
            world.ask()
        assert (refused.value.path, refused.value.message) == ("$.context", "the context is empty")
        assert (await world.ask("i1", "nope", k=3).outcome()).unknown_history == 1


async def test_what_falls_short_says_why():
    async with started({"narrow": WIDTHS.format(3)}) as world:
        narrow = await world.ask("i1", k=5, policy="narrow").outcome()
        assert (len(narrow.items), narrow.status, narrow.reason) == (3, "underfilled", "width")
        few = await world.ask("i1", k=50).outcome()
        assert (len(few.items), few.status, few.reason) == (40, "underfilled", "candidates")
        nothing = await world.ask("i1", k=5, exclude=tuple(f"i{n}" for n in range(40))).outcome()
        assert (nothing.items, nothing.status) == ((), "no_candidates")


async def test_a_policy_that_wants_all_or_nothing_gets_it():
    async with started({"strict": "widebeam: 1\nunderfill: error\n"}) as world:
        assert len((await world.ask("i1", k=40, policy="strict").outcome()).items) == 40
        with pytest.raises(Underfilled):
            await world.ask("i1", k=41, policy="strict").outcome()


async def test_an_idle_engine_starts_at_once_and_a_busy_one_collects():
    async with started() as world:
        first = [world.ask("i1") for _ in range(3)]  # one turn of the loop: they start together
        await asyncio.gather(*(ticket.outcome() for ticket in first))
        assert world.gate.batches == [3]
        held = await world.busy()
        waiting = [world.ask("i2") for _ in range(20)]
        await asyncio.sleep(0)
        assert world.runtime.status()["queue"] == {"depth": 20, "limit": 1024, "in_flight": 1}
        world.gate.open.set()
        await asyncio.gather(held.outcome(), *(ticket.outcome() for ticket in waiting))
        assert world.gate.batches == [3, 1, 16, 4]  # limits.batch is 16


async def test_the_row_budget_bounds_a_batch_and_nobody_is_overtaken_for_ever():
    policies = {"wide": WIDTHS.format(30), "slim": WIDTHS.format(2)}
    async with started(policies, rows=64) as world:
        held = await world.busy()
        tickets = [world.ask("i1", policy="wide") for _ in range(4)]
        tickets += [world.ask("i1", policy="slim") for _ in range(3)]
        world.gate.open.set()
        outcomes = await asyncio.gather(held.outcome(), *(ticket.outcome() for ticket in tickets))
        assert all(outcome.batch_rows <= 64 for outcome in outcomes)
        # three wide ones and the slim ones fill the rows; the fourth wide one leads the next batch
        assert world.gate.batches == [1, 6, 1]
        assert outcomes[4].batch_requests == 1


@pytest.mark.parametrize("part", ["contract", "weights", "vocab_ref"])
async def test_requests_of_another_key_wait_their_turn_and_do_not_mix(part):
    async with started() as world:
        held = await world.busy()
        its = getattr(world.snapshot, part)
        changed = replace(its, id="other") if part == "contract" else its._replace(digest="other")
        other = replace(world.snapshot, id="s2", **{part: changed})
        tickets = []
        for turn in range(6):
            world.runtime._pins.active = other if turn % 2 else world.snapshot
            tickets.append(world.ask("i1"))
        world.gate.open.set()
        outcomes = await asyncio.gather(held.outcome(), *(ticket.outcome() for ticket in tickets))
        assert [o.versions.snapshot for o in outcomes] == ["s1", "s1", "s2", "s1", "s2", "s1", "s2"]
        assert world.gate.batches == [1, 3, 3]
        world.runtime._pins.active = world.snapshot


async def test_a_kill_splits_no_batch():
    async with started() as world:
        held = await world.busy()
        killing = world.snapshot.having(killed=frozenset({"somebody"}))
        tickets = []
        for turn in range(6):
            world.runtime._pins.active = killing if turn % 2 else world.snapshot
            tickets.append(world.ask("i1"))
        world.gate.open.set()
        await asyncio.gather(held.outcome(), *(ticket.outcome() for ticket in tickets))
        assert world.gate.batches == [1, 6]
        world.runtime._pins.active = world.snapshot


async def test_a_deadline_is_kept_while_the_engine_is_busy():
    async with started() as world:
        held = await world.busy()
        began = time.monotonic()
        with pytest.raises(Expired):
            await world.ask("i1", ms=300).outcome()
        assert 0.295 < time.monotonic() - began < 60  # the engine would be held for longer
        assert world.runtime.status()["queue"]["depth"] == 0
        world.gate.open.set()
        await held.outcome()
        assert await world.runtime.drained(60)  # whatever was handed to the engine has been noted by now
        assert world.gate.batches == [1]  # it was never computed
        assert world.sample("widebeam_deadline_missed_total", stage="queue") == 1


async def test_a_request_whose_time_passed_unnoticed_is_not_computed_either():
    async with started() as world:
        held = await world.busy()
        late = world.ask("i1", ms=200)
        world.gate.open.set()
        time.sleep(0.4)  # noqa: ASYNC251  the loop hears of the batch's end before its own timer fires
        with pytest.raises(Expired):
            await late.outcome()
        await held.outcome()
        assert await world.runtime.drained(60)  # whatever was handed to the engine has been noted by now
        assert world.gate.batches == [1]


async def test_a_client_that_leaves_the_queue_is_never_computed():
    async with started() as world:
        held = await world.busy()
        ticket = world.ask("i2")
        ticket.cancel()
        ticket.cancel()
        with pytest.raises(Cancelled):
            await ticket.outcome()
        world.gate.open.set()
        await held.outcome()
        assert await world.runtime.drained(60)  # whatever was handed to the engine has been noted by now
        assert world.gate.batches == [1]
        assert world.sample("widebeam_cancelled_total", stage="queue") == 1


async def test_a_client_that_leaves_a_running_batch_leaves_at_the_next_step():
    async with started() as world:
        held = await world.busy()
        held.cancel()
        world.gate.open.set()
        with pytest.raises(Cancelled):
            await held.outcome()
        assert await world.runtime.drained(60)
        assert world.sample("widebeam_cancelled_total", stage="step") == 1


async def test_a_full_queue_refuses_and_admits_again():
    async with started(queue=3) as world:
        held = await world.busy()
        waiting = [world.ask("i1") for _ in range(3)]
        with pytest.raises(QueueFull) as refused:
            world.ask("i1")
        assert refused.value.retry_after_s >= 1
        waiting[0].cancel()
        waiting[0] = world.ask("i1")
        world.gate.open.set()
        await asyncio.gather(held.outcome(), *(ticket.outcome() for ticket in waiting))


async def test_what_cannot_finish_in_time_is_refused_before_it_is_queued(monkeypatch):
    monkeypatch.setattr(batcher, "REST_S", math.inf)
    async with started() as world:
        for _ in range(8):
            world.runtime._batcher.time.observe(40, 5.0)
        with pytest.raises(DeadlineTooShort, match="are needed"):
            world.ask("i1", ms=2_000)
        assert len((await world.ask("i1", ms=60_000).outcome()).items) == 5
        with pytest.raises(Expired):
            world.ask("i1", ms=0)
        assert world.sample("widebeam_deadline_missed_total", stage="admission") == 1


async def test_a_server_that_rests_finds_out_that_a_slow_time_is_over(monkeypatch):
    monkeypatch.setattr(batcher, "REST_S", 0.0)
    async with started() as world:
        rows = (await world.ask("i1").outcome()).batch_rows
        for _ in range(50):
            world.runtime._batcher.time.observe(rows, 600.0)
        held = await world.busy()
        with pytest.raises(DeadlineTooShort, match="are needed"):  # something runs: it is believed
            world.ask("i1", ms=60_000)
        world.gate.open.set()
        await held.outcome()
        for _ in range(20):
            assert len((await world.ask("i1", ms=60_000).outcome()).items) == 5  # tried, and learnt from
        assert world.runtime._batcher.time.seconds(rows) < 60


async def test_bad_requests_are_the_clients_and_nothing_is_pinned():
    async with started() as world:
        for fields, path in (
            ({"policy": "nope"}, "$.policy"),
            ({"k": 10**6}, "$.k"),
            ({"context": TokenIds((1,))}, "$.context.tokens"),
        ):
            with pytest.raises(InvalidRequest) as bad:
                world.ask("i1", **fields)
            assert bad.value.path == path
        with pytest.raises(InvalidRequest, match=r"1 to \d+ are possible \(limits\.k\)"):
            world.ask("i1", k=10**6)


async def test_equal_request_ids_are_two_requests():
    async with started() as world:
        one, other = world.ask("i1", k=40), world.ask("i9", "i8", k=40)
        a, b = await asyncio.gather(one.outcome(), other.outcome())
        alone = await world.ask("i1", k=40).outcome()
        assert [item.id for item in a.items] == [item.id for item in alone.items]
        assert a.items != b.items


async def test_draining_finishes_what_runs_and_refuses_the_rest():
    async with started() as world:
        held = await world.busy()
        waiting = world.ask("i1")
        world.runtime.begin_drain()
        assert "draining" in world.runtime.reasons()
        with pytest.raises(Draining):
            world.ask("i1")
        assert not await world.runtime.drained(0.01)
        world.gate.open.set()
        assert len((await waiting.outcome()).items) == 5
        await held.outcome()
        assert await world.runtime.drained(60)


async def test_a_server_without_artifacts_is_alive_and_says_why():
    world = World()
    with pytest.raises(NotReady):
        world.ask("i1")
    await world.runtime.start(
        lambda: Loaded(reasons=(Reason("no_weights", "there is no complete version", "weights/"),))
    )
    assert world.runtime.reasons() == ("no_weights: weights/: there is no complete version",)
    assert world.runtime.status()["ready"] is False
    world.runtime.close()


async def test_a_server_is_not_ready_before_its_canary_has_been_served():
    world = World()
    world.gate.open.clear()
    starting = asyncio.create_task(world.runtime.start(lambda: Loaded(snapshot=world.snapshot)))
    await asyncio.to_thread(world.gate.entered.wait)
    assert world.runtime.reasons()[0].startswith("starting")
    world.gate.open.set()
    await starting
    assert world.runtime.reasons() == ()
    world.runtime.close()


async def test_a_bug_while_loading_is_a_reason_and_a_traceback():
    world = World()

    def load():
        raise RuntimeError("boom")

    await world.runtime.start(load)
    assert world.runtime.reasons()[0].startswith("internal")
    assert b"boom" in world.logged.getvalue()
    world.runtime.close()


async def test_a_model_that_fails_its_canary_never_serves():
    world = World()

    class Broken(Gate):
        def step(self, t, rows, arena):
            raise RuntimeError("boom")

    await world.runtime.start(lambda: Loaded(snapshot=replace(world.snapshot, engine=Broken(world.snapshot.engine))))
    assert world.runtime.reasons()[0].startswith("canary_failed")
    with pytest.raises(NotReady):
        world.ask("i1")
    world.runtime.close()


async def test_a_thousand_requests_with_random_ends_leave_nothing_behind():
    async with started(queue=4096) as world:
        tickets = {}
        for n in range(600):
            with suppress(Expired):  # a slow machine may not even come to admit it
                tickets[n] = world.ask(f"i{n % 40}", ms=None if n % 3 else 5 + n % 50)
        for n, ticket in tickets.items():
            if n % 5 == 0:
                ticket.cancel()
        ends = await asyncio.gather(*(ticket.outcome() for ticket in tickets.values()), return_exceptions=True)
        assert {type(end).__name__ for end in ends} <= {"Outcome", "Cancelled", "Expired"}
        assert sum(type(end).__name__ == "Outcome" for end in ends) >= 300
