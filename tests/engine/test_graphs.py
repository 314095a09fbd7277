"""Captured steps, as far as they need no GPU: buckets, the plan, padding, and whose graphs a slot finds again."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from app.config import Limits, SidConfig
from app.core import History, Rows
from app.engine.captures import KEPT, SPARE, Taken
from app.engine.families.token_model import TokenModel
from app.engine.graphs import Graphs, Shape, StaticRows, bucket, buckets, most_rows, plan
from app.engine.registry import family
from app.engine.slots import Slots
from app.engine.weights import load
from app.errors import Rejected
from app.runtime.contexts import batch_inputs
from tests import support
from tests.engine import hybrid, tiny
from tests.engine.replayed import Kept, Replays

LIMITS = Limits(widths=(16,) * 3, rows=64, batch=4, context=24)
CPU = torch.device("cpu")
WIDTHS = [7, 1, 11]  # 19 rows: one less than their bucket
KINDS = ["onerec", "qwen2", "qwen3", "qwen3_5"]


def write(kind, directory, seed=0):
    if kind == "qwen3_5":
        return hybrid.write(directory, seed=seed)
    if kind != "onerec":
        return tiny.write(directory, kind)
    config = support.onerec_config(tiny.SIZES)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(support.onerec_weights(config, seed), directory / "model.safetensors")
    return directory


def made(kind, directory, slots=None, **sid):
    sid = SidConfig(sizes=tiny.SIZES) if kind == "onerec" else SidConfig(sizes=tiny.SIZES, **sid)
    return load(directory, family(kind), sid, LIMITS, device=CPU, slots=slots)


def engine_of(kind, directory, slots=None):
    return made(kind, directory, slots, token_base=tiny.BASES, prefix=(2,))


def encoded(engine, kind):
    """An arena with the contexts of three requests."""
    arena = engine.new_arena(LIMITS)
    generator = torch.Generator().manual_seed(3)
    asked = [
        History(torch.randint(0, 5, (items, 3), generator=generator).numpy().astype("int32"))
        if kind == "onerec"
        else tiny.TokenIds(tuple(range(3, 3 + items)))
        for items in (4, 1, 5)
    ]
    prepared = [engine.prepare(one) for one in asked]
    engine.encode(batch_inputs(engine.input_specs(), prepared, CPU), arena)
    return arena


def rows_at(t, full=True, seed=0):
    """Rows of step t: every row has its own path."""
    generator = torch.Generator().manual_seed(seed)
    widths = [1] * len(WIDTHS) if t == 1 else WIDTHS
    n = sum(widths)
    code = torch.randint(0, tiny.SIZES[t - 2], (n,), generator=generator) if t > 1 else torch.zeros(n)
    request = torch.arange(len(widths)).repeat_interleave(torch.tensor(widths))
    start = torch.tensor([0, *torch.tensor(widths).cumsum(0).tolist()])
    own = torch.stack([request, *[torch.arange(n)] * (t - 2)], 1)[:, : t - 1]  # step 1 has a row a request
    return Rows(*(x.to(torch.int32) for x in (code, request, start, own)), compact=False, full=full)


def test_whose_rows_they_are_is_copied_when_others_say_so():
    static, shape = StaticRows((4, 20, 20), LIMITS.batch, CPU), Shape(3, 20, full=True)
    two, three, others = rows_at(2), rows_at(3), rows_at(3, seed=1)
    for t, rows in ((2, two), (3, three), (3, three._replace(codes=others.codes)), (3, others), (1, rows_at(1))):
        static.fill(t, rows)
        held, n, starts = static.view(shape._replace(t=t)), len(rows.codes), len(rows.row_start)
        for mine, given_ in zip(held[:4], rows[:4], strict=True):
            assert torch.equal(mine[: len(given_)], given_)
        assert held.row_start[starts:].tolist() == [n] * (LIMITS.batch + 1 - starts)
    same, writes = rows_at(3), []
    static.fill(3, same)
    copied = torch._foreach_copy_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", lambda into, given_: writes.append(len(into)) or copied(into, given_))
        for _ in range(2):
            static.fill(3, same._replace(codes=same.codes.clone(), ancestry=same.ancestry.clone()))
        static.fill(3, same._replace(request=same.request.clone()))
    assert writes == [2, 2, 4]


@given(st.integers(1, 40_000), st.integers(1, 40_000))
def test_a_bucket_holds_its_rows_and_is_an_eighth_larger_at_most(rows, most):
    rows = min(rows, most)
    found = bucket(rows, most)
    assert rows <= found <= min(most, max(rows, rows * 9 / 8))
    assert bucket(found, most) == found


@given(st.integers(1, 40_000))
def test_every_number_of_rows_has_its_bucket_among_the_buckets(most):
    known = list(buckets(most))
    assert known == sorted(set(known))
    assert known[-1] == most
    assert {bucket(rows, most) for rows in range(1, most + 1, max(1, most // 500))} <= set(known)
    assert all(after <= max(before + 1, before * 9 / 8) for before, after in pairwise(known))


def test_a_plan_has_every_bucket_that_the_limits_allow_the_largest_first():
    limits = Limits(widths=(512,) * 4, rows=16384, batch=32)
    assert most_rows(limits, (8192,) * 4) == (32, 16384, 16384, 16384)
    assert most_rows(limits, (20, 4, 3, 9)) == (32, 640, 2560, 7680)
    shapes = plan(limits, (8192,) * 4, first=1, log_norm=False)
    assert len(shapes) == 24 + 3 * 96
    assert shapes[0] == Shape(2, 16384, full=False)
    assert [shape.rows for shape in shapes] == sorted((shape.rows for shape in shapes), reverse=True)
    both = plan(limits, (8192,) * 4, first=2, log_norm=True)
    assert len(both) == 2 * 3 * 96
    assert {shape.t for shape in both} == {2, 3, 4}


@pytest.mark.parametrize("kind", KINDS)
def test_pad_rows_change_nothing_for_the_others(kind, tmp_path):
    engine = engine_of(kind, write(kind, tmp_path / "weights"))
    arena, padded = encoded(engine, kind), encoded(engine, kind)
    most = (4, 64, 64)
    for t in range(engine.first_step, 4):
        rows, static = rows_at(t), StaticRows(most, LIMITS.batch, CPU)
        n = len(rows.codes)
        static.fill(t, rows_at(t, seed=1))  # an earlier batch
        static.fill(t, rows)
        expected = engine.step(t, rows, arena)
        found = engine.step(t, static.view(Shape(t, 4 if t == 1 else 32, full=True)), padded)
        torch.testing.assert_close(found.logits[:n], expected.logits, rtol=1e-5, atol=1e-5)
        if expected.log_norm is not None:
            torch.testing.assert_close(found.log_norm[:n], expected.log_norm, rtol=1e-5, atol=1e-5)
        for spec in engine.state_specs():
            if spec.scope == "row" and t < 3:
                mine, other = padded[spec.name][t - 1, :n], arena[spec.name][t - 1, :n]
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_step_is_the_step(kind, tmp_path):
    engine, recorder = engine_of(kind, write(kind, tmp_path / "weights")), Replays()
    arena = encoded(engine, kind)
    graphs = Graphs(arena, LIMITS, tiny.SIZES, CPU, recorder)
    taken = graphs.prepare(engine)
    shapes = plan(LIMITS, tiny.SIZES, first=engine.first_step, log_norm=engine.log_norm)
    assert taken.graphs == recorder.recorded == recorder.alone == len(shapes)
    assert taken.bytes == 7 * len(shapes)
    other = encoded(engine, kind)
    for name, tensor in arena.items():
        tensor.copy_(other[name])
    for t in range(engine.first_step, 4):
        for full in (True, False):
            expected, found = engine.step(t, rows_at(t, full), other), graphs.step(engine, t, rows_at(t, full))
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
            assert (found.log_norm is None) == (expected.log_norm is None) == (not (full and engine.log_norm))


def test_rows_without_a_graph_are_not_replayed(tmp_path):
    engine = engine_of("onerec", write("onerec", tmp_path / "weights"))
    graphs = Graphs(encoded(engine, "onerec"), LIMITS, tiny.SIZES, CPU, Replays())
    assert graphs.step(engine, 2, rows_at(2)) is None  # nothing was captured
    graphs.prepare(engine)
    assert graphs.step(engine, 2, rows_at(2)) is not None
    assert graphs.step(engine, 2, rows_at(2)._replace(compact=True)) is None
    many = rows_at(2)._replace(codes=torch.zeros(65, dtype=torch.int32))
    assert graphs.step(engine, 2, many) is None


def test_the_next_weights_of_a_slot_find_its_graphs_and_other_slots_get_their_own(tmp_path):
    first, second = write("onerec", tmp_path / "a", 0), write("onerec", tmp_path / "b", 1)
    slots, recorder = Slots(2), Replays(Kept)
    one, other = engine_of("onerec", first, slots), engine_of("onerec", second, slots)
    graphs = Graphs(encoded(one, "onerec"), LIMITS, tiny.SIZES, CPU, recorder)
    each = graphs.prepare(one).graphs
    assert each == recorder.alone
    assert graphs.prepare(one).graphs == 0
    assert graphs.prepare(other).graphs == each  # batches may be under way: nothing runs
    assert recorder.alone == each
    for _ in range(5):
        gone = weakref.ref(one)
        del one
        gc.collect()
        assert gone() is None, "graphs keep no engine, whose slot would never come back"
        one = engine_of("onerec", first, slots)
        assert graphs.prepare(one).graphs == 0
    assert recorder.recorded == 2 * each
    assert not torch.equal(graphs.step(one, 1, rows_at(1)).logits, graphs.step(other, 1, rows_at(1)).logits)


def test_another_slots_graphs_are_refused_before_anything_is_captured_where_they_would_not_fit(tmp_path):
    slots, recorder = Slots(2), Replays(Kept)
    one, other = (engine_of("onerec", write("onerec", tmp_path / name), slots) for name in "ab")
    graphs = Graphs(encoded(one, "onerec"), LIMITS, tiny.SIZES, CPU, recorder)
    taken = graphs.prepare(one)
    recorder.left = taken.bytes + SPARE - 1
    with pytest.raises(Rejected, match="for CUDA graphs") as refused:
        graphs.prepare(other)
    assert refused.value.code == "no_memory"
    assert recorder.recorded == taken.graphs
    recorder.left += 1
    assert graphs.prepare(other).graphs == taken.graphs


@pytest.mark.parametrize("code", ["capture_failed", "no_memory"])
def test_steps_that_cannot_be_captured_run_as_they_are_and_missing_memory_is_an_error(code, tmp_path):
    class Refuses(Replays):
        def record(self, run, *, fresh):
            if self.recorded == 3:
                raise Rejected(code, "why")
            return super().record(run, fresh=fresh)

    engine, recorder = engine_of("onerec", write("onerec", tmp_path / "weights")), Refuses()
    graphs = Graphs(encoded(engine, "onerec"), LIMITS, tiny.SIZES, CPU, recorder)
    if code == "no_memory":
        with pytest.raises(Rejected, match="why"):
            graphs.prepare(engine)
    else:
        assert graphs.prepare(engine) == Taken(refused="why")
    assert recorder.ended == 1
    assert graphs.step(engine, 2, rows_at(2)) is None


def test_a_model_with_other_tables_captures_anew(tmp_path):
    directory, slots, recorder = write("qwen3", tmp_path / "weights"), Slots(1), Replays(Kept)
    engine = engine_of("qwen3", directory, slots)
    graphs = Graphs(encoded(engine, "qwen3"), LIMITS, tiny.SIZES, CPU, recorder)
    each = graphs.prepare(engine).graphs
    del engine
    gc.collect()
    engine = made("qwen3", directory, slots, token_base=(10, 15, 22), prefix=(2,))
    assert isinstance(engine._family, TokenModel)
    assert graphs.prepare(engine).graphs == each


def test_graphs_of_slots_that_nobody_uses_are_let_go_once_they_are_many(tmp_path):
    directory, recorder = write("onerec", tmp_path / "weights"), Replays(Kept)
    kept = [engine_of("onerec", directory) for _ in range(KEPT + 4)]
    graphs = Graphs(encoded(kept[0], "onerec"), LIMITS, tiny.SIZES, CPU, recorder)
    for engine in kept:
        graphs.prepare(engine)
    assert len(graphs._captures._sets) == KEPT + 4  # all in use
    addresses = kept[0].addresses
    del engine, kept[:6]
    gc.collect()
    last = engine_of("onerec", directory)
    graphs.prepare(last)
    assert len(graphs._captures._sets) == KEPT
    assert addresses not in graphs._captures._sets or last.addresses == addresses


def test_every_capture_has_a_turn_of_its_own(tmp_path):
    recorder, turns = Replays(Kept), []

    @contextmanager
    def turn():
        before = recorder.recorded
        yield
        turns.append(recorder.recorded - before)

    engine = engine_of("onerec", write("onerec", tmp_path / "weights"))
    taken = Graphs(encoded(engine, "onerec"), LIMITS, tiny.SIZES, CPU, recorder, turn).prepare(engine)
    assert turns == [1] * taken.graphs


@pytest.mark.parametrize("kind", ["onerec", "qwen3"])
def test_the_largest_steps_are_those_of_the_most_rows(kind, tmp_path):
    engine = engine_of(kind, write(kind, tmp_path / "weights"))
    graphs = Graphs(encoded(engine, kind), LIMITS, tiny.SIZES, CPU, Replays(Kept))
    steps = range(engine.first_step, 4)
    most = most_rows(LIMITS, tiny.SIZES)
    outputs = [run().logits for run in graphs.largest(engine)]
    assert [tuple(one.shape) for one in outputs] == [(most[t - 1], tiny.SIZES[t - 1]) for t in steps]
    last = Graphs(encoded(engine, kind), LIMITS, tiny.SIZES, CPU, Replays(Kept), steps=range(3, 4))
    assert len(list(last.largest(engine))) == 1


@pytest.mark.parametrize("kind", ["onerec", "qwen3"])
def test_steps_of_one_engine_are_captured_over_several_arenas(kind, tmp_path):
    engine, recorder = engine_of(kind, write(kind, tmp_path / "weights")), Replays(Kept)
    parts = [
        Graphs(engine.new_arena(LIMITS), LIMITS, tiny.SIZES, CPU, recorder, steps=steps)
        for steps in (range(1, 2), range(2, 4))
    ]
    taken = [one.prepare(engine) for one in parts]
    shapes = plan(LIMITS, tiny.SIZES, first=engine.first_step, log_norm=engine.log_norm)
    assert [one.graphs for one in taken] == [sum(x.t in steps for x in shapes) for steps in ((1,), (2, 3))]
    assert parts[0].step(engine, 2, rows_at(2)) is parts[1].step(engine, 1, rows_at(1)) is None
    assert Taken.of(taken)[:3:2] == (len(shapes), 7 * len(shapes))
    assert Taken.of([Taken(1, 2.0, 3), Taken(refused="why"), Taken(4, 5.0, 6)]) == Taken(5, 7.0, 9, "why")
    assert Taken.of([]) == Taken()
