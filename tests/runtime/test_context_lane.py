"""Contexts and step 1 in memory of their own: the same answers, and a decode that does not see the next batch's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from app.config import Deployment, Limits
from app.core import HeadSpec, TokenIds
from app.errors import Cancelled, Fault, ModelOutput, Rejected
from app.runtime import context_lane
from app.runtime.context_lane import ContextLane
from app.runtime.job import Batch
from app.runtime.laps import Laps
from app.runtime.metrics import Metrics
from app.runtime.state import TRANSITIONS
from app.runtime.steps import StepLoop
from tests import support
from tests.engine import tiny
from tests.engine.replayed import Replays

SIZES = (4, 5, 6)
POLICIES = {
    "narrow": "widebeam: 1\nwidths: [2, 5, 7]\n",
    "one": "widebeam: 1\nwidths: [1, 1, 3]\n",
    "unseen": "widebeam: 1\nsteps:\n  first:\n    mask: trie and not seen\n",
    "half": "widebeam: 1\nsteps:\n  first:\n    keep: [top_k(2)]\n    score: 0.5 * logp\n",
    "step": "widebeam: 1\nsteps:\n  all:\n    normalize: step\n",
    "open": "widebeam: 1\nsteps:\n  first:\n    mask: none\n",
}
HEADS = {
    "full": "widebeam: 1\nsteps:\n  all:\n    normalize: full\n",
    "heads": "widebeam: 1\nsteps:\n  all:\n    score: parent + logp + 0.3 * head.fresh - head.doubt\n",
}
LONG = tuple(f"i{n}" for n in range(30))
HISTORIES = [(), ("i1",), LONG, ("i2", "i3"), ("i7", "i9", "i3"), tuple(f"i{n}" for n in range(7, 19))]


class Noted:
    """An engine that notes each step's rows and whose memory they are over. bad: what step 1 says of request 0 is no
    number; broken: step 1 raises."""

    def __init__(self, engine):
        self._engine, self.decoded, self.bad, self.broken = engine, [], False, False

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self, t, rows, arena):
        if self.broken and t == 1:
            raise RuntimeError("boom")
        self.decoded.append((t, len(rows.codes), id(arena)))
        output = self._engine.step(t, rows, arena)
        if self.bad and t == 1:
            output.logits[rows.request == 0] = torch.nan
        return output


class Emits(Noted):
    """One whose model can emit more than a step's codes, and says more than logits."""

    log_norm = True

    def head_specs(self):
        return (HeadSpec("fresh", "code"), HeadSpec("doubt", "row"))

    def step(self, t, rows, arena):
        logits = super().step(t, rows, arena).logits
        heads = {"fresh": logits.sin(), "doubt": logits[:, 0].cos()}
        norm = logits.logsumexp(1) + logits[:, 1].abs() if rows.full else None
        return context_lane.StepOutput(logits, norm, heads)


def world_of(kind=Noted, policies=POLICIES, seed=0, **limits):
    deployment = support.deployment_of(SIZES, **limits)
    engine = kind(support.onerec_engine(SIZES, deployment.limits, seed))
    vocab = support.catalogue(support.random_sids(SIZES, 40), SIZES)
    return deployment, support.snapshot_of(engine, vocab, deployment, policies)


@pytest.fixture(scope="module")
def world():
    return world_of()


def loop_of(transition="ancestry", *, beside=True, recorder=None):
    made = (lambda _: recorder) if recorder else (lambda _: None)
    return StepLoop(lambda: 0.0, Metrics(), transition, recorder=made, beside=lambda _: beside)


def jobs_of(world, *asked, k=50):
    """asked: histories, or (history, policy)."""
    deployment, snapshot = world
    pairs = [one if one and isinstance(one[0], tuple) else (one, "base") for one in asked]
    return tuple(support.job_of(snapshot, deployment, history, policy=policy, k=k) for history, policy in pairs)


def served(loop, jobs):
    found = {id(end.job): end.result for end in loop.serve(Batch(jobs))}
    return [found[id(job)] for job in jobs]


def assert_same(found, expected, atol=0.0):
    for one, other in zip(found, expected, strict=True):
        assert one.items.tolist() == other.items.tolist()
        np.testing.assert_allclose(one.scores, other.scores, rtol=0, atol=atol)


