"""Explanations against a search written as loops over every candidate; causes, bound and batch-mates over a runtime."""

from __future__ import annotations

import asyncio
import io
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from app.core import HistoryIds, Ranked, Request
from app.errors import Cancelled, ExplainBusy, InvalidRequest
from app.runtime.columns import item_columns
from app.runtime.explain import explain
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from app.runtime.runtime import Runtime
from app.runtime.snapshot import DeadNodes
from app.runtime.state import TRANSITIONS
from app.runtime.steps import StepLoop
from app.runtime.takedowns import NOTHING
from tests import support
from tests.runtime.test_columns import snapshot as with_columns
from tests.runtime.test_runtime import SIZES, started

POLICIES = {
    "narrow": "widebeam: 1\nwidths: [2, 3, 4]\n",
    "unseen": "widebeam: 1\nwidths: [3, 4, 6]\nsteps:\n  all:\n    mask: trie and not seen\n",
    "odd": "widebeam: 1\nwidths: [3, 5, 6]\nsteps:\n  all:\n    mask: trie and step < 3\n",
    "open": "widebeam: 1\nwidths: [3, 8, 12]\nsteps:\n  all:\n    mask: none\n",
    "short": "widebeam: 1\nfinal:\n  limit: 5\n",
    "capped": "widebeam: 1\nwidths: [4, 6, 8]\nsteps:\n  2:\n    quota:\n      - cap(parent, max=1)\n",
    "thin": "widebeam: 1\nwidths: [4, 6, 8]\nsteps:\n  2:\n    keep:\n      - top_k(1)\n"
    "  3:\n    prune:\n      - within(1)\n",
    "late": "widebeam: 1\nsteps:\n  last:\n    rank: score - where(seen, 3, 0)\n",
}


class Kept:
    """An engine that keeps what it said about each step."""

    def __init__(self, engine):
        self._engine, self.logits = engine, []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self, *args):
        output = self._engine.step(*args)
        self.logits.append(output.logits.double().numpy())
        return output


@pytest.fixture(scope="module")
def world():
    deployment = support.deployment_of(SIZES)
    engine = support.onerec_engine(SIZES, deployment.limits)
    sids = support.random_sids(SIZES, 40)
    vocab = support.catalogue(sids, SIZES)
    return support.snapshot_of(engine, vocab, deployment, POLICIES), deployment


def explained(world, policy, history=("i1", "i7"), **fields):
    """A job's answer, its explanation, and the logits of its steps."""
    snapshot, deployment = world
    engine = Kept(snapshot.engine)
    job = support.job_of(replace(snapshot, engine=engine), deployment, history, policy=policy, **fields)
    [answer] = support.run_batch([job])
    engine.logits.clear()
    lane = TRANSITIONS["ancestry"](engine.new_arena(deployment.limits), snapshot.contract.states)
    return job, answer, explain(job, lane, answer), engine.logits


def search(job, logits):
    """Beam search by loops under `mask: trie [and not seen]`: per step counts, ranks, and every item's fate."""
    vocab = job.snapshot.vocab
    sids = [tuple(map(int, sid)) for sid in vocab.codes]
    out = set() if job.excluded is None else set(job.excluded.items.tolist())
    seen = set() if job.seen is None else set(job.seen.items.tolist())
    beams, steps, fate = [((), 0.0)], [], {}
    for t, table in enumerate(logits, 1):
        counts, pool = dict.fromkeys(("trie", "exclude", "seen"), 0), []
        for at, (prefix, score) in enumerate(beams):
            norm = math.log(sum(math.exp(one) for one in table[at]))
            for code in range(SIZES[t - 1]):
                whole = (*prefix, code)
                below = {item for item, sid in enumerate(sids) if sid[:t] == whole}
                why = "trie" if not below else "exclude" if below <= out else "seen" if below <= seen else None
                if why:
                    counts[why] += 1
                    fate |= {item: (t, why) for item in below if item not in fate}
                else:
                    pool.append((score + table[at][code] - norm, at, code, whole, below))
        pool.sort(key=lambda one: (-one[0], one[1], one[2]))
        kept, lost = pool[: job.plan.widths[t - 1]], pool[job.plan.widths[t - 1] :]
        for place, (rank, _, _, _, below) in enumerate(lost, len(kept) + 1):
            fate |= {item: (t, "width", rank, kept[-1][0], place, len(kept)) for item in below}
        counts["width"] = len(lost)
        ranks = (kept[0][0], kept[-1][0]) if kept else (None, None)
        steps.append((t, len(beams), len(beams) * SIZES[t - 1], len(pool), counts, len(kept), *ranks))
        beams = [(whole, rank) for rank, _, _, whole, _ in kept]
    return steps, fate


