"""The bench of a REST server, as far as it needs neither a server nor a GPU."""

from __future__ import annotations

import asyncio
import json

import pytest

from app.cli.deployment import read_deployment
from app.cli.load import arrivals
from app.vocab.artifact import open_vocab
from app.vocab.manifest import verify
from bench import _rest_alone, rest
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


def test_what_is_to_be_compared_with_a_few_requests_stands_in_the_table_beside_them():
    def row(number):
        return {"p50": number, "p90": number, "p99": number + 0.5}

    few = {
        "rate_per_s": 20.0, "latency_ms": row(9.0), "server_ms": row(8.0), "rest_ms": row(1.0), "batch": 1.0,
        "steps_ms": {"1": 2.0},
    }  # fmt: skip
    run_ = {
        **dict.fromkeys(("closed", "busy", "open", "few"), few),
        "nothing": {"rate_per_s": 20.0, "latency_ms": row(0.25)},
        "alone": {"per_s": 800.0, "steps_ms": {"1": 2.0}, "few_ms": row(7.75)},
    }
    document = {
        "device": "a GPU", "cores": 2, "torch": "2", "commit": "c", "seconds": 4.0, "k": 50, "runs": {"fp8": run_},
    }  # fmt: skip
    lines = [line.split(" | ") for line in rest.markdown(document).splitlines() if line.startswith("| fp8")]
    rows = {line[1]: line[2:7] for line in lines}
    assert rows["few"] == ["20", "0", "1.0", "9.00", "9.50"]
    assert rows["alone, few"] == ["20", "-", "-", "7.75", "8.25"]
    assert rows["nothing"] == ["20", "-", "-", "0.25", "0.75"]
    del run_["alone"]["few_ms"], run_["nothing"]  # a result of before
    assert not {"alone, few", "nothing"} & set(rest.markdown(document).split(" | "))


def test_a_few_come_one_by_one_and_are_all_answered():
    outcome = asyncio.run(_few())
    assert len(outcome) == len(arrivals(rest.FEW, 0.4, 1)) > 2
    assert min(outcome) > 0


async def _few():
    class Runtime:
        def admit(self, request):
            assert request.k == 3
            return self

        async def outcome(self):
            await asyncio.sleep(0)

    return await _rest_alone.few(Runtime(), [["item-1"], ["item-2"]], 3, 0.4)
