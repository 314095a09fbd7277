"""State transitions between steps: the ancestry index and the compaction."""

from app.ops.transition.reference import compact, extend_ancestry

__all__ = ["compact", "extend_ancestry"]
