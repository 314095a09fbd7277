"""Exact top-K selection under T0."""

from app.ops.selection.reference import Selected, keys, sanitise, select_top

__all__ = ["Selected", "keys", "sanitise", "select_top"]
