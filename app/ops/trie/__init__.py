"""Prefix trees of SIDs on a device."""

from app.ops.trie.reference import Children, children, contains, dense

__all__ = ["Children", "children", "contains", "dense"]
