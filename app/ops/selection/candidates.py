"""Candidates as bits, and the trie nodes of what was chosen: `candidates.cu`, and the same in torch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from app.ops import cuda

SOURCE = Path(__file__).with_name("candidates.cu")
THREADS = 256


def pack(code: Tensor | None, legal: Tensor, codes: int) -> Tensor:
    """A bit for each code of a row: bit c % 8 of byte c // 8, the mask of `select_logits`.

    code [n, F] int64, distinct in a row; None: column f is code f · legal [n, F] bool · codes C.
    Returns [n, 4 ceil(C / 32)] uint8.
    """
    n, columns = legal.shape
    stride = _parts(codes, 32) * 4
    if cuda.unfit(legal.device) is None:
        given, flags = None if code is None else code.contiguous(), legal.contiguous()
        mask = torch.empty(n, stride, dtype=torch.uint8, device=legal.device)
        kernel = cuda.load(SOURCE, "pack", legal.device, memory=stride, WIDE=0)
        if n:
            at = 0 if given is None else given.data_ptr()
            kernel.launch(n, THREADS, at, flags.data_ptr(), mask.data_ptr(), columns, stride)
        return mask
    whole = torch.zeros(n, 8 * stride + 1, dtype=torch.uint8, device=legal.device)
    if code is None:
        whole[:, :columns] = legal
    else:
        whole.scatter_(1, code.masked_fill(~legal, 8 * stride), 1)
    bits = whole[:, :-1].view(n, stride, 8) << torch.arange(8, dtype=torch.uint8, device=legal.device)
    return bits.sum(2, dtype=torch.uint8)


def children_bits(
    first: Tensor, code: Tensor, node: Tensor, widest: int, codes: int, *, dead: Tensor, request: Tensor, nodes: int
) -> Tensor:
    """The legal children of each row's node as bits (see `pack`), without a list of them.

    first [nodes + 1], code [edges] integer: the tree of `app.ops.trie` · node [n] int64, -1 = none · widest: most
    children of such a node · codes C · dead [D] int64, ascending: request * nodes + child of what is not legal ·
    request [n] int64
    """
    n = len(node)
    if _fits(first, code):
        stride = _parts(codes, 32) * 4
        mask = torch.empty(n, stride, dtype=torch.uint8, device=node.device)
        wide = int(first.dtype == torch.int64)
        kernel = cuda.load(SOURCE, "children", node.device, memory=stride, WIDE=wide)
        operands = [one.contiguous() for one in (first, code, node, request, dead)]
        if n:
            kernel.launch(n, THREADS, *(one.data_ptr() for one in operands), mask.data_ptr(), stride, nodes, len(dead))
        return mask
    at = node.clamp(min=0)
    low, high = first[at].to(torch.int64), first[at + 1].to(torch.int64)
    edge = low.unsqueeze(1) + torch.arange(widest, device=node.device)
    legal = (edge < high.unsqueeze(1)) & (node >= 0).unsqueeze(1)
    if len(dead):
        key = request.unsqueeze(1) * nodes + edge + 1
        legal &= dead[torch.searchsorted(dead, key).clamp_(max=len(dead) - 1)] != key
    return pack(code[edge.clamp_(max=len(code) - 1)].to(torch.int64), legal, codes)


def child_of(first: Tensor, code: Tensor, node: Tensor, wanted: Tensor, widest: int) -> Tensor:
    """The node that each code leads to (the tree of `app.ops.trie`), -1 where there is none.

    first [nodes + 1], code [edges] integer · node, wanted [m] int64, -1 = none · widest: most
    children of such a node
    """
    if _fits(first, code):
        found = torch.empty_like(node)
        kernel = cuda.load(SOURCE, "child", node.device, WIDE=int(first.dtype == torch.int64))
        if len(node):
            operands = [one.contiguous() for one in (first, code, node, wanted)]
            blocks = -(-len(node) // THREADS)
            kernel.launch(blocks, THREADS, *(one.data_ptr() for one in operands), found.data_ptr(), len(node))
        return found
    at = node.clamp(min=0)
    low, end = first[at].to(torch.int64), first[at + 1].to(torch.int64)
    high = end
    for _ in range(max(1, widest).bit_length()):
        middle = (low + high) // 2
        less = (low < high) & (code[middle.clamp(max=len(code) - 1)] < wanted)
        low, high = torch.where(less, middle + 1, low), torch.where(less, high, middle)
    hit = (node >= 0) & (wanted >= 0) & (low < end) & (code[low.clamp(max=len(code) - 1)] == wanted)
    return torch.where(hit, low + 1, -1)


def _fits(first: Tensor, code: Tensor) -> bool:
    """Whether the kernels take the tree: as a vocab writes it, on a GPU."""
    served = first.dtype in {torch.int32, torch.int64} and code.dtype == torch.int32
    return served and cuda.unfit(first.device) is None


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)