@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("kind", ["onerec", "emits"])
def test_answers_are_the_same_bit_for_bit(transition, kind):
    policies = POLICIES if kind == "onerec" else {**POLICIES, **HEADS}
    world = world_of(Noted if kind == "onerec" else Emits, policies)
    asked = [
        (HISTORIES[n % len(HISTORIES)], policy)
        for n, policy in enumerate([*policies, "base"] * 2, 1)
    ][:16]  # fmt: skip
    loop, plain = loop_of(transition), loop_of(transition, beside=False)
    for some in (asked[:1], asked[3:5], asked, [((), "step"), (LONG, "step")], asked[-3:]):
        jobs = jobs_of(world, *some)
        assert_same(served(loop, jobs), served(plain, jobs))
    assert loop._lane(world[1]).contexts._slots
    assert not plain._lane(world[1]).contexts._own


def test_step_1_is_decoded_once_a_batch_and_in_memory_of_its_own(world):
    deployment, snapshot = world
    engine = Noted(snapshot.engine._engine)
    own = replace(snapshot, engine=engine)
    loop = loop_of()
    jobs = jobs_of((deployment, own), (), ("i1",), LONG)
    served(loop, jobs)
    lane = loop._lane(own)
    assert [(t, rows) for t, rows, _ in engine.decoded] == [
        (t, sum(job.planned[t - 1] for job in jobs)) for t in (1, 2, 3)
    ]
    first, *others = (arena for _, _, arena in engine.decoded)
    assert first == id(lane.contexts._own)
    assert set(others) == {id(lane.transition.arena)}
    for state in snapshot.contract.states:
        if state.scope == "row":
            assert lane.contexts._own[state.name].shape == (1, deployment.limits.batch, *state.shape)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("own", [True, False])
def test_the_next_contexts_and_their_step_1_may_come_at_any_time_only_where_they_have_memory_of_their_own(
    world, own, captured
):
    _, snapshot = world
    loop = loop_of(beside=own, recorder=Replays() if captured else None)
    loop.prepare(snapshot)
    jobs, behind = jobs_of(world, ("i1",), ("i2",)), jobs_of(world, LONG, ("i7", "i9"))
    expected, lane = served(loop, jobs), loop._lane(snapshot)
    leaving, times = loop._leaving, []

    def disturbed(jobs, left):
        """After each step's decode, and before its selection."""
        inputs, laps = [job.inputs for job in behind], Laps(snapshot.engine.device, lambda: 0.0)
        with torch.inference_mode():
            lane.contexts._encode(snapshot.engine, inputs, lane.transition.arena, laps, loop._decode)
        times.append(1)
        return leaving(jobs, left)

    loop._leaving = disturbed
    found = served(loop, jobs)
    same = all(np.array_equal(one.scores, other.scores) for one, other in zip(found, expected, strict=True))
    assert len(times) == len(SIZES)
    assert same == own
    assert bool(lane.contexts._own) == own


def test_step_1_is_captured_in_its_own_lane_and_the_others_in_theirs(world):
    _, snapshot = world
    recorders = [Replays(), Replays(), Replays()]  # steps, step 1, contexts
    made, metrics = iter(recorders), Metrics()
    loop = StepLoop(lambda: 0.0, metrics, recorder=lambda _: next(made), beside=lambda _: True)
    alone = loop_of(beside=False, recorder=Replays())
    taken = loop.prepare(snapshot)
    assert taken.graphs == sum(one.recorded for one in recorders)
    assert taken.graphs - recorders[2].recorded == alone.prepare(snapshot).graphs
    assert taken.bytes == 7 * taken.graphs
    assert metrics.registry.get_sample_value("widebeam_compiles_total", {"where": "background"}) == taken.graphs
    lane = loop._lane(snapshot)
    assert {shape.t for shape in lane.graphs._captures.of(snapshot.engine)} == {2, 3}
    assert {shape.t for shape in lane.contexts.graphs._captures.of(snapshot.engine)} == {1}
    for requests in (3, 1, 6):
        jobs = jobs_of(world, *HISTORIES[:requests])
        before = [one.replayed for one in recorders]
        assert_same(served(loop, jobs), served(loop_of(beside=False), jobs), atol=1e-5)
        assert [one.replayed - was for one, was in zip(recorders, before, strict=True)] == [2, 1, 1]
    assert loop.prepare(snapshot).graphs == 0
    assert loop_of("compaction", recorder=Replays()).prepare(snapshot).graphs == 0


