"""Exact top-K selection under T0."""

from app.ops.selection.candidates import child_of, children_bits, pack
from app.ops.selection.operators import one_read, select_logits, select_top
from app.ops.selection.reference import Chosen, Selected, keys, sanitise

__all__ = [
    "Chosen",
    "Selected",
    "child_of",
    "children_bits",
    "keys",
    "one_read",
    "pack",
    "sanitise",
    "select_logits",
    "select_top",
]
