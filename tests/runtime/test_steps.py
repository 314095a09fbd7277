"""The step loop end to end on small random models: exhaustive search, batches, and what it may not do."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.core import StateSpec
from app.engine.families.onerec_config import parse
from app.engine.families.onerec_reference import OneRecReference, pad_history
from app.engine.graphs import most_rows
from app.errors import Cancelled, Fault, ModelOutput
from app.ops import cuda
from app.ops.selection import select_top
from app.runtime import selection, steps
from app.runtime.job import Batch
from app.runtime.metrics import Metrics
from app.runtime.state import TRANSITIONS
from app.runtime.steps import StepLoop
from tests import support
from tests.engine.replayed import Replays

SIZES = (4, 5, 6)
EPS = 1e-4


def world(sizes=SIZES, items=40, policies=None, **limits):
    deployment = support.deployment_of(sizes, **limits)
    engine = support.onerec_engine(sizes, deployment.limits)
    vocab = support.catalogue(support.random_sids(sizes, items), sizes)
    return deployment, vocab, support.snapshot_of(engine, vocab, deployment, policies)


def widths(*values):
    return f"widebeam: 1\nwidths: {list(values)}\n"


def item_scores(vocab, history, normalize="full", sizes=SIZES):
    """[items] every item's score by the model's own definition: no beams, no caches, no trie."""
    raw = support.onerec_config(sizes)
    config = parse(raw)
    reference = OneRecReference(config).eval()
    reference.load_state_dict(support.onerec_weights(raw))
    codes = torch.from_numpy(vocab.sids(vocab.find(history))).long().reshape(-1, len(sizes))
    sids = torch.from_numpy(vocab.codes).long()
    with torch.no_grad():
        steps = reference(pad_history([codes], config.history), sids[None, :, :-1])
    scores = torch.zeros(len(vocab), dtype=torch.float64)
    for t, step in enumerate(steps):
        logits = step[0].double()
        if normalize == "valid":
            legal = torch.zeros(logits.shape, dtype=torch.bool)
            for row, sid in enumerate(sids):
                legal[row, sids[(sids[:, :t] == sid[:t]).all(1), t]] = True
            logits.masked_fill_(~legal, -torch.inf)
        scores += torch.log_softmax(logits, 1)[torch.arange(len(sids)), sids[:, t]]
    return scores.numpy()


def assert_ranking(ranked, scores):
    """The same items as sorting by `scores`, in the same order but for near-ties."""
    best = np.sort(scores)[::-1][: len(ranked.items)]
    np.testing.assert_allclose(ranked.scores, best, atol=EPS)
    np.testing.assert_allclose(scores[ranked.items], best, atol=EPS)
    assert len(set(ranked.items.tolist())) == len(ranked.items)


@pytest.mark.parametrize("normalize", ["full", "valid", "step"])
@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("history", [(), ("i3",), tuple(f"i{n}" for n in range(30))])
def test_a_beam_that_holds_everything_is_the_exhaustive_search(history, transition, normalize):
    text = f"widebeam: 1\nsteps:\n  all:\n    normalize: {normalize}\n"
    deployment, vocab, snapshot = world(policies={"p": text})
    job = support.job_of(snapshot, deployment, history, policy="p", k=100)
    (ranked,) = support.run_batch([job], transition)
    assert len(ranked.items) == len(vocab)
    assert_ranking(ranked, item_scores(vocab, history, "valid" if normalize == "valid" else "full"))
    assert np.array_equal(ranked.sids, vocab.sids(ranked.items))


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 64])
def test_an_items_score_does_not_depend_on_the_width(width):
    deployment, vocab, snapshot = world(policies={"p": widths(width, width, width)})
    job = support.job_of(snapshot, deployment, ("i1", "i2"), policy="p", k=width)
    (ranked,) = support.run_batch([job])
    scores = item_scores(vocab, ("i1", "i2"))
    np.testing.assert_allclose(ranked.scores, scores[ranked.items], atol=EPS)
    assert (np.diff(ranked.scores) <= 0).all()
    assert len(ranked.items) == min(width, len(vocab))


def test_a_thinned_catalogue_leaves_an_items_score_alone():
    deployment, vocab, snapshot = world()
    scores = item_scores(vocab, ("i5",))
    codes = vocab.codes
    for item in range(0, len(vocab), 5):
        first = codes[:, 0] == codes[item, 0]
        others = [np.flatnonzero(codes[:, 0] == c)[0] for c in np.unique(codes[~first, 0])]
        kept = np.sort(np.concatenate((np.flatnonzero(first), others)).astype(int))
        thin = support.catalogue(codes[kept], SIZES, [vocab.id(k) for k in kept])
        thinned = support.snapshot_of(snapshot.engine, thin, deployment)
        # the history is the same items in both, whatever the catalogue still lists
        job = replace(
            support.job_of(thinned, deployment, (), k=100),
            inputs=support.job_of(snapshot, deployment, ("i5",)).inputs,
        )
        (ranked,) = support.run_batch([job])
        place = ranked.items.tolist().index(thin.find([vocab.id(item)])[0])
        assert math.isclose(ranked.scores[place], scores[item], abs_tol=EPS)


def test_batch_mates_do_not_change_an_answer():
    policies = {f"w{w}": widths(w, w, w) for w in (1, 7, 40)}
    deployment, _, snapshot = world(policies=policies)
    asked = [
        (history, policy, exclude)
        for history in ((), ("i1",), tuple(f"i{n}" for n in range(25)))
        for policy in policies
        for exclude in ((), ("i3", "i4"))
    ][:16]
    jobs = [support.job_of(snapshot, deployment, h, policy=p, exclude=e, k=50) for h, p, e in asked]
    alone = [support.run_batch([job])[0] for job in jobs]
    for together in (support.run_batch(jobs), support.run_batch(jobs[::-1])[::-1]):
        for one, many in zip(alone, together, strict=True):
            assert one.items.tolist() == many.items.tolist()
            np.testing.assert_allclose(one.scores, many.scores, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_both_transitions_give_the_same_answers(groups):
    deployment = support.deployment_of(SIZES)
    engine = support.onerec_engine(SIZES, deployment.limits, self_groups=groups)
    assert any(spec.first for spec in engine.state_specs()) == (groups == 2)
    vocab = support.catalogue(support.random_sids(SIZES, 40), SIZES)
    snapshot = support.snapshot_of(engine, vocab, deployment, {"narrow": widths(2, 3, 5)})
    jobs = [
        support.job_of(snapshot, deployment, h, policy=p, k=50) for h in ((), ("i1", "i9")) for p in ("base", "narrow")
    ]
    append, moved = support.run_batch(jobs, "ancestry"), support.run_batch(jobs, "compaction")
    for one, other in zip(append, moved, strict=True):
        assert one.items.tolist() == other.items.tolist()
        np.testing.assert_array_equal(one.scores, other.scores)


class Spy:
    """An engine that notes how many rows each step decodes."""

    def __init__(self, engine):
        self._engine, self.decoded = engine, []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self, t, rows, arena):
        self.decoded.append((t, len(rows.codes)))
        return self._engine.step(t, rows, arena)


def test_mixed_widths_decode_exactly_the_planned_rows_in_one_call_a_step():
    sizes = (40, 40, 40)
    policies = {f"w{w}": widths(w, w, w) for w in (1, 7, 200, 512)}
    deployment, _, snapshot = world(sizes, 3000, policies, widths=(512,) * 3)
    spy = Spy(snapshot.engine)
    snapshot = replace(snapshot, engine=spy)
    jobs = [support.job_of(snapshot, deployment, ("i1",), policy=p, k=5) for p in policies]
    support.run_batch(jobs)
    prefixes = snapshot.vocab.trie.prefixes
    first = [min(w, 40) for w in (1, 7, 200, 512)]
    second = [min(w, f * 40, prefixes[2]) for w, f in zip((1, 7, 200, 512), first, strict=True)]
    assert spy.decoded == [(1, 4), (2, sum(first)), (3, sum(second))]
    assert sum(second) == 1 + 7 + 200 + 512


def test_eight_policies_of_four_structures_cost_one_decode_call_a_step():
    masks = ["trie", "trie and not seen"]
    scores = ["parent + logp", "parent + 0.5 * logp"]
    policies = {
        f"p{n}": f"widebeam: 1\nwidths: {[n + 1, 2 * n + 2, 3 * n + 3]}\nsteps:\n  all:\n"
        f"    mask: {masks[n % 2]}\n    score: {scores[n // 2 % 2]}\n"
        for n in range(8)
    }
    deployment, _, snapshot = world(policies=policies)
    assert len({snapshot.policies.plan(name).structure.id for name in policies}) == 4
    spy = Spy(snapshot.engine)
    jobs = [support.job_of(replace(snapshot, engine=spy), deployment, ("i1",), policy=p, k=9) for p in policies]
    together = support.run_batch(jobs)
    assert [t for t, _ in spy.decoded] == [1, 2, 3]
    for job, many in zip(jobs, together, strict=True):
        (alone,) = support.run_batch([job])
        assert alone.items.tolist() == many.items.tolist()


class NoBigTensor(TorchDispatchMode):
    """Fails on a tensor of exactly `elements` elements, and notes every write into `state`."""

    def __init__(self, state, elements):
        super().__init__()
        self.storage = {t.untyped_storage().data_ptr(): name for name, t in state.items()}
        self.elements, self.touched = elements, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor):
                assert leaf.numel() not in self.elements, f"{func} handles {list(leaf.shape)}"
                if leaf.untyped_storage().data_ptr() in self.storage:
                    self.touched.append((str(func), self.storage[leaf.untyped_storage().data_ptr()]))
        return out


def no_codes(rows):
    return torch.zeros(rows, 0, dtype=torch.int64)


def test_the_append_only_transition_never_touches_the_state():
    deployment, _, snapshot = world()
    arena = snapshot.engine.new_arena(deployment.limits)
    transition = TRANSITIONS["ancestry"](arena, snapshot.contract.states)
    transition.open(3, torch.device("cpu"))
    with NoBigTensor(arena, ()) as watch:
        sids = transition.advance(1, torch.tensor([0, -1, 2, 1]), torch.tensor([5, -1, 7, 6]), no_codes(3)).sids
        written = transition.advance(2, torch.tensor([3, 1]), torch.tensor([1, 2]), sids)
    assert watch.touched == []
    assert written.sids.tolist() == [[6, 1], [0, 2]]
    assert written.codes.tolist() == [1, 2]
    assert transition.ancestry()[0].tolist() == [[1, 3], [0, 1]]
    with NoBigTensor(arena, ()) as watch:
        moving = TRANSITIONS["compaction"](arena, snapshot.contract.states)
        moving.open(3, torch.device("cpu"))
        moving.advance(1, torch.tensor([0, -1, 2, 1]), torch.tensor([5, -1, 7, 6]), no_codes(3))
    assert {name for _, name in watch.touched} == {s.name for s in snapshot.contract.states if s.scope == "row"}


def test_compaction_moves_what_later_steps_read_and_leaves_the_rest():
    states = (
        StateSpec("whole", (3, 2), torch.float32, "row"),
        StateSpec("part", (3, 2), torch.float32, "row", first=1),
    )
    arena = {state.name: torch.randn(2, 8, 3, 2) for state in states}
    moving = TRANSITIONS["compaction"](arena, states)
    standby = moving._buffers[1]
    for state in states:
        standby[state.name].fill_(7.0)
    moving.open(3, torch.device("cpu"))
    parent = torch.tensor([2, 0, 2, 1])
    moving.advance(1, parent, torch.tensor([4, 5, 6, 7]), no_codes(3))
    assert moving.arena is standby
    assert torch.equal(standby["whole"][0, :4], arena["whole"][0, parent])
    assert torch.equal(standby["part"][0, :4, 1:], arena["part"][0, parent, 1:])
    assert bool((standby["part"][:, :, :1] == 7).all())
    assert bool((standby["part"][1] == 7).all() & (standby["part"][0, 4:] == 7).all())


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator makes anew (a view of what is there already is none)."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, leaf.numel())
        return out


def test_the_context_is_never_gathered_per_row():
    sizes = (13, 17, 11)
    deployment, _, snapshot = world(sizes, 1000, {"w": widths(13, 37, 41)}, context=64)
    jobs = tuple(
        support.job_of(snapshot, deployment, tuple(f"i{n}" for n in range(20)), policy="w", k=5) for _ in range(3)
    )
    loop = StepLoop(lambda: 0.0, Metrics())
    loop.serve(Batch(jobs))  # allocates the arena
    with Largest() as seen:
        loop.serve(Batch(jobs))
    positions, heads, dim = snapshot.contract.states[1].shape[0], 2, 8
    rows = 3 * max(jobs[0].planned[:-1])
    assert 0 < seen.elements < rows * positions * heads * dim


def test_rows_shuffled_in_memory_give_the_same_answers(monkeypatch):
    deployment, _, snapshot = world(policies={"w": widths(4, 9, 12)})
    jobs = [support.job_of(snapshot, deployment, ("i1", "i2"), policy=p, k=12) for p in ("w", "base", "w")]
    plain = support.run_batch(jobs)
    generator = np.random.default_rng(1)

    def shuffled(rank, code, order, size, row_start, keep):
        best = select_top(rank, code, order, size, row_start, keep)
        stops = np.cumsum(keep)
        place = np.concatenate([stop - k + generator.permutation(k) for k, stop in zip(keep, stops, strict=True)])
        at = torch.from_numpy(place)
        return best._replace(parent=best.parent[at], column=best.column[at], order=best.order[at])

    monkeypatch.setattr(selection, "select_top", shuffled)
    for one, other in zip(plain, support.run_batch(jobs), strict=True):
        assert one.items.tolist() == other.items.tolist()
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-5)


def test_excluded_items_never_come_back_and_leave_their_place_to_others():
    deployment, vocab, snapshot = world(policies={"w": widths(5, 5, 5)})
    scores = item_scores(vocab, ("i1",))
    best = np.argsort(-scores)
    for width, policy in ((64, "base"), (5, "w")):
        gone = [vocab.id(item) for item in best[:30]]
        job = support.job_of(snapshot, deployment, ("i1",), policy=policy, exclude=tuple(gone), k=10)
        (ranked,) = support.run_batch([job])
        assert set(vocab.ids(ranked.items)).isdisjoint(gone)
        assert len(ranked.items) == min(10, width)
        if width == 64:
            assert_ranking(ranked, np.where(np.isin(np.arange(len(vocab)), best[:30]), -np.inf, scores))
    everything = support.job_of(snapshot, deployment, ("i1",), exclude=tuple(vocab.ids(range(len(vocab)))), k=10)
    assert len(support.run_batch([everything])[0].items) == 0


def test_seen_items_go_only_where_the_policy_says_so():
    unseen = "widebeam: 1\nsteps:\n  all:\n    mask: trie and not seen\n"
    deployment, vocab, snapshot = world(policies={"unseen": unseen})
    watched = tuple(vocab.ids(np.argsort(-item_scores(vocab, ()))[:12]))
    plain, masked = support.run_batch(
        [support.job_of(snapshot, deployment, watched, policy=p, k=100) for p in ("base", "unseen")]
    )
    assert set(watched) <= set(vocab.ids(plain.items))
    assert set(vocab.ids(masked.items)) == set(vocab.ids(range(len(vocab)))) - set(watched)


def test_fewer_items_than_asked_are_all_there_and_nothing_else():
    deployment = support.deployment_of(SIZES)
    engine = support.onerec_engine(SIZES, deployment.limits)
    for sids in ([[1, 2, 3], [3, 2, 4]], [[0, 0, 0]], [[0, 1, 2], [0, 1, 3], [0, 2, 0]]):
        vocab = support.catalogue(np.array(sids), SIZES)
        snapshot = support.snapshot_of(engine, vocab, deployment)
        (ranked,) = support.run_batch([support.job_of(snapshot, deployment, (), k=50)])
        assert sorted(map(tuple, ranked.sids.tolist())) == [tuple(sid) for sid in sids]
        assert np.isfinite(ranked.scores).all()


def test_tombstones_stay_dead_under_a_score_that_forgets_its_parent():
    forgets = "widebeam: 1\nwidths: [2, 30, 30]\nsteps:\n  all:\n    score: logp\n"
    sids = np.array([[0, 0, 0], [0, 1, 0], [1, 2, 3], [2, 0, 0], [3, 0, 0], [3, 4, 5]])
    deployment = support.deployment_of(SIZES)
    engine = support.onerec_engine(SIZES, deployment.limits)
    vocab = support.catalogue(sids, SIZES)
    snapshot = support.snapshot_of(engine, vocab, deployment, {"p": forgets})
    job = support.job_of(snapshot, deployment, ("i1",), policy="p", k=30)
    assert job.planned == (1, 2, 6, 6)  # at most three items lie below any two first codes: the rest are tombstones
    (ranked,) = support.run_batch([job])
    firsts = {sid[0] for sid in ranked.sids.tolist()}
    assert len(firsts) == 2
    assert len(ranked.items) == sum(sid[0] in firsts for sid in sids.tolist())
    assert len(set(ranked.items.tolist())) == len(ranked.items)


def test_items_that_share_an_sid_come_in_their_order_of_preference():
    deployment = support.deployment_of(SIZES)
    engine = support.onerec_engine(SIZES, deployment.limits)
    sids = np.array([[0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1], [2, 2, 2]])
    vocab = support.catalogue(sids, SIZES, ["a", "b", "c", "d", "e"])
    two = "widebeam: 1\nfinal:\n  expand: sid(max_items=2)\n  limit: 10\n"
    snapshot = support.snapshot_of(engine, vocab, deployment, {"two": two})

    def ids(**fields):
        (ranked,) = support.run_batch([support.job_of(snapshot, deployment, (), k=10, **fields)])
        return vocab.ids(ranked.items)

    assert sorted(ids()) == ["a", "d", "e"]
    assert sorted(ids(exclude=("a",))) == ["b", "d", "e"]
    assert sorted(ids(exclude=("a", "b", "c"))) == ["d", "e"]
    assert sorted(ids(policy="two")) == ["a", "b", "d", "e"]
    assert sorted(ids(policy="two", exclude=("b",))) == ["a", "c", "d", "e"]


def test_requests_leave_at_the_next_step_and_the_others_do_not_notice():
    deployment, _, snapshot = world()
    spy = Spy(snapshot.engine)
    snapshot = replace(snapshot, engine=spy)
    stays = support.job_of(snapshot, deployment, ("i1",), k=5)

    class Leaves:
        asked = 0

        def gone(self, now):
            Leaves.asked += 1
            return Cancelled("the client left") if Leaves.asked >= 2 else None

    goes = replace(support.job_of(snapshot, deployment, ("i2",), k=5), ticket=Leaves())
    served = StepLoop(lambda: 0.0, Metrics()).serve(Batch((goes, stays)))
    assert [type(end.result).__name__ for end in served] == ["Cancelled", "Ranked"]
    assert spy.decoded[:2] == [(1, 2), (2, sum((goes.planned[1], stays.planned[1])))]
    assert spy.decoded[2] == (3, stays.planned[2])
    (alone,) = support.run_batch([stays])
    assert alone.items.tolist() == served[1].result.items.tolist()


def test_a_model_that_writes_nonsense_fails_that_request_alone():
    deployment, _, snapshot = world()
    clean = support.run_batch([support.job_of(snapshot, deployment, ("i2",), k=50)])[0]

    class Bad(Spy):
        def step(self, t, rows, arena):
            output = self._engine.step(t, rows, arena)
            if t < 2:
                return output
            logits = output.logits.clone()
            logits[rows.request == 0, 0] = torch.nan  # one code in five
            return output._replace(logits=logits)

    bad = replace(snapshot, engine=Bad(snapshot.engine))
    jobs = [support.job_of(bad, deployment, ("i1",), k=50), support.job_of(bad, deployment, ("i2",), k=50)]
    metrics = Metrics()
    served = {id(end.job): end.result for end in StepLoop(lambda: 0.0, metrics).serve(Batch(tuple(jobs)))}
    assert isinstance(served[id(jobs[0])], ModelOutput)
    assert "step 2 " in served[id(jobs[0])].message, "the first of them"
    assert served[id(jobs[1])].items.tolist() == clean.items.tolist()
    np.testing.assert_allclose(served[id(jobs[1])].scores, clean.scores, atol=1e-5)
    assert metrics.registry.get_sample_value("widebeam_bad_scores_total", {"stage": "logits"}) > 0


def test_an_answer_does_not_depend_on_where_its_rows_lie(monkeypatch):
    deployment, _, snapshot = world()
    jobs = [support.job_of(snapshot, deployment, ("i1",), k=50), support.job_of(snapshot, deployment, ("i2",), k=50)]
    right = steps.rank_items

    def ranked(place):
        def tied(jobs, found, *how):
            found = found._replace(score=found.score.masked_fill(found.score > -torch.inf, 0))  # search order decides
            rows = torch.cat([place(b - a) + a for a, b in pairwise(found.row_start)])
            return right(jobs, found._replace(**{name: getattr(found, name)[rows] for name in found._fields[1:]}), *how)

        monkeypatch.setattr(steps, "rank_items", tied)
        return support.run_batch(jobs)

    for one, other in zip(ranked(torch.randperm), ranked(torch.arange), strict=True):
        assert one.items.tolist() == other.items.tolist()
        assert one.sids.tolist() == other.sids.tolist()


def test_a_batch_is_served_by_captured_steps_where_there_are_some():
    policies = {f"w{w}": widths(w, w, w) for w in (1, 7, 40)}
    deployment, _, snapshot = world(policies=policies)
    recorder, metrics = Replays(), Metrics()
    loop = StepLoop(lambda: 0.0, metrics, recorder=lambda _: recorder)
    taken = loop.prepare(snapshot)
    assert taken.graphs == recorder.recorded > 0
    assert metrics.registry.get_sample_value("widebeam_compiles_total", {"where": "background"}) == taken.graphs
    for policy in policies:
        jobs = [support.job_of(snapshot, deployment, h, policy=policy, k=50) for h in ((), ("i1",), ("i2", "i3"))]
        expected = support.run_batch(jobs)
        found = {id(end.job): end.result for end in loop.serve(Batch(tuple(jobs)))}
        for job, one in zip(jobs, expected, strict=True):
            assert found[id(job)].items.tolist() == one.items.tolist()
            np.testing.assert_allclose(found[id(job)].scores, one.scores, atol=1e-5)
    assert recorder.recorded == taken.graphs, "nothing is captured on the way"
    assert recorder.replayed == 3 * len(policies)
    moved = StepLoop(lambda: 0.0, metrics, "compaction", recorder=lambda _: recorder)
    assert moved.prepare(snapshot).graphs == 0, "state that moves from buffer to buffer has no fixed place"


def test_one_engine_under_two_contracts_replays_into_the_state_memory_of_each():
    deployment, _, snapshot = world(policies={"w": widths(7, 7, 7)})
    other = replace(snapshot, contract=replace(snapshot.contract, id="another"))
    recorders = [Replays(), Replays()]
    made = iter(recorders)
    loop = StepLoop(lambda: 0.0, Metrics(), recorder=lambda _: next(made))
    assert loop.prepare(snapshot).graphs == loop.prepare(other).graphs > 0
    [expected] = support.run_batch([support.job_of(snapshot, deployment, ("i1",), policy="w", k=7)])
    for turn, mine in enumerate((snapshot, other, snapshot)):
        theirs = other if mine is snapshot else snapshot
        kept = loop._lanes[theirs.contract.id].transition.arena
        before = {name: tensor.clone() for name, tensor in kept.items()}
        [end] = loop.serve(Batch((support.job_of(mine, deployment, ("i1",), policy="w", k=7),)))
        assert end.result.items.tolist() == expected.items.tolist()
        assert all(torch.equal(kept[name], tensor) for name, tensor in before.items())
        assert [one.replayed for one in recorders] == [[3, 0], [3, 3], [6, 3]][turn]


def test_algorithms_of_products_are_chosen_by_the_largest_steps_and_before_anything_is_served(monkeypatch):
    deployment, _, snapshot = world()
    ran, recorder = [], Replays()

    def choose(runs):
        assert recorder.recorded == 0, "graphs hold what was chosen"
        ran.append([run().logits.shape for run in runs])
        return ("the choices",)

    monkeypatch.setattr(steps, "choose", choose)
    loop = StepLoop(lambda: 0.0, Metrics(), recorder=lambda _: recorder)
    most = most_rows(deployment.limits, SIZES)
    assert loop.prepare(snapshot).choices == ("the choices",)
    assert ran == [list(zip(most, SIZES, strict=True))]
    loop.serve(Batch((support.job_of(snapshot, deployment, (), k=5),)))
    assert loop.prepare(snapshot).choices == ()
    assert len(ran) == 1
    assert StepLoop(lambda: 0.0, Metrics()).prepare(snapshot).choices == (), "without graphs there is nothing to run"


class Kernels(Spy):
    """An engine whose every step launches a kernel, which is compiled where nobody has launched it before."""

    def step(self, t, rows, arena):
        cuda._MODULES.load(cuda.Build.of(Path("kernel.cu"), T=t), 0)
        return self._engine.step(t, rows, arena)


@pytest.fixture
def kernels(monkeypatch):
    """A batch of an engine with kernels, in a process that has compiled nothing."""
    monkeypatch.setattr(cuda, "_MODULES", cuda._Modules())
    monkeypatch.setattr(cuda, "_from_source", lambda build, device: "a module")
    deployment, _, snapshot = world()
    snapshot = replace(snapshot, engine=Kernels(snapshot.engine))
    return Batch((support.job_of(snapshot, deployment, ("i1",), k=5),))


def compiles(metrics):
    """On the request path, and beside it."""
    found = [
        metrics.registry.get_sample_value("widebeam_compiles_total", {"where": w}) for w in ("request", "background")
    ]
    return tuple(found)


def test_what_a_batch_makes_on_its_way_is_counted_and_only_that(kernels):
    metrics = Metrics()
    loop = StepLoop(lambda: 0.0, metrics, recorder=lambda _: None)
    loop.serve(kernels)
    assert compiles(metrics) == (3, 0)
    loop.serve(kernels)
    assert compiles(metrics) == (3, 0)  # they are there


def test_a_prepared_batch_makes_nothing_on_its_way(kernels):
    metrics = Metrics()
    loop = StepLoop(lambda: 0.0, metrics, recorder=lambda _: Replays())
    taken = loop.prepare(kernels.jobs[0].snapshot)  # each step runs once
    assert compiles(metrics) == (0, taken.graphs + 3)
    for _ in range(3):
        loop.serve(kernels)
    assert compiles(metrics) == (0, taken.graphs + 3)


def test_what_another_thread_makes_beside_a_batch_is_not_the_batchs(kernels, monkeypatch):
    metrics, rank = Metrics(), steps.rank_items

    def beside(*given):
        other = threading.Thread(target=cuda.ready, args=([cuda.Build.of(Path("other.cu"))], torch.device("cpu")))
        other.start()
        other.join()
        return rank(*given)

    monkeypatch.setattr(steps, "rank_items", beside)
    StepLoop(lambda: 0.0, metrics).serve(kernels)
    assert cuda.compilations() == 4
    assert compiles(metrics) == (3, 0)


def a_kernel(_loop, _snapshot, name):
    cuda._MODULES.load(cuda.Build.of(Path(name)), 0)
    return 1


def kernels_in_threads(_loop, _snapshot, name):
    return cuda.ready([cuda.Build.of(Path(name), N=n) for n in range(4)], torch.device("cpu"))


def graphs(loop, snapshot, name):
    return loop.prepare(replace(snapshot, contract=replace(snapshot.contract, id=name))).graphs


@pytest.mark.parametrize("make", [a_kernel, kernels_in_threads, graphs])
def test_what_is_made_where_lists_or_explanations_are_is_counted(make, kernels, monkeypatch):
    metrics, [job], made = Metrics(), kernels.jobs, []
    loop = StepLoop(lambda: 0.0, metrics, recorder=lambda _: Replays())
    before = loop.prepare(job.snapshot).graphs + 3
    for name in ("rank_items", "explain"):
        real = getattr(steps, name)

        def making(*given, name=name, real=real):
            made.append(make(loop, job.snapshot, name))
            return real(*given)

        monkeypatch.setattr(steps, name, making)
    [end] = loop.serve(kernels)
    assert compiles(metrics) == (made[0], before)
    loop.explain(job, end.result)
    assert compiles(metrics) == (sum(made), before)
    assert len(made) == 2
    assert min(made) > 0


def test_what_counts_as_made_on_the_request_path_is_in_the_metrics_help():
    [text] = [line for line in Metrics().render().decode().splitlines() if "# HELP widebeam_compiles_total" in line]
    assert text.endswith(
        " Modules of kernels compiled and CUDA graphs captured; `request`: by a thread that serves a batch or explains "
        "an answer, must stay 0; `background`: by any other"
    )


def test_another_vocab_or_policy_captures_nothing_and_another_weight_slot_does():
    deployment, vocab, snapshot = world(policies={"w": widths(7, 7, 7)})
    contract, engine = snapshot.contract, snapshot.engine
    other = support.catalogue(support.random_sids(SIZES, 60, seed=5), SIZES)
    edited = {"w": "widebeam: 1\nwidths: [9, 9, 9]\nsteps:\n  all:\n    score: parent + 0.5 * logp\n"}
    recorder, metrics = Replays(), Metrics()
    loop = StepLoop(lambda: 0.0, metrics, recorder=lambda _: recorder)
    each = loop.prepare(snapshot).graphs
    assert each == recorder.recorded > 0
    for catalogue, policies in ((other, {"w": widths(7, 7, 7)}), (vocab, edited), (other, edited), (vocab, {})):
        next_one = support.snapshot_of(engine, catalogue, deployment, policies)
        assert next_one.contract.id == contract.id
        assert loop.prepare(next_one).graphs == 0
        loop.serve(Batch((support.job_of(next_one, deployment, ("i1",), policy="w" if policies else "base", k=7),)))
        assert recorder.recorded == each
    assert compiles(metrics) == (0, each)
    weights = support.snapshot_of(support.onerec_engine(SIZES, deployment.limits, seed=1), vocab, deployment)
    assert weights.engine.addresses != engine.addresses
    assert loop.prepare(weights).graphs == each
    assert recorder.recorded == 2 * each
    assert compiles(metrics) == (0, 2 * each)


def test_bad_numbers_of_a_final_list_are_counted():
    deployment, _, snapshot = world()
    final = "widebeam: 1\nfinal:\n  score: score + log(position - 3)\n"
    made = support.snapshot_of(snapshot.engine, snapshot.vocab, deployment, {"odd": final})
    metrics = Metrics()
    job = support.job_of(made, deployment, ("i1",), k=10, policy="odd")
    [end] = StepLoop(lambda: 0.0, metrics).serve(Batch((job,)))
    assert np.isfinite(end.result.scores).all()
    assert end.result.bad == 3  # log of -2, -1 and 0
    assert metrics.registry.get_sample_value("widebeam_bad_scores_total", {"stage": "final"}) == 3


def test_a_bug_of_ours_ends_the_open_requests_and_not_the_loop():
    deployment, _, snapshot = world()

    class Broken(Spy):
        def step(self, t, rows, arena):
            raise RuntimeError("boom")

    job = support.job_of(replace(snapshot, engine=Broken(snapshot.engine)), deployment, (), k=5)
    loop = StepLoop(lambda: 0.0, Metrics())
    (end,) = loop.serve(Batch((job,)))
    assert isinstance(end.result, Fault)
    assert "boom" in end.result.message
    (end,) = loop.serve(Batch((support.job_of(snapshot, deployment, (), k=5),)))
    assert len(end.result.items) == 5
