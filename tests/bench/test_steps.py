"""Where the time of a batch goes: events are counted where they begin, and marks stand in every mode's way."""

from __future__ import annotations

import json

import pytest
import torch

from app.runtime.job import Batch
from app.runtime.laps import Laps
from app.runtime.metrics import Metrics
from app.runtime.selection import Selection
from app.runtime.steps import StepLoop
from bench import e2e, steps
from bench._e2e_report import ORDER
from bench._kernels import Event
from bench._synthetic import jobs_of, snapshot_of
from bench.steps import MARK, Part

EVERY = ["context", "hand-over", "1", "2", "3", "4", "answers"]


@pytest.fixture(scope="module")
def snapshot():
    return snapshot_of(steps.TOY, 3, torch.device("cpu"), e2e.POLICY, "float32")


def queue(*what, at=0.0):
    """Events one after the other: (name, microseconds), a mark where there is only a name."""
    made = []
    for name, micros in ((one, 1.0) if isinstance(one, str) else one for one in what):
        made.append(Event(at, micros, name))
        at += micros
    return made


def test_events_are_of_the_part_and_kind_that_they_begin_in():
    batch = (
        MARK, ("memcpy htod", 100), ("nvjet_sm90", 900),  # context
        MARK, ("vectorized_elementwise", 50),  # hand-over
        MARK, ("slots_1", 200), ("gemm", 300), ("gated", 30), ("scan", 7), ("other", 3),  # step 1
        MARK, ("search", 400), ("topk by torch", 60), ("memset", 1),  # its selection
        MARK, ("memcpy dtoh", 5),  # answers
    )  # fmt: skip
    parts = [Part("context"), Part("hand-over"), Part("1"), Part("1", selecting=True), Part("answers")]
    found = steps.split(queue(*batch, *batch)[::-1], [*parts, *parts], 2)
    assert list(found) == ["context", "hand-over", "1", "answers"]
    nothing = dict.fromkeys(steps.COLUMNS, 0.0)
    assert found == {
        "context": pytest.approx({**nothing, "copies": 0.1, "products": 0.9}),
        "hand-over": pytest.approx({**nothing, "rest": 0.05}),
        # a kernel that sounds like selection outside of it is the model's
        "1": pytest.approx({"attention": 0.2, "products": 0.3, "norms and gates": 0.03, "rest": 0.01, "copies": 0.0,
                            "selection": 0.461}),
        "answers": pytest.approx({**nothing, "copies": 0.005}),
    }  # fmt: skip


def test_an_event_that_goes_on_behind_a_mark_is_of_the_part_before_it():
    found = [
        Event(0, 1, MARK),
        Event(5, 100, "slots_2"),
        Event(10, 1, MARK),
        Event(11, 20, "gemm"),
        Event(-3, 2, "late"),
    ]
    ms = steps.split(found, [Part("1"), Part("2")], 1)
    assert {part: sum(kinds.values()) for part, kinds in ms.items()} == {"1": 0.1, "2": 0.02, "other": 0.002}
    assert ms["1"]["attention"] == 0.1


def test_marks_that_the_profiler_lost_are_no_figures():
    with pytest.raises(ValueError, match="2 marks were put, and the profiler saw 1"):
        steps.split(queue(MARK, ("gemm", 5)), [Part("context"), Part("1")], 1)


@pytest.mark.parametrize("mode", ORDER)
def test_every_mode_is_measured_by_step_and_shown(mode, snapshot, tmp_path):
    before = Laps.mark, StepLoop._decode, Selection.select
    run = steps.measure(mode, snapshot, 3, 2, 5)
    assert (Laps.mark, StepLoop._decode, Selection.select) == before
    assert {"context", "1", "2", "3", "4", "answers"} <= set(run["parts_ms"]) <= {*EVERY, "other"}
    for t in "1234":
        assert run["parts_ms"][t]["selection"] > 0
        assert run["parts_ms"][t]["attention"] > 0  # to the context, by torch
    assert run["busy_ms"] == pytest.approx(sum(sum(one.values()) for one in run["parts_ms"].values()))
    out = tmp_path / "steps.json"
    steps.write(out, "toy", {**run, "batch": 2, "commit": "old"})
    steps.write(out, "toy", run)
    assert [one["batch"] for one in json.loads(out.read_text())["runs"]] == [2, 3]
    table = (tmp_path / "steps.md").read_text()
    assert f"| {mode} | float32 | 3 | step 4 | " in table
    assert "say nothing about speed" in table
    assert f"Of commit old, by batch size: {mode} float32 2." in table
    assert (tmp_path / "steps.svg").read_text().count(f"{mode}, float32, batch ") == 2


def test_step_1_that_is_decoded_beside_the_context_is_step_1_s(snapshot):
    loop = StepLoop(lambda: 0.0, Metrics(), recorder=lambda _: None, beside=lambda _: True)
    marks = steps.Marks(torch.device("cpu"), 4)
    with marks.put():
        for _ in range(2):
            loop.serve(Batch(jobs_of(snapshot, 2, 1, 5)))
    once = [("context", False), ("1", False), ("hand-over", False), ("1", False), ("1", True)]
    once += [
        (str(t), chosen) for t in (2, 3, 4) for chosen in (False, False, True)
    ]  # after the step before; its decode
    assert marks.parts == [Part(*one) for one in [*once, ("answers", False)] * 2]


def test_it_says_that_it_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["steps"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        steps.main()
    assert "it needs a GPU; --toy does not" in capsys.readouterr().err


def test_a_toy_runs_without_one_and_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["steps", "--toy", "--batch", "2", "--batches", "1", "--mode", "step", "--out",
                                     str(tmp_path / "s.json")])  # fmt: skip
    steps.main()
    assert "its figures say nothing about speed" in capsys.readouterr().out
    assert json.loads((tmp_path / "s.json").read_text())["shape"] == "toy"
