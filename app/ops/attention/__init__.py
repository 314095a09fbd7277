"""Attention over a shared context and over short SID prefixes."""

from app.ops.attention.operators import (
    beam_attention,
    causal_attention,
    context_attention,
    extend_attention,
    prefix_attention,
    prefix_attention_with_lse,
)
from app.ops.attention.reference import merge

__all__ = [
    "beam_attention",
    "causal_attention",
    "context_attention",
    "extend_attention",
    "merge",
    "prefix_attention",
    "prefix_attention_with_lse",
]