@pytest.mark.parametrize(
    ("policy", "exclude"),
    [("base", ()), ("narrow", ()), ("narrow", ("i1", "i2", "i3", "i4")), ("unseen", ()), ("unseen", ("i0", "i5"))],
)
def test_counts_cuts_and_fates_are_those_of_a_search_by_loops(world, policy, exclude):
    everything = tuple(f"i{item}" for item in range(40))
    job, answer, told, logits = explained(world, policy, everything[1:30:3], exclude=exclude, k=40, explain=everything)
    assert told.mismatch is None
    steps, fates = search(job, logits)
    for mine, (t, parents, candidates, legal, removed, kept, best, cut) in zip(told.steps, steps, strict=True):
        assert mine[:4] == (t, parents, candidates, legal)
        assert mine.removed == {phase: count for phase, count in removed.items() if count}
        assert (mine.kept, mine.planned) == (kept, job.planned[t])
        assert mine.best == pytest.approx(best, abs=1e-4)
        assert mine.cut == pytest.approx(cut, abs=1e-4)
    listed = [f"i{item}" for item in answer.items.tolist()]
    for one in told.items:
        fate = fates.get(int(one.id[1:]))
        if one.id in exclude:
            assert one.result == "excluded"
        elif fate is None:
            assert (one.result, one.place, one.kept) == ("listed", listed.index(one.id) + 1, len(listed))
            assert one.rank == pytest.approx(float(answer.scores[one.place - 1]))
        elif fate[1] == "width":
            t, _, rank, cut, place, kept = fate
            assert (one.result, one.step, one.phase, one.place, one.kept) == ("cut", t, "width", place, kept)
            assert (one.rank, one.cut) == (pytest.approx(rank, abs=1e-4), pytest.approx(cut, abs=1e-4))
        else:
            assert (one.result, one.step, one.phase) == ("masked", *fate)
    assert {one.result for one in told.items} >= {"listed"} | ({"cut"} if policy != "base" else set())


@pytest.mark.parametrize("policy", [*POLICIES, "base"])
def test_every_candidate_is_kept_or_has_a_phase_that_removed_it(world, policy):
    job, answer, told, _ = explained(world, policy, k=30, explain=tuple(f"i{item}" for item in range(40)))
    assert told.mismatch is None
    for step in told.steps:
        assert step.candidates == step.kept + sum(step.removed.values())
        assert step.kept <= min(step.planned, step.legal) <= step.candidates
        assert min(step.removed.values(), default=1) > 0
    listed = [one.id for one in told.items if one.result == "listed"]
    assert sorted(listed) == sorted(job.snapshot.vocab.ids(answer.items))
    assert all(one.place > one.kept for one in told.items if one.phase in ("width", "k"))


def fate(told, item):
    return next(one for one in told.items if one.id == item)


def test_phases_of_every_kind_are_named(world):
    everything = tuple(f"i{item}" for item in range(40))
    phases = {}
    for policy in POLICIES:
        _, _, told, _ = explained(world, policy, everything[::2], k=3, explain=everything)
        phases[policy] = {one.phase for one in told.items if one.phase}
        phases[policy] |= {phase for step in told.steps for phase in step.removed}
    assert "quota" in phases["capped"]
    assert {"keep", "prune"} <= phases["thin"]
    assert "limit" in phases["short"]
    assert "mask" in phases["odd"]
    assert "seen" in phases["unseen"]
    assert "trie" not in phases["open"]


def test_unknown_taken_down_and_excluded_items_say_so(world):
    snapshot, deployment = world
    gone = DeadNodes.of(snapshot.vocab, np.array([4]))
    down = replace(snapshot, takedowns=NOTHING, gone=gone)
    _, _, told, _ = explained((down, deployment), "base", exclude=("i9",), explain=("318", "i4", "i9"))
    assert [one.result for one in told.items] == ["unknown", "taken_down", "excluded"]


