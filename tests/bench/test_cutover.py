"""Parts of the cutover bench: which requests overlap an update, ratios, and answers that do not fit their versions."""

from __future__ import annotations

import json

import numpy as np
import pytest

from app.config import parse
from app.vocab.artifact import load_vocab
from app.vocab.manifest import verify, version_key
from bench._cutover_plot import plot
from bench._cutover_report import mixed, quantile, ratio, write_report
from bench._cutover_root import COMMON, TOY, bodies, make_root, publish
from bench._cutover_samples import AFTER_S, Samples


def client(rows):
    """rows: (intended, latency ms, status, weights, score)."""
    columns = {
        "intended": [row[0] for row in rows],
        "latency_ms": [row[1] for row in rows],
        "late_ms": [0.1 for _ in rows],
        "status": [row[2] for row in rows],
        "body": [0 for _ in rows],
        "weights": [row[3] for row in rows],
        "vocab": ["v1" for _ in rows],
        "score": [row[4] for row in rows],
        "mixed": [0 for _ in rows],
        "batch_ms": [1.0 for _ in rows],
    }
    return {
        "sent": len(rows),
        "answered": sum(row[2] == 200 for row in rows),
        "failed": {},
        "columns": columns,
    }


def part(rows, *, mode="live", updates=((10.0, 11.0, 12.0),), trouble=()):
    made = [
        {
            "kind": "weights",
            "weights": "v2-b",
            "published": a,
            "active": b,
            "gone": c,
            "hold_ms": 0.5,
            "prepare_ms": 900.0,
        }
        for a, b, c in updates
    ]
    return {
        "mode": mode, "setting": vars(TOY) if hasattr(TOY, "__dict__") else {}, "machine": {
            "cpu": "x", "cores": 2, "load_before": 0.0, "versions": {"torch": "2"}, "commit": "c",
        }, "marks": [0.0, 9.0, 14.0, 23.0], "rate_per_s": 1.0, "saturation_per_s": 2.0, "note": "", "updates": made,
        "clients": [client(rows)], "first": [{**one, "published": -2.0, "gone": -1.0} for one in made[:1]], "asked": 1,
        "trouble": list(trouble), "kernels": "torch", "graphs": [],
    }  # fmt: skip


def test_what_is_on_its_way_during_an_update_overlaps_it():
    times = [(9.5, 400.0), (9.5, 600.0), (10.5, 1.0), (12.0 + AFTER_S, 1.0), (12.3 + AFTER_S, 1.0)]
    samples = Samples.of(part([(at, ms, 200, "v1", 0.0) for at, ms in times]))
    assert samples.overlaps(samples.windows).tolist() == [False, True, True, True, False]
    assert samples.stretch.tolist() == [2] * 5
    none = Samples.of(part([(1.0, 1.0, 200, "v1", 0.0)], updates=()))
    assert none.overlaps(none.windows).tolist() == [False]


def test_refused_requests_are_counted_and_have_no_latency():
    samples = Samples.of(part([(1.0, 5.0, 503, "", 0.0), (2.0, 6.0, 200, "v1", 0.0)]))
    assert samples.latency.tolist() == [6.0]


def test_quantiles_are_measured_values_and_ratios_have_intervals():
    assert quantile([np.arange(1.0, 101.0)], 0.99) == 99.0
    assert quantile([np.array([3.0]), np.array([1.0])], 0.5) == 1.0
    random = np.random.default_rng(1)
    slow = [2 * random.lognormal(size=200) for _ in range(40)]
    quick = [random.lognormal(size=200) for _ in range(40)]
    middle, low, high = ratio(slow, quick, 0.99, resamples=200)
    assert low < middle < high
    assert low < 2 < high
    assert low > 1.5
    assert high < 2.7


def test_an_answer_of_other_weights_than_it_names_is_seen():
    good = [(float(n), 1.0, 200, "v1", -1.0) for n in range(5)] + [(float(n), 1.0, 200, "v2-b", -2.0) for n in range(5)]
    assert mixed([part(good)]) == {"wrong_items": 0, "score_spread": 0.0, "score_apart": 1.0}
    bad = mixed([part([*good, (9.0, 1.0, 200, "v2-b", -1.0)])])
    assert bad["score_spread"] == bad["score_apart"] == 1.0


def test_the_report_pools_parts_and_modes(tmp_path):
    rows = [(n / 10, 5.0 if n % 10 else 9.0, 200, "v1", -1.0) for n in range(230)]
    slow = [(at, 30 * ms if 10 < at < 12 else ms, *rest) for at, ms, *rest in rows]
    text = write_report([part(rows), part(rows), part(slow, mode="naive")], tmp_path / "r")
    assert "| during / steady, p99 | 1.00 (1.00..1.00) | 30.00" in text
    assert "| parts, updates | 2, 2 of 2 | 1, 1 of 1 |" in text
    assert "Cut short" not in text
    summary = json.loads((tmp_path / "r.json").read_text())["summary"]
    assert summary["live"]["requests"]["sent"] == 460
    picture = (tmp_path / "r.svg").read_text()
    assert picture.count("<polyline") == 2
    assert picture == plot({"live": part(rows), "naive": part(slow, mode="naive")})


def test_a_root_has_three_contents_of_each_kind_and_versions_that_are_links(tmp_path):
    root = make_root(tmp_path, TOY)
    deployment = parse((root / "deployment.toml").read_text())
    for kind, content, version in (("weights", 1, "v2-b"), ("vocab", 2, "v10-c")):
        publish(tmp_path, kind, content, version)
        verify(root / kind / version, kind)
    assert sorted(["v10-c", "v2-b", "v1"], key=version_key) == ["v1", "v2-b", "v10-c"]
    vocab = load_vocab(root / "vocab" / "v10-c", deployment.sid.sizes)
    assert {vocab.id(item)[0] for item in range(COMMON, len(vocab))} == {"c"}
    asked = [one["context"]["history"] for one in map(json.loads, bodies(TOY))]
    assert min(vocab.find([item for one in asked for item in one])) >= 0
    with pytest.raises(SystemExit, match="another setting"):
        make_root(tmp_path, type(TOY)(gigabytes=0.001))
