"""Operators after which a GPU must be waited for: their result, or its shape, is needed on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READ = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten._unique2.default, aten.unique_dim.default,
    aten.unique_consecutive.default, aten.unique_dim_consecutive.default, aten.masked_select.default,
    aten.bincount.default, aten.repeat_interleave.Tensor, aten.equal.default, aten.is_nonzero.default,
    aten.isin.Tensor_Tensor, aten.histc.default,
}  # fmt: skip
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}


class NoWait(TorchDispatchMode):
    """Fails at the first of them, and at copies to the host. `repeat_interleave` with its size, and indices that are
    numbers, are no waits."""

    def __init__(self, *, on: bool = True) -> None:
        super().__init__()
        self._on = on

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operator itself, if nobody waits for it."""
        given = dict(kwargs or {})
        waits = func in READ and given.get("output_size") is None
        if func in INDEXED:
            waits = any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
        if func is aten._to_copy.default:
            waits = given.get("device") == torch.device("cpu") and args[0].device.type != "cpu"
        if waits and self._on:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **given)
