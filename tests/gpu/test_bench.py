"""The split of a batch by step and kind on a GPU: every mark arrives, in every mode, and nothing is counted twice."""

from __future__ import annotations

import pytest
import torch

from app.runtime.job import Batch
from bench import steps
from bench._e2e_report import ORDER
from bench._kernels import profiled
from bench._synthetic import Shape, jobs_of, snapshot_of
from bench.e2e import POLICY, prepared

SMALL = Shape(codes=256, width=64, context=64, d=128, layers=2, heads=2, ffn=256, items=30_000)


@pytest.fixture(scope="module")
def snapshot():
    return snapshot_of(SMALL, 4, torch.device("cuda", torch.cuda.current_device()), POLICY, "bfloat16")


@pytest.mark.parametrize("mode", ORDER)
def test_a_batch_is_split_by_step_and_kind_in_every_mode(mode, snapshot):
    run = steps.measure(mode, snapshot, 4, 3, 10)
    parts = run["parts_ms"]
    assert {"context", "1", "2", "3", "4", "answers"} <= set(parts)
    for t in "1234":
        assert min(parts[t]["attention"], parts[t]["selection"]) > 0, (t, parts[t])
    assert parts["context"]["selection"] == parts["answers"]["selection"] == 0
    assert sum(parts.get("other", {"": 0.0}).values()) < 0.02 * run["busy_ms"]
    loop, jobs = prepared(mode, snapshot, 4).loop, jobs_of(snapshot, 4, 0, 10)
    loop.serve(Batch(jobs))
    assert run["busy_ms"] == pytest.approx(
        profiled(lambda: loop.serve(Batch(jobs)))["busy_ms"], rel=0.5
    )  # their sum, however parts begin
