"""Exact top-K selection under T0."""

from app.ops.selection.candidates import child_of, children_bits, count_bad, pack
from app.ops.selection.launch import MOST_COLUMNS, Ranked
from app.ops.selection.operators import one_read, ranked_ready, select_logits, select_ranked, select_top
from app.ops.selection.reference import Chosen, Selected, keys, sanitise

__all__ = [
    "MOST_COLUMNS",
    "Chosen",
    "Ranked",
    "Selected",
    "child_of",
    "children_bits",
    "count_bad",
    "keys",
    "one_read",
    "pack",
    "ranked_ready",
    "sanitise",
    "select_logits",
    "select_ranked",
    "select_top",
]
