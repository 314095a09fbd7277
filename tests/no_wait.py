"""What a GPU must be waited for: operators whose result, or its shape, is needed on the host, and copies between host
and device that do not go through pinned memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from app.ops import upload

aten = torch.ops.aten
READ = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten._unique2.default, aten.unique_dim.default,
    aten.unique_consecutive.default, aten.unique_dim_consecutive.default, aten.masked_select.default,
    aten.bincount.default, aten.repeat_interleave.Tensor, aten.equal.default, aten.is_nonzero.default,
    aten.isin.Tensor_Tensor, aten.histc.default, aten.multinomial.default, aten._linalg_check_errors.default,
}  # fmt: skip
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
FILLED = {
    aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor,
}  # fmt: skip
MADE = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}


class NoWait(ExitStack):
    """Fails at the first of them. `repeat_interleave` with its size, indices that are numbers of the device's own, and
    what `app.ops.upload` does are no waits."""

    def __init__(self, *, on: bool = True) -> None:
        super().__init__()
        self._on = on

    def __enter__(self) -> NoWait:
        super().__enter__()
        if self._on:
            self.enter_context(_Lists())
            self.enter_context(_Operators())
        return self


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        waits = func in READ and given.get("output_size") is None
        if func in INDEXED:
            indices = [one for one in args[1] if one is not None]
            waits = any(one.dtype in (torch.bool, torch.uint8) or one.device != args[0].device for one in indices)
        if func in FILLED:
            waits = args[-1].device.type != "cpu"
        if func is aten._to_copy.default:
            waits = _crosses(args[0].device, torch.device(given.get("device") or args[0].device))
        if func is aten.copy_.default:
            waits = _crosses(args[1].device, args[0].device)
        if waits:
            raise AssertionError(f"{func} waits for the device")
        with torch._C.DisableTorchFunction(), self:  # what consists of others comes whole in inference mode
            parts = func.decompose(*args, **given)
        return func(*args, **given) if parts is NotImplemented else parts


class _Lists(TorchFunctionMode):
    """Numbers of the host as a device's tensor: torch copies them from memory that is not pinned, and says so to no
    dispatcher."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        listed = False
        if func in MADE and not isinstance(args[-1], Tensor):
            own = args[0].device if func is Tensor.new_tensor else torch.get_default_device()
            listed = torch.device(given.get("device") or own).type != "cpu"
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device.type != "cpu":
            key = args[1] if isinstance(args[1], tuple) else (args[1],)
            listed = any(not isinstance(one, Tensor) and hasattr(one, "__len__") for one in key)
        if listed:
            raise AssertionError(f"{func.__name__} of a list waits for the device")
        return func(*args, **given)


def _crosses(source: torch.device, target: torch.device) -> bool:
    """Whether a copy is between host and device, and none of `app.ops.upload`."""
    if (source.type == "cpu") == (target.type == "cpu"):
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == upload.__file__:
            return False
        frame = frame.f_back
    return True
