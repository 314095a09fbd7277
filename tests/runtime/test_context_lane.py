"""Contexts in memory of their own: the same answers, and a decode that does not see the next batch's contexts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.errors import Rejected
from app.runtime import context_lane
from app.runtime.job import Batch
from app.runtime.laps import Laps
from app.runtime.metrics import Metrics
from app.runtime.state import TRANSITIONS
from app.runtime.steps import StepLoop
from tests import support

SIZES = (4, 5, 6)


@pytest.fixture(scope="module")
def world():
    deployment = support.deployment_of(SIZES)
    engine = support.onerec_engine(SIZES, deployment.limits)
    vocab = support.catalogue(support.random_sids(SIZES, 40), SIZES)
    return deployment, support.snapshot_of(engine, vocab, deployment)


def jobs_of(world, *histories):
    deployment, snapshot = world
    return tuple(support.job_of(snapshot, deployment, history, k=50) for history in histories)


def served(loop, jobs):
    found = {id(end.job): end.result for end in loop.serve(Batch(jobs))}
    return [found[id(job)] for job in jobs]


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_answers_are_the_same(world, transition):
    loop = StepLoop(lambda: 0.0, Metrics(), transition, beside=lambda _: True)
    for histories in ([(), ("i1",)], [("i2", "i3")], [("i1",), tuple(f"i{n}" for n in range(30)), ()]):
        jobs = jobs_of(world, *histories)
        for one, other in zip(served(loop, jobs), support.run_batch(list(jobs), transition), strict=True):
            assert one.items.tolist() == other.items.tolist()
            np.testing.assert_array_equal(one.scores, other.scores)


@pytest.mark.parametrize("own", [True, False])
def test_the_next_contexts_may_come_while_a_batch_is_decoded_only_where_they_have_memory_of_their_own(world, own):
    _, snapshot = world
    loop = StepLoop(lambda: 0.0, Metrics(), beside=lambda _: own)
    loop.prepare(snapshot)
    jobs, behind = jobs_of(world, ("i1",), ("i2",)), jobs_of(world, tuple(f"i{n}" for n in range(30)), ("i7", "i9"))
    expected, lane = served(loop, jobs), loop._lane(snapshot)
    decode = loop._decode

    def disturbed(lane, engine, t, rows):
        inputs = [job.inputs for job in behind]
        with torch.inference_mode():
            lane.contexts._encode(engine, inputs, lane.transition.arena, Laps(engine.device, lambda: 0.0))
        return decode(lane, engine, t, rows)

    loop._decode = disturbed
    found = served(loop, jobs)
    same = all(np.array_equal(one.scores, other.scores) for one, other in zip(found, expected, strict=True))
    assert same == own
    assert bool(lane.contexts._own) == own


def test_missing_memory_is_said_as_such(world, monkeypatch):
    _, snapshot = world

    def full(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(context_lane.torch, "zeros_like", full)
    with pytest.raises(Rejected, match="contexts beside a decode") as refused:
        StepLoop(lambda: 0.0, Metrics(), beside=lambda _: True).prepare(snapshot)
    assert refused.value.code == "no_memory"
