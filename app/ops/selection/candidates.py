"""What surrounds a selection: candidates as bits, the trie nodes of what was chosen, and what was wrong with a step's
numbers: `candidates.cu`, and the same in torch.

Registered with `torch.library`, so that torch.export and torch.compile see one node each; the runtime's own tensors go
to the function at once, as torch's way to an operator of its own takes longer than a launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from app.ops import cuda
from app.ops.library import register, traced

SOURCE = Path(__file__).with_name("candidates.cu")
THREADS = 256


def pack(code: Tensor | None, legal: Tensor, codes: int) -> Tensor:
    """A bit for each code of a row: bit c % 8 of byte c // 8, the mask of `select_logits`.

    code [n, F] int64, distinct in a row; None: column f is code f · legal [n, F] bool · codes C.
    Returns [n, 4 ceil(C / 32)] uint8.
    """
    if traced(legal):
        bits: Tensor = torch.ops.widebeam.pack_bits(legal, code, codes)
        return bits
    return _pack(legal, code, codes)


def children_bits(
    first: Tensor, code: Tensor, node: Tensor, widest: int, codes: int, *, dead: Tensor, request: Tensor, nodes: int
) -> Tensor:
    """The legal children of each row's node as bits (see `pack`), without a list of them.

    first [nodes + 1], code [edges] integer: the tree of `app.ops.trie` · node [n] int64, -1 = none · widest: most
    children of such a node · codes C · dead [D] int64, ascending: request * nodes + child of what is not legal ·
    request [n] int64
    """
    if traced(node):
        bits: Tensor = torch.ops.widebeam.children_bits(first, code, node, widest, codes, dead, request, nodes)
        return bits
    return _children_bits(first, code, node, widest, codes, dead, request, nodes)


def child_of(first: Tensor, code: Tensor, node: Tensor, parent: Tensor, wanted: Tensor, widest: int) -> Tensor:
    """The node that each code leads to from its parent's (the tree of `app.ops.trie`), -1 where there is none.

    first [nodes + 1], code [edges] integer · node [n] int64 · parent, wanted [m] int64: row of `node`, and code; -1 =
    none, each of them · widest: most children of such a node
    """
    if traced(parent):
        found: Tensor = torch.ops.widebeam.child_of(first, code, node, parent, wanted, widest)
        return found
    return _child_of(first, code, node, parent, wanted, widest)


def count_bad(bad: Tensor | None, broken: Sequence[Tensor], score: Tensor, row_start: Tensor) -> Tensor:
    """What was wrong with a step's numbers: [2 R + 1] int64: bad logits in the living rows of each request, its living
    rows, and bad scores of all.

    bad [n] integer: bad logits of a row; None = there are none, and then living rows are not counted either · broken
    [m] integer each, any m: bad scores · score [n] float32: of a row, -inf = a tombstone · row_start [R + 1] int32: the
    rows of request r are row_start[r]:row_start[r + 1]
    """
    if traced(score):
        counts: Tensor = torch.ops.widebeam.count_bad(score, bad, list(broken), row_start)
        return counts
    return _count_bad(score, bad, broken, row_start)


def _pack(legal: Tensor, code: Tensor | None, codes: int) -> Tensor:
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


def _children_bits(
    first: Tensor, code: Tensor, node: Tensor, widest: int, codes: int, dead: Tensor, request: Tensor, nodes: int
) -> Tensor:
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
    return _pack(legal, code[edge.clamp_(max=len(code) - 1)].to(torch.int64), codes)


def _child_of(first: Tensor, code: Tensor, node: Tensor, parent: Tensor, wanted: Tensor, widest: int) -> Tensor:
    if _fits(first, code):
        found = torch.empty_like(parent)
        kernel = cuda.load(SOURCE, "child", node.device, WIDE=int(first.dtype == torch.int64))
        if len(parent):
            operands = [one.contiguous() for one in (first, code, node, parent, wanted)]
            blocks = _parts(len(parent), THREADS)
            kernel.launch(blocks, THREADS, *(one.data_ptr() for one in operands), found.data_ptr(), len(parent))
        return found
    before = node[parent.clamp(min=0)]
    at = before.clamp(min=0)
    low, end = first[at].to(torch.int64), first[at + 1].to(torch.int64)
    high = end
    for _ in range(max(1, widest).bit_length()):
        middle = (low + high) // 2
        less = (low < high) & (code[middle.clamp(max=len(code) - 1)] < wanted)
        low, high = torch.where(less, middle + 1, low), torch.where(less, high, middle)
    hit = (parent >= 0) & (before >= 0) & (wanted >= 0)
    hit &= (low < end) & (code[low.clamp(max=len(code) - 1)] == wanted)
    return torch.where(hit, low + 1, -1)


def _count_bad(score: Tensor, bad: Tensor | None, broken: Sequence[Tensor], row_start: Tensor) -> Tensor:
    requests, device = len(row_start) - 1, score.device
    if bad is not None and len(broken) <= 1 and _countable(bad, *broken):
        counts = torch.empty(2 * requests + 1, dtype=torch.int64, device=device)
        operands = [one.contiguous() for one in (score, row_start, counts, bad, *broken)]
        at = [one.data_ptr() for one in operands] + [0] * (1 - len(broken))
        kernel = cuda.load(SOURCE, "count", device, WIDE=0)
        kernel.launch(requests + 1, THREADS, *at, requests, sum(map(len, broken)))
        return counts
    counts = torch.zeros(2 * requests + 1, dtype=torch.int64, device=device)
    if bad is not None:
        alive = score > -torch.inf
        before = pad(torch.stack((bad * alive, alive)).cumsum(1), (1, 0))
        counts[:-1] = before.index_select(1, row_start).diff(dim=1).flatten()
    for one in broken:
        counts[-1:].add_(one.sum())
    return counts


def _fits(first: Tensor, code: Tensor) -> bool:
    """Whether the kernels take the tree: as a vocab writes it, on a GPU."""
    served = first.dtype in {torch.int32, torch.int64} and code.dtype == torch.int32
    return served and cuda.unfit(first.device) is None


def _countable(*given: Tensor) -> bool:
    """Whether the kernel takes these counts: as the kernels of the selection write them, on a GPU."""
    return all(one.dtype == torch.int32 and cuda.unfit(one.device) is None for one in given)


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)


# ---- and their shapes ----------------------------------------------------------------------------------------------


def _bits_like(rows: Tensor, codes: int) -> Tensor:
    return rows.new_empty(rows.shape[0], _parts(codes, 32) * 4, dtype=torch.uint8)


def _pack_shape(legal: Tensor, _code: Tensor | None, codes: int) -> Tensor:
    return _bits_like(legal, codes)


def _children_shape(_first: Tensor, _code: Tensor, node: Tensor, _widest: int, codes: int, *_: object) -> Tensor:
    return _bits_like(node, codes)


def _child_shape(_first: Tensor, _code: Tensor, _node: Tensor, parent: Tensor, *_: object) -> Tensor:
    return parent.new_empty(parent.shape)


def _counts_shape(score: Tensor, _bad: object, _broken: object, row_start: Tensor) -> Tensor:
    return score.new_empty(2 * (row_start.shape[0] - 1) + 1, dtype=torch.int64)


_TREE = "Tensor first, Tensor code, Tensor node"
register("pack_bits(Tensor legal, Tensor? code, int codes) -> Tensor", _pack, _pack_shape)
register(
    f"children_bits({_TREE}, int widest, int codes, Tensor dead, Tensor request, SymInt nodes) -> Tensor",
    _children_bits,
    _children_shape,
)
register(f"child_of({_TREE}, Tensor parent, Tensor wanted, int widest) -> Tensor", _child_of, _child_shape)
register("count_bad(Tensor score, Tensor? bad, Tensor[] broken, Tensor row_start) -> Tensor", _count_bad, _counts_shape)
