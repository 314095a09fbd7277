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


def upload_into(place: Tensor, host: Tensor) -> None:
    """`upload` to where it is to lie, in the dtype that it is to have there."""
    pinned = host.pin_memory() if place.device.type == "cuda" and host.numel() else host
    place.copy_(pinned, non_blocking=True)


def upload_ints(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor of a device."""
    return upload(torch.tensor(values, dtype=dtype), device)


def upload_beside(hosts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Host tensors on a device, there when this returns. A GPU copies them on a stream of its own: in the order of the
    others, memory that is not pinned would be copied between two batches, and neither could be launched meanwhile."""
    if device.type != "cuda":
        return [host.to(device) for host in hosts]
    made = [torch.empty_like(host, device=device) for host in hosts]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))  # what is enqueued may still read memory that was given back
    with torch.cuda.stream(stream):
        for one, host in zip(made, hosts, strict=True):
            one.copy_(host)
    stream.synchronize()
    return made
