"""Walking a prefix tree of SIDs on a device: children of rows, membership of dense codes, dead prefixes.

The tree is breadth-first: `first [nodes + 1]` are edge ranges, `code [edges]` is ascending inside a node, and edge e
leads to node e + 1, so that there is no child array. Node -1 is no prefix of the catalogue.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Children(NamedTuple):
    """Candidates of n rows, F a row. code [n, F] int64 ascending · node [n, F] int64 the child, -1 = no such prefix ·
    legal [n, F] bool."""

    code: Tensor
    node: Tensor
    legal: Tensor


def children(first: Tensor, code: Tensor, node: Tensor, widest: int, *, narrow: bool = False) -> Children:
    """The children of each row's node, `widest` columns, without a host round trip.

    first [nodes + 1], code [edges] integer · node [n] int64 · widest: most children of any node of this depth · narrow:
    no more columns than these rows have children, which is asked on the host. Padding repeats a row's first code, or 0
    where it has none, and is not legal.
    """
    at = node.clamp(min=0)
    low, high = first.unfold(0, 2, 1).index_select(0, at).to(torch.int64).unbind(1)
    high = torch.where(node < 0, low, high)
    if narrow and len(node):
        widest = max(1, int((high - low).amax()))
    start = low.unsqueeze(1)
    edge = start + torch.arange(widest, device=node.device)
    legal = edge < high.unsqueeze(1)
    edge = torch.where(legal, edge, start).clamp_(max=len(code) - 1)
    codes = code.index_select(0, edge.view(-1)).view(edge.shape).to(torch.int64)
    codes.masked_fill_((low == high).unsqueeze(1), 0)  # another depth's code may be none of this one
    return Children(codes, torch.where(legal, edge + 1, -1), legal)


def dense(first: Tensor, code: Tensor, node: Tensor, widest: int, size: int) -> Children:
    """Every code 0..size-1 of each row as a candidate; `node` tells which lead to a prefix of the catalogue."""
    return every(dense_nodes(first, code, node, widest, size))


def dense_nodes(first: Tensor, code: Tensor, node: Tensor, widest: int, size: int, *, narrow: bool = False) -> Tensor:
    """[n, size] int64: the node that each code of each row leads to, -1 = none. narrow: see `children`"""
    some = children(first, code, node, widest, narrow=narrow)
    target = torch.full((len(node), size + 1), -1, dtype=torch.int64, device=node.device)
    target.scatter_(1, some.code.masked_fill(~some.legal, size), some.node)
    return target[:, :size]


def every(nodes: Tensor) -> Children:
    """All codes of each row as candidates, of which `nodes` [n, size] says where they lead."""
    code = torch.arange(nodes.shape[1], device=nodes.device).expand(nodes.shape)
    return Children(code, nodes, torch.ones((), dtype=torch.bool, device=nodes.device).expand(nodes.shape))


def contains(sorted_keys: Tensor, node: Tensor, request: Tensor, nodes: int) -> Tensor:
    """Whether a candidate's prefix is in its request's set.

    sorted_keys [D] int64: request * nodes + node, ascending · node [n, F] int64 · request [n] int64.
    Returns [n, F] bool; node -1 is in no set.
    """
    key = (request.unsqueeze(1) * nodes + node).masked_fill(node < 0, -1)
    if not len(sorted_keys):
        return torch.zeros_like(node, dtype=torch.bool)
    place = torch.searchsorted(sorted_keys, key).clamp_(max=len(sorted_keys) - 1)
    return sorted_keys[place] == key