def test_every_snapshot_has_its_own_step_1_whichever_batch_is_in_front(world):
    deployment, snapshot = world
    other = replace(world_of(seed=5)[1], id="s2", contract=snapshot.contract)
    recorder = Replays()
    loop = loop_of(recorder=recorder)
    assert loop.prepare(snapshot).graphs == loop.prepare(other).graphs > 0
    captured = recorder.recorded
    batches = [jobs_of((deployment, one), *HISTORIES[: 1 + n % 4]) for n, one in enumerate((snapshot, other) * 25)]
    expected = [served(loop_of(beside=False), jobs) for jobs in batches[:8]]
    flights = [loop.launch(Batch(jobs)) for jobs in batches]
    for n, (flight, jobs) in enumerate(zip(flights, batches, strict=True)):
        found = {id(end.job): end.result for end in loop.finish(flight)}
        assert_same([found[id(job)] for job in jobs], expected[n % 8], atol=1e-5)
    assert recorder.recorded == captured
    assert expected[0][0].scores.tolist() != expected[1][0].scores.tolist()


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_who_leaves_behind_the_contexts_or_later_hurts_nobody(world, asked):
    class Leaves:
        left = asked

        def gone(self, now):
            Leaves.left -= 1
            return Cancelled("the client left") if Leaves.left <= 0 else None

    goes, *stay = jobs_of(world, LONG, ("i1",), ("i2", "i3"))
    loop, goes = loop_of(), replace(goes, ticket=Leaves())
    found = served(loop, (stay[0], goes, stay[1]))
    assert isinstance(found[1], Cancelled)
    assert_same([found[0], found[2]], served(loop_of(beside=False), tuple(stay)), atol=1e-5)
    assert_same(served(loop, tuple(stay)), served(loop_of(beside=False), tuple(stay)))


def test_nonsense_and_bugs_at_step_1_hurt_nobody_else(world):
    deployment, snapshot = world
    engine = Noted(snapshot.engine._engine)
    own, loop = (deployment, replace(snapshot, engine=engine)), loop_of()
    engine.bad = True
    wrong, right = served(loop, jobs_of(own, ("i1",), ("i2",)))
    assert isinstance(wrong, ModelOutput)
    assert "step 1 " in wrong.message
    engine.bad = False
    assert_same([right], served(loop, jobs_of(own, ("i2",))), atol=1e-5)
    engine.broken = True
    for failed in served(loop, jobs_of(own, ("i1",), ("i2",))):
        assert isinstance(failed, Fault)
    engine.broken = False
    jobs = jobs_of(own, *HISTORIES)
    assert_same(served(loop, jobs), served(loop_of(beside=False), jobs))


def test_a_token_models_step_1_comes_with_its_contexts_and_has_no_slots_there(tmp_path):
    limits = Limits(widths=(8,) * 3, rows=64, batch=4, context=24)
    engine = tiny.engine(tiny.write(tmp_path / "weights"), limits=limits)
    deployment = Deployment(family="qwen3", sid=tiny.SID, limits=limits, precision="float32")
    snapshot = support.snapshot_of(
        engine, support.catalogue(support.random_sids(tiny.SIZES, 40), tiny.SIZES), deployment
    )
    jobs = tuple(
        support.job_of(
            snapshot, deployment, k=8, context=TokenIds(tuple(3 + (7 * n + i) % 17 for i in range(1 + 5 * n)))
        )
        for n in range(4)
    )
    recorder = Replays()
    loop = loop_of(recorder=recorder)
    loop.prepare(snapshot)
    for n in (4, 1, 3):
        assert_same(served(loop, jobs[:n]), served(loop_of(beside=False), jobs[:n]), atol=1e-5)
    assert recorder.replayed == 3 * 3  # contexts, and two steps
    lane = loop._lane(snapshot)
    assert lane.contexts.graphs is None
    assert set(lane.contexts._own) == {one.name for one in snapshot.contract.states if one.scope == "request"}


def test_contracts_have_nothing_beside_each_other(world, monkeypatch):
    _, snapshot = world
    other = replace(snapshot, contract=replace(snapshot.contract, id="another"))
    loop, settled = loop_of(), []
    for one in (snapshot, other):
        loop.prepare(one)
    lanes = {id(loop._lane(one).contexts): one.contract.id for one in (snapshot, other)}
    monkeypatch.setattr(ContextLane, "settle", lambda self: settled.append(lanes[id(self)]))
    for one in (snapshot, snapshot, other, other, snapshot):
        served(loop, jobs_of((world[0], one), ("i1",)))
    assert settled == [snapshot.contract.id, "another", snapshot.contract.id]


def test_missing_memory_is_said_as_such(world, monkeypatch):
    _, snapshot = world

    def full(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(context_lane.torch, "zeros_like", full)
    with pytest.raises(Rejected, match="contexts beside a decode") as refused:
        loop_of().prepare(snapshot)
    assert refused.value.code == "no_memory"
