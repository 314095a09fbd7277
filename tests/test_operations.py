"""docs/operations.md and SECURITY.md name what there is."""

from __future__ import annotations

import re
from pathlib import Path

from app.errors import DeadlineTooShort, QueueFull
from app.runtime.metrics import Metrics

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")
SECURITY = (ROOT / "SECURITY.md").read_text("utf-8")


def test_every_metric_that_is_alerted_on_exists():
    families = {family.name: family.type for family in Metrics().registry.collect()}
    named = set(re.findall(r"\b(?:widebeam|process)_[a-z_]+", PAGE))
    assert len(named) > 15
    ends = {"counter": ("_total",), "histogram": ("", "_bucket"), "info": ("_info",), "gauge": ("",)}
    there = {name + end for name, kind in families.items() for end in ends[kind]}
    assert named <= there, named - there


def test_reasons_and_outcomes_that_are_named_are_those_of_the_server():
    for error in (QueueFull, DeadlineTooShort):
        assert f"`{error.code}`" in PAGE


def test_links_lead_somewhere():
    for folder, text in ((ROOT / "docs", PAGE), (ROOT, SECURITY)):
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([\w-]+))?\)", text):
            file = folder / target
            assert file.is_file(), target
            titles = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
            known = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert not anchor or anchor in known, (target, anchor)
