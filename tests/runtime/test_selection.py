"""What the structures of a batch owe each other: one that raises takes its own requests along, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from app.core import Ranked
from app.errors import Cancelled, Fault
from app.policies.plan import Plan
from app.runtime.explain import watch
from app.runtime.job import Batch, Job
from app.runtime.metrics import Metrics
from app.runtime.state import TRANSITIONS
from app.runtime.steps import StepLoop
from tests import support

SIZES = (4, 5, 6)
HEAD = "widebeam: 1\nwidths: [4, 12, 20]\n"
POLICIES = {
    "plain": HEAD,
    "pruned": f"{HEAD}steps: {{all: {{prune: [within(2)]}}}}\n",
    "explored": f"{HEAD}steps: {{all: {{select: explore(share=0.4)}}}}\n",
}
CAUSES = (ZeroDivisionError("division by zero"), torch.OutOfMemoryError("no memory"), Fault("no truth values"))


def world():
    deployment = support.deployment_of(SIZES)
    engine = support.onerec_engine(SIZES, deployment.limits)
    vocab = support.catalogue(support.random_sids(SIZES, 40), SIZES)
    return deployment, support.snapshot_of(engine, vocab, deployment, POLICIES)


def raising(plan: Plan, step: int, error: Exception) -> tuple[Plan, list[int]]:
    """The plan with a program that raises at a step, and how often that was run."""
    runs: list[int] = []

    def run(inputs):
        runs.append(inputs.step)
        raise error

    programs = list(plan.structure.steps)
    programs[step - 1] = replace(programs[step - 1], run=run, legal=None)
    return replace(plan, structure=replace(plan.structure, id="raises", steps=tuple(programs))), runs


def ends(jobs: Sequence[Job], transition: str = "ancestry") -> list[object]:
    """What each job got: every one exactly one end."""
    served = StepLoop(lambda: 0.0, Metrics(), transition).serve(Batch(tuple(jobs)))
    assert len(served) == len({id(end.job) for end in served}) == len(jobs)
    results = {id(end.job): end.result for end in served}
    return [results[id(job)] for job in jobs]


@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_program_that_raises_fails_the_requests_of_its_structure_and_no_others(step, transition):
    deployment, snapshot = world()
    good = [
        support.job_of(snapshot, deployment, (f"i{at}",), policy=name, seed=at, k=15)
        for at, name in enumerate((*POLICIES, *POLICIES))
    ]
    plan, runs = raising(snapshot.plan("pruned"), step, CAUSES[step - 1])
    bad = [replace(support.job_of(snapshot, deployment, (one,), policy="pruned"), plan=plan) for one in ("i3", "i4")]
    got = ends([bad[0], *good[:3], bad[1], *good[3:]], transition)
    for result in (got[0], got[4]):
        assert isinstance(result, Fault)
        assert str(CAUSES[step - 1]) in result.message
    assert runs == [step]  # rows of those who failed are not looked at again
    for job, result in zip(good, [*got[1:4], *got[5:]], strict=True):
        [alone] = support.run_batch([job], transition)
        assert isinstance(result, Ranked)
        assert result.items.tolist() == alone.items.tolist()
        np.testing.assert_allclose(result.scores, alone.scores, atol=1e-5)


def test_where_every_structure_raises_every_request_fails_once():
    deployment, snapshot = world()
    plans = [raising(snapshot.plan(name), step, CAUSES[0])[0] for step, name in ((1, "plain"), (3, "explored"))]
    plans[1] = replace(plans[1], structure=replace(plans[1].structure, id="raises, too"))
    jobs = [replace(support.job_of(snapshot, deployment, ("i1",), policy=plan.policy), plan=plan) for plan in plans]
    assert [type(one) for one in ends(jobs)] == [Fault, Fault]


def test_a_client_that_left_in_that_step_has_left():
    deployment, snapshot = world()
    plan, _ = raising(snapshot.plan("plain"), 1, CAUSES[0])

    class Gone:
        def gone(self, now):
            return Cancelled("the client left")

    job = replace(support.job_of(snapshot, deployment, ("i1",)), plan=plan, ticket=Gone())
    stays = support.job_of(snapshot, deployment, ("i2",), policy="pruned")
    assert [type(one) for one in ends([job, stays])] == [Cancelled, Ranked]


def test_an_explanation_of_such_a_request_raises_what_the_program_did():
    deployment, snapshot = world()
    plan, _ = raising(snapshot.plan("explored"), 2, CAUSES[0])
    job = replace(support.job_of(snapshot, deployment, ("i1",), policy="explored"), plan=plan)
    lane = TRANSITIONS["ancestry"](snapshot.engine.new_arena(deployment.limits), snapshot.contract.states)
    with pytest.raises(Fault, match="division by zero"):
        watch(job, lane)
