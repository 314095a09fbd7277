"""Operators that torch.export and torch.compile see as one: registered with `torch.library` by definition and
implementation, which costs a sixth of what the decorator costs a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_torch: Any = torch.library
_LIBRARY = _torch.Library("widebeam", "FRAGMENT")


def register(schema: str, function: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Make `torch.ops.widebeam.<name>`, once a process.

    schema    name, arguments and results as torch.library writes them; results share no memory with arguments
    function  computes it on a CPU and on a GPU; takes all arguments by position
    shapes    takes the same arguments and gives empty results of their shapes, dtypes and strides
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, function, key)
    _torch.register_fake(f"widebeam::{name}", shapes, lib=_LIBRARY)
