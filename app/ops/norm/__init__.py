"""Root mean square norms."""

from app.ops.norm.operators import rms_norm

__all__ = ["rms_norm"]
