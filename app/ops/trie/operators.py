"""The trie operators as the runtime calls them: on an NVIDIA GPU one pass over the output each (`kernel.cu`).
Elsewhere, and without CuPy, torch's operators (`reference.py`)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from app.ops import cuda
from app.ops.trie import reference
from app.ops.trie.reference import Children

_SOURCE = Path(__file__).with_name("kernel.cu")
_THREADS = 256


def children(first: Tensor, code: Tensor, node: Tensor, widest: int) -> Children:
    """`reference.children`, always `widest` wide on a GPU."""
    n, device = node.shape[0], node.device
    if not _fits(first, code) or not n or not code.shape[0]:
        return reference.children(first, code, node, widest)
    codes, nodes = (torch.empty((n, widest), dtype=torch.int64, device=device) for _ in range(2))
    legal = torch.empty((n, widest), dtype=torch.bool, device=device)
    node = node.contiguous()
    _kernel("children", first).launch(
        -(-n * widest // _THREADS), _THREADS, first.data_ptr(), code.data_ptr(), node.data_ptr(), codes.data_ptr(),
        nodes.data_ptr(), legal.data_ptr(), n, widest,
    )  # fmt: skip
    return Children(codes, nodes, legal)


def dense(first: Tensor, code: Tensor, node: Tensor, widest: int, size: int) -> Children:
    """`reference.dense`."""
    n, device = node.shape[0], node.device
    if not _fits(first, code) or not n or not code.shape[0]:
        return reference.dense(first, code, node, widest, size)
    nodes = torch.empty((n, size), dtype=torch.int64, device=device)
    node = node.contiguous()
    _kernel("dense", first).launch(
        min(n, 1 << 20), _THREADS, first.data_ptr(), code.data_ptr(), node.data_ptr(), nodes.data_ptr(), n, size
    )
    every = torch.arange(size, device=device).expand(n, size)
    return Children(every, nodes, torch.ones((), dtype=torch.bool, device=device).expand(n, size))


def contains(sorted_keys: Tensor, node: Tensor, request: Tensor, nodes: int) -> Tensor:
    """`reference.contains`."""
    count = sorted_keys.shape[0]
    if cuda.unfit(node.device) is not None or not count or not node.numel():
        return reference.contains(sorted_keys, node, request, nodes)
    n, wide = node.shape
    found = torch.empty((n, wide), dtype=torch.bool, device=node.device)
    keys, request = sorted_keys.contiguous(), request.to(torch.int64).contiguous()
    _kernel("contains", sorted_keys).launch(
        -(-n * wide // _THREADS), _THREADS, keys.data_ptr(), node.data_ptr(), request.data_ptr(), found.data_ptr(),
        n, wide, *node.stride(), nodes, count,
    )  # fmt: skip
    return found


def _kernel(name: str, first: Tensor) -> cuda.Kernel:
    return cuda.load(_SOURCE, name, first.device, WIDE=int(first.dtype == torch.int64))


def _fits(first: Tensor, code: Tensor) -> bool:
    """Whether the kernel takes the tree: as a vocab writes it, on a GPU."""
    served = first.dtype in {torch.int32, torch.int64} and code.dtype == torch.int32
    return served and cuda.unfit(first.device) is None and first.is_contiguous() and code.is_contiguous()
