"""Operators that torch.export and torch.compile see as one: registered with `torch.library` by definition and
implementation, which costs a sixth of what the decorator costs a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_torch: Any = torch.library
_LIBRARY = _torch.Library("widebeam", "FRAGMENT")


def register(
    schema: str, function: Callable[..., Any], shapes: Callable[..., Any], host: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Make `torch.ops.widebeam.<name>`, once a process. Returns what calls it: a CPU's own tensors go straight to
    `host`, or to the function where none is given: a small batch takes longer to be sent there than to be computed.

    schema    name, arguments and results as torch.library writes them; results share no memory with arguments
    function  computes it on a CPU and on a GPU; takes all arguments by position
    shapes    takes the same arguments and gives empty results of their shapes, dtypes and strides
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, function, key)
    _torch.register_fake(f"widebeam::{name}", shapes, lib=_LIBRARY)
    operator, own = getattr(torch.ops.widebeam, name), host or function

    def call(first: Tensor, *rest: Any) -> Any:
        return own(first, *rest) if eager(first) else operator(first, *rest)

    return call


def eager(tensor: Tensor) -> bool:
    """Whether it is a CPU's own tensor that is computed with now: not a tracer's, nor a parameter."""
    return tensor.is_cpu and not traced(tensor)


def traced(tensor: Tensor) -> bool:
    """Whether it may be a tracer's (torch.export's, torch.compile's, FakeTensorMode's): then the operator is asked,
    elsewhere its function may be called at once. Of a parameter it is said, too; the operator takes it as well."""
    return type(tensor) is not Tensor or torch.compiler.is_compiling()
