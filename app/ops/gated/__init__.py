"""The gate of a SwiGLU."""

from app.ops.gated.operators import gated

__all__ = ["gated"]
