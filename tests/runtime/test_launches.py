"""What a step costs the thread that launches it: each operator, be it of torch or ours, gives the interpreter away."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.core import StepOutput
from app.ops import cuda
from app.ops.cuda import Kernel
from app.ops.selection import launch
from app.runtime.selection import Selection
from app.runtime.state import Ancestry, BatchState
from tests import support

SIZES = (16, 16, 16)
WIDTH, REQUESTS = 8, 4
POLICIES = {"plain": f"widebeam: 1\nwidths: [{WIDTH}, {WIDTH}, {WIDTH}]\n"}


class Operators(TorchDispatchMode):
    """The names of torch's operators, in the order in which they are asked for."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launched(monkeypatch):
    """The kernels that a GPU would be given, in their order; they compute nothing here."""
    seen: list[str] = []
    monkeypatch.setattr(cuda, "unfit", lambda _: None)
    monkeypatch.setattr(cuda, "load", lambda _, name, __, *, memory=0, **___: Kernel(name, 0, memory))
    monkeypatch.setattr(Kernel, "launch", lambda kernel, *_, early=False: seen.append(kernel.function))
    monkeypatch.setattr(launch, "limits", lambda _: (True, 227 << 10))
    return seen


@pytest.fixture
def jobs():
    deployment = support.deployment_of(SIZES)
    vocab = support.catalogue(support.random_sids(SIZES, 200), SIZES)
    snapshot = support.snapshot_of(support.onerec_engine(SIZES, deployment.limits), vocab, deployment, POLICIES)
    return [support.job_of(snapshot, deployment, (f"i{at}",), policy="plain") for at in range(REQUESTS)]


def run(jobs, seen):
    """The operators of torch to make a batch, and of each of its steps from the logits to the next step's rows."""
    cpu, lane = torch.device("cpu"), Ancestry({}, ())
    with torch.inference_mode(), Operators(seen):
        state = BatchState(lane, len(jobs), len(SIZES), cpu)
        selection = Selection(jobs, jobs[0].snapshot.trie, SIZES, cpu)
        made = [list(seen)]
        for t in range(1, len(SIZES) + 1):
            output = StepOutput(torch.zeros(state.row_start[-1], SIZES[t - 1], dtype=torch.bfloat16), None, {})
            seen.clear()
            found = selection.select(t, output, state, [WIDTH] * len(jobs))
            state.advance(t, found.survivors, range(0, len(jobs) * WIDTH + 1, WIDTH))
            if t < len(SIZES):
                state.rows(full=selection.needs_full(t + 1))
            made.append(list(seen))
            seen.clear()
    return made


def test_between_two_steps_six_kernels_compute_and_torch_gives_them_memory(jobs, launched):
    run(jobs, [])
    launched.clear()
    batch, *steps = run(jobs, [])
    assert launched == ["children", "scan", "tail", "child", "count", "advance"] * len(SIZES)
    for step in steps:
        assert set(step) <= {"empty", "empty_like", "split_with_sizes"}
        assert len(step) <= 11
    assert batch == ["empty"]  # whose rows are whose, and what the first rows are, is as it was in the batch before
