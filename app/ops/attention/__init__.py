"""Attention over a shared context and over short SID prefixes."""

from app.ops.attention.reference import causal_attention, context_attention, extend_attention, merge, prefix_attention

__all__ = ["causal_attention", "context_attention", "extend_attention", "merge", "prefix_attention"]
