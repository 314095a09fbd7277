"""The demo root for both devices, and when two answers are the same up to a precision's rounding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
USERS = json.loads((REPOSITORY / "examples/movielens/users.json").read_text())
K = 50
POLICIES = ("base", "narrow", "unseen", "rising")
PRECISIONS = {"float32": (1e-3, 1.0), "float16": (0.02, 0.9), "bfloat16": (0.15, 0.8)}
"""How far apart scores may be, in nats, and which share of a list must be the same."""

Answer = Sequence[tuple[str, float]]


def root_of(directory: Path, precision: str) -> Path:
    """A copy of the repository's own root, with the contracts that have been made there: an export takes a while."""
    for name in ("weights", "vocab", "policies", "contracts"):
        if name != "contracts" or (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, directory / name)
    text = (REPOSITORY / "deployment.toml").read_text()
    (directory / "deployment.toml").write_text(
        f'precision = "{precision}"\n'
        + text.replace("[server]", "[server]\nport = 0\nadmin_port = 0\ndrain_delay_s = 0.05")
    )
    return directory


def assert_alike(found: Mapping[object, Answer], expected: Mapping[object, Answer], precision: str) -> None:
    """The same items with the same scores, but for what is close to the end of a list."""
    apart, shared = PRECISIONS[precision]
    assert found.keys() == expected.keys()
    for asked, answer in expected.items():
        here, there = dict(answer), dict(found[asked])
        assert len(found[asked]) == len(answer)
        both = here.keys() & there.keys()
        assert len(both) >= shared * len(here) - 1, (asked, len(both))
        assert max(abs(here[item] - there[item]) for item in both) < apart, asked
        for item in here.keys() - there.keys():
            assert here[item] - answer[-1][1] < 2 * apart, (asked, item)
