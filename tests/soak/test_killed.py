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
