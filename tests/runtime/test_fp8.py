"""A root whose precision is fp8, from its contract to answers."""

from __future__ import annotations

from io import BytesIO
from statistics import median

import pytest
import torch

from app.cli.deployment import read_deployment
from app.engine import weights
from app.engine.registry import family
from app.errors import Rejected
from app.runtime import memory
from app.runtime.gate import examine
from app.runtime.loader import load_root
from app.runtime.logs import make_log
from tests import support


def loaded(root):
    with support.without_exports():
        return load_root(root, read_deployment(root), make_log(BytesIO(), "info"))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return support.write_root(tmp_path_factory.mktemp("root"), extra='precision = "fp8"')


def test_the_contract_says_fp8_and_the_artifact_is_the_same(root, tmp_path):
    snapshot = loaded(root).snapshot
    assert snapshot.contract.precision == "fp8"
    assert {spec.dtype for spec in snapshot.contract.states} == {torch.bfloat16, torch.int32}
    half = loaded(support.write_root(tmp_path / "half", extra='precision = "bfloat16"')).snapshot
    assert half.contract.id != snapshot.contract.id
    assert half.weights.digest == snapshot.weights.digest


def test_it_answers_what_bfloat16_answers_up_to_its_rounding(root, tmp_path):
    both = [
        loaded(one).snapshot for one in (root, support.write_root(tmp_path / "half", extra='precision = "bfloat16"'))
    ]
    deployment = read_deployment(root)
    eight, half = (
        support.run_batch([support.job_of(one, deployment, [f"i{n}"], k=40) for n in range(8)]) for one in both
    )
    apart: list[float] = []
    for one, other in zip(eight, half, strict=True):
        assert sorted(one.items.tolist()) == sorted(other.items.tolist())
        scores = [dict(zip(a.items.tolist(), a.scores.tolist(), strict=True)) for a in (one, other)]
        apart += [abs(scores[0][item] - scores[1][item]) for item in scores[0]]
    # scores of one request spread over 2.3; of requests by themselves the median reaches .6 in this small model
    assert 0 < median(apart) < 0.3


def test_the_gate_finds_nothing_and_memory_is_known_beforehand(root):
    with support.without_exports():
        assert examine(root, read_deployment(root)).errors == 0
    engine = loaded(root).snapshot.engine
    size = sum(one.nbytes for one in engine.slot.tensors.values())
    assert memory.needed(root / "weights" / "v1", read_deployment(root), torch.device("cpu")) == size


def test_a_gpu_that_cannot_is_refused_before_anything_is_read(root, monkeypatch):

    monkeypatch.setattr(weights, "unfit", lambda _: "fp8 needs an NVIDIA GPU of compute capability 9.0, cuda:0 is none")
    monkeypatch.setattr(weights, "read_entries", lambda _: pytest.fail("read"))
    deployment = read_deployment(root)
    with pytest.raises(Rejected, match="compute capability") as caught:
        weights.load(
            root / "weights" / "v1", family("onerec"), deployment.sid, deployment.limits, precision="fp8",
            device=torch.device("cpu"),
        )  # fmt: skip
    assert (caught.value.code, caught.value.location) == ("unsupported_precision", "deployment.toml: precision")
