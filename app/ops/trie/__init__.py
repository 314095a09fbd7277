"""Prefix trees of SIDs on a device."""

from app.ops.trie.operators import children, contains, dense
from app.ops.trie.reference import Children

__all__ = ["Children", "children", "contains", "dense"]