def test_a_list_that_is_too_short_names_k_limit_or_the_sids_other_items(world):
    snapshot, deployment = world
    _, answer, told, _ = explained(world, "base", k=2, explain=tuple(f"i{item}" for item in range(40)))
    beyond = [one for one in told.items if one.result == "final"]
    assert {one.phase for one in beyond} == {"k"}
    assert sorted(one.place for one in beyond) == list(range(3, 41))
    assert all(one.rank <= one.cut == pytest.approx(float(answer.scores[1])) for one in beyond)
    twins = support.catalogue(np.repeat(support.random_sids(SIZES, 20), 2, axis=0), SIZES)
    double = support.snapshot_of(snapshot.engine, twins, deployment)
    _, _, told, _ = explained((double, deployment), "base", k=40, explain=("i0", "i1"))
    assert [(one.result, one.phase) for one in told.items] == [("listed", None), ("final", "expand")]


FINAL = """\
final:
  expand: sid(max_items=2)
  mask: item.stock < 3
  score: score + log(item.stock)
  dedupe: item.stock
  quota:
    - cap(item.studio, max=1)
  rerank: mmr(weight=1, pool=2)
  limit: 1
"""


def final_fates(final, k=40):
    deployment, made = with_columns(final)
    job = support.job_of(made, deployment, ("i3",), k=k)
    [answer] = support.run_batch([job])
    job = replace(job, request=replace(job.request, explain=tuple(f"i{item}" for item in range(40))))
    lane = TRANSITIONS["ancestry"](made.engine.new_arena(deployment.limits), made.contract.states)
    told = explain(job, lane, answer)
    assert told.mismatch is None
    numbers = made.vocab.find([one.id for one in told.items]).tolist()
    there = {item: one for item, one in zip(numbers, told.items, strict=True) if one.result in ("final", "listed")}
    return made, answer, there


def test_what_left_the_list_names_the_phase_of_final_its_rule_and_its_place():
    made, _, fates = final_fates(FINAL)
    rules = {
        "mask": "item.stock < 3", "numbers": "score + log(item.stock)", "dedupe": "item.stock",
        "quota": "cap(item.studio, 1)", "rerank": "mmr(1, 2)", "limit": "1", "expand": "sid(2)",
    }  # fmt: skip
    columns = item_columns(made.vocab, {"item.stock", "item.studio"}, np.arange(40), made.side)
    stock, studio = columns["item.stock"], columns["item.studio"]
    for item, one in fates.items():
        if one.result == "listed":
            continue
        assert (
            one.rule.replace("max=", "").replace("weight=", "").replace("pool=", "").replace("max_items=", "")
            == rules[one.phase]
        ), one
        if one.phase != "expand":
            masked = not stock[item] < 3  # a number that is not there is NaN, and not below 3
            assert (one.phase == "mask") == masked
            assert (one.phase == "numbers") == (not masked and stock[item] == 0)
        assert (one.rank is None) == (one.place is None) == (one.phase in ("mask", "numbers", "expand"))
    # who shares the number of a better item left by `dedupe`, whose group was full by `quota`
    [best] = [item for item, one in fates.items() if one.result == "listed"]
    for item, one in fates.items():
        if one.phase == "dedupe":
            better = [n for n, other in fates.items() if other.rank is not None and other.rank > one.rank]
            assert any(stock[n] == stock[item] for n in better)
        if one.phase == "quota":
            assert studio[item] == studio[best]
    assert {one.phase for one in fates.values()} >= {"mask", "numbers", "dedupe"}


@pytest.mark.parametrize(
    ("final", "phase", "rule"),
    [
        ("final:\n  mask: not seen\n  rerank: mmr(weight=1, pool=3)\n", "rerank", "mmr(weight=1, pool=3)"),
        ("final:\n  score: 2 * score\n  limit: 4\n", "limit", "4"),
        ("final:\n  quota:\n    - cap(item.studio, max=1)\n", "quota", "cap(item.studio, max=1)"),
    ],
)
def test_the_first_of_the_left_out_stands_right_behind_the_list(final, phase, rule):
    _, answer, fates = final_fates(final)
    out = [one for one in fates.values() if one.phase == phase]
    assert out
    assert {one.rule for one in out} == {rule}
    places = {one.place for one in out}
    if phase != "quota":
        assert places == set(range(len(answer.items) + 1, len(answer.items) + 1 + len(out)))
    assert all(one.rank <= answer.scores[0] for one in out)


def test_another_answer_is_a_mismatch(world):
    job, answer, told, _ = explained(world, "base", k=5)
    lane = TRANSITIONS["ancestry"](job.snapshot.engine.new_arena(world[1].limits), job.snapshot.contract.states)
    swapped = Ranked(answer.items[::-1].copy(), answer.scores, answer.sids[::-1].copy())
    assert told.mismatch is None
    assert explain(job, lane, swapped).mismatch.startswith("run alone, 0 of 5 items are not those of the answer")
    other = Ranked(answer.items + 100, answer.scores, answer.sids)
    assert explain(job, lane, other).mismatch.startswith("run alone, 5 of 5 items")


