"""Operators whose control flow depends on the values of tensors, as one node of a graph that torch.export makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def as_node(schema: str, shapes: Callable[..., Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate an operator that an export cannot look into: while one is made, a call becomes the node
    `widebeam_graph::name` of the graph. Everywhere else the function itself runs.

    schema  of its arguments, all by position, and results, as torch.library writes it; results may not share memory
            with arguments
    shapes  takes the same arguments and gives empty results of their shapes and dtypes
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        named = [name for name, one in signature.parameters.items() if one.kind is one.KEYWORD_ONLY]
        free = len(signature.parameters) - len(named)

        def positional(*values: Any) -> T:
            return function(*values[:free], **dict(zip(named, values[free:], strict=True)))

        @cache
        def node() -> Callable[..., T]:
            name = f"widebeam_graph::{function.__name__.lstrip('_')}"
            made: Any = torch.library.custom_op(name, positional, mutates_args=(), schema=schema)
            made.register_fake(shapes)
            return made  # type: ignore[no-any-return]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not torch.compiler.is_exporting():
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return node()(*bound.arguments.values())

        return call

    return decorate
