"""The gate of a SwiGLU, and its product with it."""

from app.ops.gated.operators import gated, gated_product, gates_itself

__all__ = ["gated", "gated_product", "gates_itself"]
