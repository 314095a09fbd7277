"""Mixtures of experts: the choice of experts, rows by expert, one product for all experts, and their weighted sum."""

from app.ops.grouped.operators import Dispatched, choose, combine, dispatch, product, unfit

__all__ = ["Dispatched", "choose", "combine", "dispatch", "product", "unfit"]
