"""Products of rows with a matrix, by the quickest of cuBLASLt's algorithms where one was chosen."""

from app.ops.product.choice import Choice, choose
from app.ops.product.operators import product, product_into, product_onto, scaled
from app.ops.product.reference import Scales

__all__ = ["Choice", "Scales", "choose", "product", "product_into", "product_onto", "scaled"]
