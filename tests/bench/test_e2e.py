"""The bench of whole batches as far as it needs no GPU: its modes answer alike, and its arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.runtime.job import Batch
from app.runtime.metrics import Metrics
from bench import _e2e_report as report
from bench import _kernels, e2e
from bench._modes import MODES, OnePlan
from bench._synthetic import Shape, jobs_of, snapshot_of

SMALL = Shape(codes=32, width=16, context=12, d=32, layers=2, heads=2, ffn=64, items=3000)
KINDS = dict.fromkeys([*_kernels.KINDS, "rest"], 0.5)


@pytest.fixture(scope="module")
def snapshot():
    return snapshot_of(SMALL, 3, torch.device("cpu"), e2e.POLICY, "float32")


@pytest.mark.parametrize("mode", MODES)
def test_one_plan_for_all_steps_finds_what_the_step_plans_find(mode, snapshot):
    jobs = jobs_of(snapshot, 3, seed=1, k=16)
    expected = {id(end.job): end.result for end in e2e.plain().serve(Batch(jobs))}
    for end in OnePlan(mode, snapshot, 3, Metrics()).serve(Batch(jobs)):
        assert end.result.items.tolist() == expected[id(end.job)].items.tolist()
        np.testing.assert_allclose(end.result.scores, expected[id(end.job)].scores, atol=1e-5)
        assert len(end.result.items) == 16


@pytest.mark.parametrize("mode", e2e.ORDER)
def test_a_mode_is_measured_and_shown(mode, snapshot, monkeypatch):
    monkeypatch.setattr(e2e, "profiled", lambda run: run() and {"kinds_ms": KINDS, "busy_ms": 3.0})
    monkeypatch.setattr(e2e, "SETS", 2)
    found = e2e.measure(mode, e2e.prepared(mode, snapshot, 2), 2, SMALL, snapshot, 0.0, 5)
    run = {**found.run, "phases": found.phases()}
    assert run["alike"] == 1
    assert run["batches"] >= 8
    assert run["p99_ms"] >= run["median_ms"] > 0
    assert set(run["steps_ms"]) == {"context", "1", "2", "3", "4"}
    about = dict.fromkeys(("device", "torch", "cuda", "commit"), "x")
    shown = report.markdown(
        {**about, "shape": "0.2b", "parameters": 1, "runs": e2e.merged([found.run], [{**run, "batch": 3}])}
    )
    assert f"| {mode} | float32 | 2 | " in shown


def test_flop_are_those_of_the_products_and_attentions():
    shape = Shape(codes=10, steps=2, width=3, context=7, d=4, layers=1, heads=1, ffn=5)
    row = 2 * (6 * 16 + 3 * 20 + 40) + 4 * 7 * 4
    assert shape.decode_flop(2) == 2 * (4 * row + 4 * 4 * (1 * 1 + 3 * 2))
    assert shape.context_flop(2) == 2 * 7 * 2 * 16


def test_runs_are_merged_by_mode_and_batch_size():
    def run(mode, batch, qps, precision="bfloat16"):
        return {"mode": mode, "batch": batch, "precision": precision, "qps": qps}

    old = [run("eager", 1, 1), run("step", 8, 1), run("step", 8, 3, "fp8")]
    new = [run("step", 8, 2), run("step", 1, 2)]
    found = [(one["mode"], one["batch"], one["qps"]) for one in report.merged(old, new)]
    assert found == [("step", 1, 2), ("step", 8, 2), ("step", 8, 3), ("eager", 1, 1)]


def test_other_modes_are_compared_with_step():
    runs = [{"mode": m, "precision": "fp8", "batch": b, "mean_ms": ms}
            for m, b, ms in [("step", 1, 2.0), ("general", 1, 7.0), ("general", 8, 9.0)]]  # fmt: skip
    found = [line for line in report.ratios(runs) if line.startswith("| general")]
    assert found == ["| general | fp8 | 1 |  | 7.00 | 2.00 | 3.50 |"]


def test_runs_of_another_commit_are_named_and_not_compared():
    runs = [{"mode": m, "precision": "fp8", "batch": 1, "mean_ms": ms, "commit": of}
            for m, ms, of in [("step", 2.0, "b"), ("general", 7.0, "a"), ("eager", 6.0, "b")]]  # fmt: skip
    more = [{**runs[1], "batch": 8}, {**runs[1], "mode": "step", "batch": 8}]
    assert report.older({"commit": "b", "runs": runs}) == {"a": "general fp8 1"}
    assert report.older({"commit": "b", "runs": [*runs, *more]}) == {"a": "general fp8 1, 8; step fp8 8"}
    found = [line for line in report.ratios(runs) if "fp8" in line]
    assert found == ["| eager | fp8 | 1 | b | 6.00 | 2.00 | 3.00 |"]


def test_a_run_of_step_that_was_replaced_is_still_compared_with_runs_of_its_commit():
    def run(mode, batch, of, ms):
        return {"mode": mode, "precision": "fp8", "batch": batch, "mean_ms": ms, "batches": 9, "commit": of, "qps": 1}

    first = [run("step", 1, "a", 2.0), run("step", 8, "a", 4.0), run("general", 1, "a", 7.0)]
    runs = report.merged(first, [run("step", 1, "b", 1.0), run("step", 8, "b", 2.0)])
    before = report.replaced(first, runs)
    kept = {name: value for name, value in first[0].items() if name != "qps"}
    assert before == [kept]  # nobody asks for the other
    assert report.replaced(before, runs) == before
    assert "| general | fp8 | 1 | a | 7.00 | 2.00 | 3.50 |" in report.ratios(runs, before)
    again = report.merged(runs, [run("general", 1, "b", 6.0)])
    assert report.replaced([*before, *runs], again) == []
    assert "| general | fp8 | 1 | b | 6.00 | 1.00 | 6.00 |" in report.ratios(again, [])


@pytest.mark.parametrize(("name", "kind"), [
    ("memcpy128", "copies"), ("memset (device)", "copies"), ("void pytorch_flash::flash_fwd_kernel", "attention"),
    ("slots_4", "attention"), ("scan", "selection"), ("nvjet_sm90_tst_256x128", "products"),
    ("gated", "norms and gates"), ("gated_product", "products"), ("context", "attention"),
    ("cublaslt::splitkreduce_kernel", "products"),
])  # fmt: skip
def test_kernels_have_a_kind(name, kind):
    assert _kernels.kind_of(name) == kind
