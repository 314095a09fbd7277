"""One request alone against the oracle: for every kind of policy, and with a compiler that has a bug."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core import HistoryIds, Request
from app.policies.cases import Asked, RequestCase
from app.policies.diagnostics import Span
from app.policies.values import Given
from app.runtime.trial import Trial
from tests import support
from tests.runtime.test_explain import POLICIES
from tests.runtime.test_runtime import SIZES

AT = Span("t.yaml", 1, 1, 2)
MORE = {
    "diverse": "widebeam: 1\nwidths: [4, 8, 8]\nsteps:\n  all:\n    select: diverse(groups=2, penalty=0.5)\n",
    "sampled": "widebeam: 1\nwidths: [4, 8, 8]\nsteps:\n  all:\n    normalize: valid\n    select: stochastic()\n",
    "explores": "widebeam: 1\nwidths: [4, 8, 8]\nsteps:\n  all:\n    select: explore(share=0.25)\n",
    "noisy": "widebeam: 1\nwidths: [4, 8, 8]\nsteps:\n  all:\n    rank: score + 0.1 * gumbel - 0.3 * sibling\n",
    "shaped": "widebeam: 1\nwidths: [4, 8, 8]\nsteps:\n  all:\n    logits: logit / 2\n    keep:\n      - top_p(0.9)\n",
}


@pytest.fixture(scope="module")
def world():
    deployment = support.deployment_of(SIZES)
    engine = support.onerec_engine(SIZES, deployment.limits)
    vocab = support.catalogue(support.random_sids(SIZES, 40), SIZES)
    return support.snapshot_of(engine, vocab, deployment, {**POLICIES, **MORE}), deployment


def request(policy, **fields):
    return Request(**{"request_id": "r", "context": HistoryIds(("i1", "i7")), "k": 5, "policy": policy, **fields})


@pytest.mark.parametrize("policy", ["base", *POLICIES, *MORE])
def test_every_step_of_every_policy_is_as_the_oracle_has_it(world, policy):
    snapshot, deployment = world
    tried, job, _, _ = Trial(snapshot, deployment).ask(request(policy, exclude=("i3", "i4"), k=30))
    assert (tried.differs, tried.unchecked) == ((), ())
    [served] = support.run_batch([job])
    assert list(tried.ids) == snapshot.vocab.ids(served.items)
    assert tried.status == ("no_candidates" if policy == "odd" else "ok" if len(tried.ids) == 30 else "underfilled")


@pytest.mark.parametrize("policy", ["base", "capped", "late"])
def test_a_bug_of_the_compiler_is_seen_in_a_request(world, policy):
    snapshot, deployment = world
    plan = snapshot.plan(policy)
    steps = tuple(
        replace(step, run=lambda inputs, run=step.run: run(inputs._replace(logits=inputs.logits * 1.01)))
        for step in plan.structure.steps
    )
    plans = {"bad": replace(plan, structure=replace(plan.structure, steps=steps)), "base": snapshot.plan("base")}
    broken = snapshot.having(policies=support.Policies(plans))
    tried = Trial(broken, deployment).ask(request("bad", k=5))[0]
    assert tried.differs
    case = expecting(least=Given(1, AT))
    problems, _ = Trial(broken, deployment).problems(case, request("bad"))
    assert "the compiled plan and the reference differ at step" in problems[0][1]


def test_too_many_candidates_for_the_loops_are_said(world, monkeypatch):
    monkeypatch.setattr("app.runtime.trial.SMALL", 10)
    assert Trial(*world).ask(request("capped"))[0].unchecked == (2,)


def expecting(**fields):
    return RequestCase("t", AT, Given("base", AT), Asked(HistoryIds(()), 5), None, **fields)


def test_what_a_list_should_be_and_is_not(world):
    trial = Trial(*world)
    ids = trial.ask(request("narrow"))[0].ids
    out = next(f"i{item}" for item in range(40) if f"i{item}" not in ids)

    def problems(**fields):
        given = {name: Given(value, AT) for name, value in fields.items()}
        return [(message, hint) for _, message, hint in trial.problems(expecting(**given), request("narrow"))[0]]

    assert problems(items=ids, first=ids[:2], present=ids[1:], absent=(out,), least=4, status="underfilled") == []
    assert problems(absent=(ids[1], out)) == [(f"{ids[1]} is at place 2", "")]
    [(message, hint)] = problems(present=(ids[0], out))
    assert message == f"{out} is not in the list"
    assert f"{out} was cut at step " in hint
    [(message, hint)] = problems(first=(ids[0], out))
    assert message == f"place 2 is {ids[1]}, expected {out}; the list is [{ids[0]}, {ids[1]}]"
    assert "was cut" in hint
    [(message, hint)] = problems(items=(*ids, "never-heard-of"))
    assert message.startswith("place 5 is nothing, expected never-heard-of; the list is [")
    assert hint == "never-heard-of is not in the catalogue"
    assert problems(least=5)[0][0] == "the list has 4 items, at least 5 are expected"
    assert problems(status="ok")[0][0] == "the status is underfilled, expected ok"
