"""Products in 8 bits: rows and output channels with scales of their own."""

from app.ops.fp8.operators import (
    EightBits,
    grouped_linear,
    linear,
    linear_into,
    quantise_gated,
    quantise_normed,
    quantise_rows,
    unfit,
)
from app.ops.fp8.reference import FP8

__all__ = [
    "FP8",
    "EightBits",
    "grouped_linear",
    "linear",
    "linear_into",
    "quantise_gated",
    "quantise_normed",
    "quantise_rows",
    "unfit",
]