async def test_an_explained_request_has_the_answer_of_the_same_request_and_its_mates_never_wait_for_it():
    async with started(POLICIES) as world:

        async def ask(n, **fields):
            return await world.ask(f"i{n}", k=4, policy="narrow", **fields).outcome()

        plain = await asyncio.gather(*(ask(n) for n in range(4)))
        world.gate.batches.clear()
        order = []

        async def noted(n, **fields):
            outcome = await ask(n, **fields)
            order.append(n)
            return outcome

        asked = await asyncio.gather(*(noted(n, **({"explain": ("i3",)} if n == 1 else {})) for n in range(4)))
        assert world.gate.batches == [4, 1]  # the batch, then the explained request alone
        assert order == [0, 2, 3, 1]
        assert [one.items for one in asked] == [one.items for one in plain]
        assert [one.explanation is not None for one in asked] == [False, True, False, False]
        assert [one.id for one in asked[1].explanation.items] == ["i3"]
        assert asked[1].explanation.mismatch is None
        assert asked[1].timings.total < 60_000
        assert world.sample("widebeam_explained_total", result="equal") == 1
        assert world.sample("widebeam_explained_total", result="mismatch") == 0


async def test_a_batch_that_waits_goes_before_the_explanation():
    async with started() as world:
        held = await world.busy()
        explained = world.ask("i2", explain=())
        after = [world.ask("i3") for _ in range(20)]  # more than a batch holds
        world.gate.open.set()
        await asyncio.gather(*(ticket.outcome() for ticket in (held, explained, *after)))
        assert world.gate.batches == [1, 16, 5, 1]


async def test_more_than_the_bound_is_refused_and_served_without():
    async with started() as world:
        tickets = [world.ask("i1", explain=()) for _ in range(2)]
        with pytest.raises(ExplainBusy) as error:  # in the same turn: the second's budget has not come back
            world.ask("i1", explain=())
        assert error.value.retry_after_s == 1
        for ticket in tickets:
            assert (await ticket.outcome()).explanation is not None
        assert (await world.ask("i1").outcome()).explanation is None
        with pytest.raises(InvalidRequest):  # a bad request costs no explanation and gets its own error
            world.ask("i1", explain=(), k=0)


async def test_a_deployment_may_explain_nothing():
    deployment = support.deployment_of(SIZES)
    server = msgspec.structs.replace(deployment.server, explain_per_s=0.0)
    silent = msgspec.structs.replace(deployment, server=server)
    runtime = Runtime(silent, Metrics(), make_log(io.BytesIO()), lambda: 0.0)
    try:
        with pytest.raises(InvalidRequest) as error:
            runtime._explainer.take(Request("r", HistoryIds(()), k=1, explain=()))
        assert error.value.path == "$.explain"
    finally:
        runtime.close()


async def test_a_client_that_leaves_while_its_answer_is_explained_costs_nothing_more():
    async with started() as world:
        ticket = world.ask("i1", explain=())
        await asyncio.sleep(0)  # its batch starts
        held = world.ask("i2")
        ticket.cancel()
        with pytest.raises(Cancelled):
            await ticket.outcome()
        await held.outcome()


async def test_a_run_that_gives_something_else_says_so_and_is_counted(monkeypatch):
    async with started() as world:
        real = StepLoop.explain

        def turned(self, job, answer):
            return real(self, job, replace(answer, items=answer.items[::-1].copy()))

        monkeypatch.setattr(StepLoop, "explain", turned)
        outcome = await world.ask("i1", explain=()).outcome()
        assert outcome.explanation.mismatch is not None
        assert world.sample("widebeam_explained_total", result="mismatch") == 1
        assert b"explain_mismatch" in world.logged.getvalue()


async def test_a_failure_of_ours_ends_the_request_and_not_the_loop(monkeypatch):
    async with started() as world:
        monkeypatch.setattr("app.runtime.steps.explain", lambda *_: 1 / 0)
        with pytest.raises(Exception, match="ZeroDivisionError"):
            await world.ask("i1", explain=()).outcome()
        assert (await world.ask("i1").outcome()).items
        assert world.sample("widebeam_explained_total", result="failed") == 1
