"""Captured contexts, as far as they need no GPU: how batches are padded, and that nobody sees that they were."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.config import Limits, SidConfig
from app.core import History, TokenIds
from app.engine import context_graphs
from app.engine.context_graphs import PADS, ContextGraphs, padded, shapes
from app.engine.engine import Engine
from app.engine.families import onerec
from app.engine.slots import Slots
from app.engine.weights import load
from app.ops.attention import context_attention, operators
from app.ops.upload import upload_into
from app.runtime.context_lane import own_arena
from app.runtime.contexts import batch_inputs
from tests.engine import tiny
from tests.engine.families.test_onerec import FEATURES, config_of, pair
from tests.engine.replayed import Replays
from tests.engine.test_graphs import engine_of, write

LIMITS = Limits(widths=(16,) * 3, rows=64, batch=4, context=24)
CPU = torch.device("cpu")


def own_of(engine, contract_limits=LIMITS):
    arena = engine.new_arena(contract_limits)

    class Of:
        limits, states = contract_limits, engine.state_specs()

    return own_arena(arena, Of, first=False, pads=PADS)


def graphs_of(engine):
    recorder = Replays()
    own = own_of(engine)
    return ContextGraphs(own, LIMITS, engine.input_specs(), CPU, recorder), own, recorder


def prompts_of(engine, lengths, seed=0):
    numbers = np.random.default_rng(seed)
    return [engine.prepare(TokenIds(tuple(numbers.integers(0, 20, n).tolist()))) for n in lengths]


@given(total=st.integers(1, 40_000), longest=st.integers(1, 2048))
def test_padding_is_at_most_an_eighth_or_a_few_positions_and_never_more_than_one_prompt(total, longest):
    most = 32 * longest
    total = min(total, most)
    found = padded(total, longest, most)
    assert total <= found <= most
    assert found - total < longest
    assert found - total < max(16, total / 8 + 1)
    assert padded(found, longest, most) == found


@given(longest=st.integers(1, 600), batch=st.integers(1, 64))
def test_every_batch_has_a_shape(longest, batch):
    most = batch * longest
    found = [one for (one,) in shapes([longest], batch)]
    assert found == sorted({padded(total, longest, most) for total in range(1, most + 1)})
    assert found[-1] == most


def test_shapes_are_few():
    one = [one for (one,) in shapes([512], 32)]
    assert len(one) == 72
    assert all(b / a < 1.2 for a, b in pairwise(one) if a > 128)
    assert shapes([1, 255, 256], 32)[-3:] == ((28, 7140, 7168), (30, 7650, 7680), (32, 8160, 8192))
    assert len(shapes([1, 255, 256], 32)) == 24


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@given(lengths=st.lists(st.integers(0, LIMITS.context), min_size=1, max_size=LIMITS.batch), seed=st.integers(0, 9))
def test_a_replay_is_what_the_family_computes_of_the_batch_alone(kind, lengths, seed, worlds):
    engine, graphs, own = worlds(kind)
    inputs = prompts_of(engine, lengths, seed)
    arena = engine.new_arena(LIMITS)
    expected = engine.encode(batch_inputs(engine.input_specs(), inputs, CPU), arena)
    _, found = graphs.encode(engine, inputs)
    assert found.logits.shape == expected.logits.shape
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.log_norm, expected.log_norm, rtol=1e-4, atol=1e-4)
    n = len(inputs)
    assert torch.equal(own["prompt_length"][:n], arena["prompt_length"][:n])
    for name, values in arena.items():
        if name.startswith(("prompt_k", "prompt_v")):
            for r, given_ in enumerate(inputs):
                there = len(given_["tokens"])
                torch.testing.assert_close(own[name][r, :there], values[r, :there], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    known = {}

    def world(kind):
        if kind not in known:
            engine = engine_of(kind, write(kind, tmp_path_factory.mktemp(kind) / "weights"))
            graphs, own, _ = graphs_of(engine)
            assert graphs.prepare(engine).graphs == len(
                shapes([one.positions for one in engine.input_specs()], LIMITS.batch)
            )
            known[kind] = engine, graphs, own
        return known[kind]

    return world


def test_a_batch_leaves_nothing_for_the_next_one(worlds):
    engine, graphs, _ = worlds("qwen3")
    few = prompts_of(engine, [3, 9], 1)
    alone = graphs.encode(engine, few)[1].logits.clone()
    graphs.encode(engine, prompts_of(engine, [24, 24, 24, 24], 2))
    assert torch.equal(graphs.encode(engine, few)[1].logits, alone)


def test_what_is_run_before_a_capture_is_laid_out_where_it_runs(worlds, monkeypatch):
    """In its stream: elsewhere it would come behind a batch of another contract, and kernels would find the bounds of a
    larger shape."""
    engine, inside, found = worlds("qwen3")[0], [], []

    class Streamed(Replays):
        def record(self, run, *, fresh):
            inside.append(True)
            try:
                return super().record(run, fresh=fresh)
            finally:
                inside.pop()

    def upload(place, host):
        found.append(bool(inside))
        upload_into(place, host)

    monkeypatch.setattr(context_graphs, "upload_into", upload)
    graphs = ContextGraphs(own_of(engine), LIMITS, engine.input_specs(), CPU, Streamed())
    assert found == [True] * graphs.prepare(engine).graphs


def test_an_engine_that_was_not_prepared_is_not_replayed(worlds, tmp_path):
    _, graphs, _ = worlds("qwen3")
    other = engine_of("qwen3", write("qwen3", tmp_path / "weights"))
    assert graphs.encode(other, prompts_of(other, [3])) == (False, None)


def test_weights_in_another_slot_are_captured_beside_batches(tmp_path):
    slots = Slots(2)
    directory = write("qwen3", tmp_path / "weights")
    first = engine_of("qwen3", directory, slots)
    graphs, _, recorder = graphs_of(first)
    count = graphs.prepare(first).graphs
    inputs = prompts_of(first, [5, 7])
    expected = graphs.encode(first, inputs)[1].logits.clone()
    laid_out = graphs._start.clone()
    second = engine_of("qwen3", directory, slots)
    assert graphs.prepare(second).graphs == count
    assert torch.equal(graphs._start, laid_out)  # a batch may be in there
    assert recorder.alone == count
    torch.testing.assert_close(graphs.encode(second, inputs)[1].logits, expected)
    assert graphs.prepare(second).graphs == 0


@given(items=st.lists(st.integers(0, 40), min_size=1, max_size=LIMITS.batch), seed=st.integers(0, 9))
def test_several_inputs_are_padded_together_and_a_pad_request_may_be_longer_than_any(items, seed, worlds):
    engine, graphs, own = worlds("onerec")
    numbers = np.random.default_rng(seed)
    inputs = [engine.prepare(History(numbers.integers(0, 5, (n, 3), dtype=np.int32))) for n in items]
    arena = engine.new_arena(LIMITS)
    assert engine.encode(batch_inputs(engine.input_specs(), inputs, CPU), arena) is None
    assert graphs.encode(engine, inputs) == (True, None)
    assert set(own) == {"cross_length", *(name for name in arena if name.startswith(("cross_k", "cross_v")))}
    for name, values in own.items():
        for r in range(len(items)):
            there = int(arena["cross_length"][r])
            mine, others = (x[r, :there] if x.dim() > 1 else x[r] for x in (values, arena[name]))
            torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("features", [None, FEATURES])
def test_blocks_over_contexts_see_nothing_of_a_pad_request_that_is_longer_than_any(features, monkeypatch):
    _, family = pair(config_of(context_layers=2, features=features), LIMITS)
    engine, longer, numbers = Engine(family, device=CPU, dtype=torch.float32), [], np.random.default_rng(0)
    monkeypatch.setattr(operators, "_check_sizes", lambda *_: None)

    def attend(q, k, v, length, row_start, *, widest, scale):
        """As on a GPU: rows of a request beyond `widest` are left as they are, whatever that is."""
        out, lse = context_attention(q, k, v, length, row_start, widest=widest, scale=scale)
        for begin, end in pairwise(row_start.tolist()):
            longer.append(end - begin > widest)
            out[begin + widest : end] = torch.nan
        return out, lse

    monkeypatch.setattr(onerec, "context_attention", attend)
    graphs, own, _ = graphs_of(engine)
    graphs.prepare(engine)
    for lengths in ((5, 5, 5, 5), (20, 3), (0, 0, 1), (4, 20, 20, 4)):
        inputs = [engine.prepare(History(numbers.integers(0, 3, (n, 3), dtype=np.int32))) for n in lengths]
        arena = engine.new_arena(LIMITS)
        engine.encode(batch_inputs(engine.input_specs(), inputs, CPU), arena)
        graphs.encode(engine, inputs)
        for name, values in arena.items():
            for r, there in enumerate(arena["cross_length"][: len(lengths)].tolist()):
                if name.startswith("cross_k"):
                    torch.testing.assert_close(own[name][r, :there], values[r, :there], rtol=1e-4, atol=1e-4)
    assert any(longer)


def test_an_input_that_a_request_does_not_give_has_no_positions(worlds):
    engine, graphs, own = worlds("onerec")
    codes = [np.full((n, 3), 2, np.int32) for n in (5, 2)]
    inputs = [{"history.short": codes[0], "history.long": codes[1][None]}, {"history.short": codes[1]}, {}]
    arena = engine.new_arena(LIMITS)
    engine.encode(batch_inputs(engine.input_specs(), inputs, CPU), arena)
    graphs.encode(engine, inputs)
    n = len(inputs)
    assert own["cross_length"][:n].tolist() == arena["cross_length"][:n].tolist() == [7, 3, 1]


def test_who_asks_the_host_for_counts_is_not_captured(tmp_path):
    assert not engine_of("qwen3_5", write("qwen3_5", tmp_path / "h")).contexts_on_device
    assert engine_of("qwen3", tiny.write(tmp_path / "q")).contexts_on_device


def test_what_a_family_says_of_its_encode_is_nothing_that_a_subclass_with_another_says(tmp_path):
    kind = type(engine_of("qwen3", tiny.write(tmp_path / "q"))._family)

    class Same(kind):
        pass

    class Counting(kind):
        def encode(self, contexts, arena):
            return super().encode(contexts, arena)

    class Says(Counting):
        contexts_on_device = True

    found = {}
    for own in (Same, Counting, Says):
        family = load(tmp_path / "q", own, SidConfig(sizes=tiny.SIZES, token_base=tiny.BASES), LIMITS, device=CPU)
        found[own] = family.contexts_on_device
    assert found == {Same: True, Counting: False, Says: True}
