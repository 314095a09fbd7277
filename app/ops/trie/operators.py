"""The trie operators as the runtime calls them: on an NVIDIA GPU one pass over the output each (`kernel.cu`).
Elsewhere, and without CuPy, torch's operators (`reference.py`).

Registered with `torch.library`, so that torch.export and torch.compile see one node each; the runtime's own tensors go
to the function at once, as torch's way to an operator of its own takes longer than a launch.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from app.ops import cuda
from app.ops.library import register, traced
from app.ops.trie import reference
from app.ops.trie.reference import Children

_SOURCE = Path(__file__).with_name("kernel.cu")
_THREADS = 256


def children(first: Tensor, code: Tensor, node: Tensor, widest: int) -> Children:
    """`reference.children`; on a CPU no wider than these rows need, where no graph is made of it."""
    if traced(node):
        return Children(*torch.ops.widebeam.trie_children(first, code, node, widest))
    return _children(first, code, node, widest, narrow=node.is_cpu)


def dense(first: Tensor, code: Tensor, node: Tensor, widest: int, size: int) -> Children:
    """`reference.dense`."""
    if traced(node):
        return reference.every(torch.ops.widebeam.trie_nodes(first, code, node, widest, size))
    return reference.every(_nodes(first, code, node, widest, size, narrow=node.is_cpu))


def contains(sorted_keys: Tensor, node: Tensor, request: Tensor, nodes: int) -> Tensor:
    """`reference.contains`."""
    if traced(node):
        found: Tensor = torch.ops.widebeam.trie_contains(sorted_keys, node, request, nodes)
        return found
    return _contains(sorted_keys, node, request, nodes)


def _children(first: Tensor, code: Tensor, node: Tensor, widest: int, *, narrow: bool = False) -> Children:
    n, device = node.shape[0], node.device
    if not _fits(first, code) or not n or not code.shape[0]:
        return reference.children(first, code, node, widest, narrow=narrow)
    codes, nodes = (torch.empty((n, widest), dtype=torch.int64, device=device) for _ in range(2))
    legal = torch.empty((n, widest), dtype=torch.bool, device=device)
    node = node.contiguous()
    _kernel("children", first).launch(
        -(-n * widest // _THREADS), _THREADS, first.data_ptr(), code.data_ptr(), node.data_ptr(), codes.data_ptr(),
        nodes.data_ptr(), legal.data_ptr(), n, widest,
    )  # fmt: skip
    return Children(codes, nodes, legal)


def _nodes(first: Tensor, code: Tensor, node: Tensor, widest: int, size: int, *, narrow: bool = False) -> Tensor:
    n, device = node.shape[0], node.device
    if not _fits(first, code) or not n or not code.shape[0]:
        return reference.dense_nodes(first, code, node, widest, size, narrow=narrow)
    nodes = torch.empty((n, size), dtype=torch.int64, device=device)
    node = node.contiguous()
    _kernel("dense", first).launch(
        min(n, 1 << 20), _THREADS, first.data_ptr(), code.data_ptr(), node.data_ptr(), nodes.data_ptr(), n, size
    )
    return nodes


def _contains(sorted_keys: Tensor, node: Tensor, request: Tensor, nodes: int) -> Tensor:
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


# ---- as torch's graphs have them: always `widest` wide, and contiguous --------------------------------------------


def _children_node(first: Tensor, code: Tensor, node: Tensor, widest: int) -> tuple[Tensor, Tensor, Tensor]:
    return _children(first, code, node, widest)


def _nodes_node(first: Tensor, code: Tensor, node: Tensor, widest: int, size: int) -> Tensor:
    return _nodes(first, code, node, widest, size).contiguous()


def _contains_node(sorted_keys: Tensor, node: Tensor, request: Tensor, nodes: int) -> Tensor:
    return _contains(sorted_keys, node, request, nodes).contiguous()


def _children_shapes(_first: Tensor, _code: Tensor, node: Tensor, widest: int) -> tuple[Tensor, Tensor, Tensor]:
    codes, nodes = (node.new_empty(node.shape[0], widest, dtype=torch.int64) for _ in range(2))
    return codes, nodes, node.new_empty(node.shape[0], widest, dtype=torch.bool)


def _nodes_shape(_first: Tensor, _code: Tensor, node: Tensor, _widest: int, size: int) -> Tensor:
    return node.new_empty(node.shape[0], size, dtype=torch.int64)


def _contains_shape(_keys: Tensor, node: Tensor, *_: object) -> Tensor:
    return node.new_empty(node.shape, dtype=torch.bool)


_TREE = "Tensor first, Tensor code, Tensor node, int widest"
register(f"trie_children({_TREE}) -> (Tensor, Tensor, Tensor)", _children_node, _children_shapes)
register(f"trie_nodes({_TREE}, int size) -> Tensor", _nodes_node, _nodes_shape)
register(
    "trie_contains(Tensor sorted_keys, Tensor node, Tensor request, SymInt nodes) -> Tensor",
    _contains_node,
    _contains_shape,
)
