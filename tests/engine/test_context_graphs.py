"""Captured contexts, as far as they need no GPU: how batches are padded, and that nobody sees that they were."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.config import Limits
from app.core import TokenIds
from app.engine.context_graphs import PADS, ContextGraphs, padded, shapes
from app.engine.slots import Slots
from app.runtime.context_lane import own_arena
from app.runtime.contexts import batch_inputs
from tests.engine import tiny
from tests.engine.replayed import Recording, Replays
from tests.engine.test_graphs import engine_of, write

LIMITS = Limits(widths=(16,) * 3, rows=64, batch=4, context=24)
CPU = torch.device("cpu")
POSITIONS = LIMITS.context + 1  # with the prefix


class Late(Recording):
    """Runs when it is replayed first: a capture runs nothing, whatever batch is in the memory then."""

    def __init__(self, run, recorder):
        self._run, self._recorder, self._made = run, recorder, None

    @property
    def output(self):
        return self._made.output

    def replay(self):
        if self._made is None:
            with torch.inference_mode():
                self._made = Recording(self._run, self._recorder)
        self._made.replay()


def own_of(engine, contract_limits=LIMITS):
    arena = engine.new_arena(contract_limits)

    class Of:
        limits, states = contract_limits, engine.state_specs()

    return own_arena(arena, Of, first=False, pads=PADS)


def graphs_of(engine, kind=Recording):
    recorder = Replays(kind)
    own = own_of(engine)
    return ContextGraphs(own, LIMITS, engine.captured_input, CPU, recorder), own, recorder


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
    found = shapes(longest, most)
    assert found == tuple(sorted({padded(total, longest, most) for total in range(1, most + 1)}, reverse=True))
    assert found[0] == most


def test_shapes_are_few():
    assert len(shapes(512, 32 * 512)) == 72
    assert all(a / b < 1.2 for a, b in pairwise(shapes(512, 32 * 512)) if b > 128)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@given(lengths=st.lists(st.integers(0, LIMITS.context), min_size=1, max_size=LIMITS.batch), seed=st.integers(0, 9))
def test_a_replay_is_what_the_family_computes_of_the_batch_alone(kind, lengths, seed, worlds):
    engine, graphs, own = worlds(kind)
    inputs = prompts_of(engine, lengths, seed)
    arena = engine.new_arena(LIMITS)
    expected = engine.encode(batch_inputs(engine.input_specs(), inputs, CPU), arena)
    found = graphs.encode(engine, inputs)
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
            assert graphs.prepare(engine).graphs == len(shapes(POSITIONS, LIMITS.batch * POSITIONS))
            known[kind] = engine, graphs, own
        return known[kind]

    return world


def test_a_batch_leaves_nothing_for_the_next_one(worlds):
    engine, graphs, _ = worlds("qwen3")
    few = prompts_of(engine, [3, 9], 1)
    alone = graphs.encode(engine, few).logits.clone()
    graphs.encode(engine, prompts_of(engine, [24, 24, 24, 24], 2))
    assert torch.equal(graphs.encode(engine, few).logits, alone)


def test_an_engine_that_was_not_prepared_is_not_replayed(worlds, tmp_path):
    _, graphs, _ = worlds("qwen3")
    other = engine_of("qwen3", write("qwen3", tmp_path / "weights"))
    assert graphs.encode(other, prompts_of(other, [3])) is None


def test_weights_in_another_slot_are_captured_beside_batches(tmp_path):
    slots = Slots(2)
    directory = write("qwen3", tmp_path / "weights")
    first = engine_of("qwen3", directory, slots)
    graphs, _, recorder = graphs_of(first, Late)
    count = graphs.prepare(first).graphs
    inputs = prompts_of(first, [5, 7])
    expected = graphs.encode(first, inputs).logits.clone()
    laid_out = graphs._start.clone()
    second = engine_of("qwen3", directory, slots)
    assert graphs.prepare(second).graphs == count
    assert torch.equal(graphs._start, laid_out)  # a batch may be in there
    assert recorder.alone == count
    torch.testing.assert_close(graphs.encode(second, inputs).logits, expected)
    assert graphs.prepare(second).graphs == 0


def test_who_asks_the_host_for_counts_or_has_no_step_1_there_is_not_captured(tmp_path):
    assert engine_of("onerec", write("onerec", tmp_path / "o")).captured_input is None
    assert engine_of("qwen3_5", write("qwen3_5", tmp_path / "h")).captured_input is None
    assert engine_of("qwen3", tiny.write(tmp_path / "q")).captured_input.name == "tokens"
