"""The bench of a REST server, as far as it needs neither a server nor a GPU."""

from __future__ import annotations

import json

import pytest

from app.cli.deployment import read_deployment
from app.vocab.artifact import open_vocab
from app.vocab.manifest import verify
from bench import rest
from bench._synthetic import Shape

SMALL = Shape(codes=32, width=16, context=12, d=32, layers=2, heads=2, ffn=64, items=3000)


def test_a_root_is_one_that_serves(tmp_path):
    root = rest.write_root(tmp_path / "root", SMALL, 4, "bfloat16")
    deployment = read_deployment(root)
    assert (deployment.limits.rows, deployment.limits.batch, deployment.precision) == (64, 4, "bfloat16")
    verify(root / "weights" / "v1", "weights")
    vocab = open_vocab(root / "vocab" / "v1")
    asked = [json.loads(body)["context"]["history"] for body in rest.bodies(SMALL, 1000, 5)]
    assert {len(history) for history in asked} == {11}
    assert min(vocab.find([item for history in asked for item in history])) >= 0


def test_step_times_are_those_between_two_looks():
    def sample(kind, step, value):
        return {f'widebeam_step_seconds_{kind}{{step="{step}"}}': value}

    before = {**sample("count", "1", 2.0), **sample("sum", "1", 0.5)}
    after = {**sample("count", "1", 4.0), **sample("sum", "1", 0.51), **sample("count", "context", 0.0)}
    after |= sample("sum", "context", 0.0)
    found = rest.steps_ms(before, after)
    assert found["1"] == pytest.approx(5.0)
    assert found["context"] != found["context"]


def test_what_clients_see_beyond_the_server_is_told():
    seen = [rest._Seen(rest._Timings(1.0, 2.0, 3.0, total), rest._Batch(4)) for total in (10.0, 20.0)]
    told = rest._told([(0.011, seen[0]), (0.023, seen[1])])
    assert told["rest_ms"]["p50"] == pytest.approx(2.0)
    assert told["server_mean_ms"]["total"] == 15
    assert told["batch"] == 4
