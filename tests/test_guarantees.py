"""Every promise of docs/guarantees.md names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guarantees.md").read_text()


def test_every_named_test_exists():
    file, named = "", 0
    for place in re.findall(r"`((?:[a-z_]+/)*[a-z_]*(?:\.py)?(?:::[a-z0-9_]+)?)`", PAGE):
        path, _, test = place.partition("::")
        if path.endswith(".py"):
            file = path
            assert (ROOT / "tests" / file).is_file(), place
        if test:
            named += 1
            assert re.search(rf"^(async )?def {test}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), place
    assert named > 15


def test_promises_are_numbered_and_each_has_its_test():
    parts = re.split(r"^(\d+)\. ", PAGE.partition("Not promised yet")[0], flags=re.MULTILINE)[1:]
    assert [int(number) for number in parts[::2]] == list(range(1, len(parts) // 2 + 1))
    for number, promise in zip(parts[::2], parts[1::2], strict=True):
        assert re.search(r"\.py\b|`::test_", promise), number


def test_no_line_is_longer_than_120_columns():
    assert [line for line in PAGE.splitlines() if len(line) > 120] == []
