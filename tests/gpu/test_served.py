"""The demo root served from a GPU answers what it answers from a CPU, up to the rounding of the precision."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.served.process import serving

REPOSITORY = Path(__file__).parents[2]
USERS = json.loads((REPOSITORY / "examples/movielens/users.json").read_text())
K = 50
POLICIES = ("base", "narrow", "unseen", "rising")


def root_of(directory: Path, precision: str) -> Path:
    for name in ("weights", "vocab", "policies"):
        shutil.copytree(REPOSITORY / name, directory / name)
    text = (REPOSITORY / "deployment.toml").read_text()
    (directory / "deployment.toml").write_text(
        f'precision = "{precision}"\n'
        + text.replace("[server]", "[server]\nport = 0\nadmin_port = 0\ndrain_delay_s = 0.05")
    )
    return directory


def answers(root: Path, device: str):
    """Items with scores by (user, policy), what the status says of the device, and the log."""
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


@pytest.mark.parametrize(
    ("precision", "apart", "shared"), [("float32", 1e-3, 1.0), ("float16", 0.02, 0.9), ("bfloat16", 0.15, 0.8)]
)
def test_answers_from_a_gpu_are_those_from_a_cpu(precision, apart, shared, on_cpu, tmp_path):
    found, status = answers(root_of(tmp_path, precision), "cuda")
    assert status["device"].startswith("cuda")
    assert status["kernels"] == ("torch" if precision == "float32" else "cuda")
    for asked, expected in on_cpu.items():
        here, there = dict(expected), dict(found[asked])
        assert len(found[asked]) == len(expected)
        both = here.keys() & there.keys()
        assert len(both) >= shared * len(here) - 1, (asked, len(both))
        assert max(abs(here[item] - there[item]) for item in both) < apart, asked
        last = expected[-1][1]
        for item in here.keys() - there.keys():  # what is missing was close to the end of the list
            assert here[item] - last < 2 * apart, (asked, item)
