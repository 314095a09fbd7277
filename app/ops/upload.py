"""From the host to a device without waiting for what the device does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device. A GPU reads it from pinned memory, in the order of the current stream: the host goes
    on at once, and may change what it gave."""
    if device.type != "cuda":
        return host.to(device)
    if not host.numel():
        return torch.empty_like(host, device=device)
    return host.pin_memory().to(device, non_blocking=True)


def upload_ints(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor of a device."""
    return upload(torch.tensor(values, dtype=dtype), device)
