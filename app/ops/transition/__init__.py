"""State transitions between steps: what survivors have written, the ancestry index and the compaction."""

from app.ops.transition.operators import advance
from app.ops.transition.reference import Written, compact, extend_ancestry

__all__ = ["Written", "advance", "compact", "extend_ancestry"]
