"""The demo root served from a GPU answers over HTTP what it answers from a CPU, up to the rounding of the precision."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.alike import POLICIES, PRECISIONS, USERS, K, assert_alike, root_of
from tests.served.process import serving


def answers(root: Path, device: str):
    """Items with scores by (user, policy), and what the status says."""
    found = {}
    with serving(root, "--device", device) as server:
        server.ready()
        for user in USERS:
            for policy in POLICIES:
                found[user["id"], policy] = server.items(*user["history"], k=K, policy=policy)
        status = server.status()
        assert server.stop() == 0
    bad = [line for line in server.lines if line.get("level") in {"error", "critical"} or line.get("event") == "raw"]
    assert bad == [], bad
    return found, status


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return answers(root_of(tmp_path_factory.mktemp("cpu"), "float32"), "cpu")[0]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_answers_from_a_gpu_are_those_from_a_cpu(precision, on_cpu, tmp_path):
    found, status = answers(root_of(tmp_path, precision), "cuda")
    assert status["device"].startswith("cuda")
    assert status["kernels"] == ("torch" if precision == "float32" else "cuda")
    assert_alike(found, on_cpu, precision)
