"""Every promise of docs/guarantees.md names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_named_test_exists():
    text, file, named = (ROOT / "docs" / "guarantees.md").read_text(), "", 0
    for place in re.findall(r"`((?:[a-z_]+/)*[a-z_]*(?:\.py)?(?:::[a-z0-9_]+)?)`", text):
        path, _, test = place.partition("::")
        if path.endswith(".py"):
            file = path
            assert (ROOT / "tests" / file).is_file(), place
        if test:
            named += 1
            assert re.search(rf"^(async )?def {test}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), place
    assert named > 15
