"""kill -9 at any moment of an update: the next start serves the old or the new version, whole."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.runtime.test_cutover import HISTORIES, Truth, takedown, weights, world
from tests.served.process import serving

ROUNDS = 12


@pytest.mark.timeout(1200)
def test_a_server_that_is_killed_in_the_middle_of_an_update_comes_back_whole(tmp_path):
    root, rng = world(tmp_path), random.Random(7)
    truth, version = Truth(root), 1
    for n in range(ROUNDS):
        with serving(root) as server:
            server.ready()
            for history in HISTORIES:
                answer = server.ask(*history, policy="base").json()
                assert int(answer["versions"]["weights"][1:]) in {version, version - 1}
                truth.check(answer, history)
            version += 1
            weights(root, f"v{version}", version)
            (root / "policies" / "narrow.yaml").write_text(f"widebeam: 1\nwidths: [{2 + n % 5}, 3, 3]\n")
            if n == ROUNDS // 2:
                takedown(root, "v1", ["nobody"])
            time.sleep(rng.uniform(0, 0.6))
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        for path in (root / "state").rglob("*"):
            assert path.is_dir() or path.name.startswith(".tmp-") or path.read_bytes(), path


STAGES = ("discovered", "verifying", "loading", "validating", "warming", "ready", "active")


@pytest.mark.timeout(1200)
def test_a_server_that_is_killed_at_each_stage_of_an_update_comes_back_whole(tmp_path):
    root = world(tmp_path)
    truth = Truth(root)
    for version, stage in enumerate(STAGES, 2):
        with serving(root) as server:
            server.ready()
            weights(root, f"v{version}", version)
            reached = {"event": "artifact", "kind": "weights", "version": f"v{version}", "state": stage}
            server.until(lambda said=reached: any(said.items() <= line.items() for line in server.lines), stage)
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        with serving(root) as server:
            server.ready()
            for history in HISTORIES:
                answer = server.ask(*history, policy="base").json()
                truth.check(answer, history)
            wanted = f"v{version}"
            server.until(lambda v=wanted: server.status()["active"]["weights"]["version"] == v, "the new version")
            assert server.stop() == 0
