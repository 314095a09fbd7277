from __future__ import annotations

from app.policies.names import FINAL_PHASES, NAMES, NORMALIZE, STEP_PHASES
from app.policies.resolve import content_text, default_of


def test_phases_stand_in_the_order_in_which_they_run():
    assert list(STEP_PHASES) == ["logits", "normalize", "mask", "keep", "score", "rank", "prune", "quota", "select"]
    assert list(FINAL_PHASES) == ["expand", "mask", "score", "dedupe", "quota", "rerank", "limit"]


def test_defaults_are_written_in_their_canonical_text():
    for phase in (*STEP_PHASES.values(), *FINAL_PHASES.values()):
        assert content_text(default_of(phase)) == phase.default


def test_phases_with_names_are_phases():
    assert set(NAMES) <= set(STEP_PHASES) | {f"final.{word}" for word in FINAL_PHASES}
    assert STEP_PHASES["normalize"].default in NORMALIZE
