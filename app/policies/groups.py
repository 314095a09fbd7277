"""Groups of candidates: what `cap` and `floor` count by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from app.errors import Fault
from app.policies.expr import Compare, Expr, Field, Index, Name, Text, show
from app.policies.facts import Facts
from app.policies.plan import StepInputs

MOST_PREFIXES = 2**40
"""Prefixes that are numbered by their codes: with a code and a request the number stays in 64 bits."""
Numbering = Callable[[StepInputs, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Group:
    """How candidates of a step are grouped.

    text    canonical text
    depth   codes of the prefix that determine the group, where it is a prefix of the candidate's codes; None = another
            kind. At step t, depth t - 1 is the parent's row and depth t the candidate itself
    nested  whether a group is a union of rows
    single  whether each candidate is a group of its own
    once    whether a row has one candidate of a group at most
    many    whether there is more than one group
    values  how many groups there can be, where known
    number  group numbers [n, F] or [n, 1] int64, -1 = in no group
    """

    text: str
    depth: int | None
    nested: bool
    single: bool
    once: bool
    many: bool
    values: int | None
    number: Numbering

    def inside(self, outer: Group) -> bool:
        """Whether each of these groups lies in one of the outer ones."""
        if self.text == outer.text:
            return True
        if self.depth is not None and outer.depth is not None:
            return self.depth >= outer.depth
        # a row lies in every union of rows, a candidate in every group
        return (self.row and outer.nested) or self.single

    @property
    def row(self) -> bool:
        """Whether the group is the row or finer."""
        return self.text == "parent"


def group_of(node: Expr, step: int, sizes: tuple[int, ...], facts: Facts) -> Group:
    """The group that an expression names at a step."""
    text = show(node)
    match node:
        case Name(name="parent"):
            return Group(text, step - 1, True, False, False, True, None, _parent)
        case Index(base=base, index=index):
            whole = base == "prefix" or index == 1
            depth = index if whole else None
            values = sizes[index - 1] if index == 1 or base == "token" else None
            number = _prefix(index, step, sizes) if whole and index > 1 else _token(index, step)
            return Group(text, depth, index < step, depth == step, index == step, True, values, number)
        case Field(space=space, name=name):
            column = facts[f"{space}.{name}"]
            if column.form == "text":
                # an unknown category is a group of its own
                return Group(
                    text,
                    None,
                    column.fixed,
                    False,
                    False,
                    True,
                    len(column.labels) + 1 if column.labels else None,
                    lambda _, extra: extra[column.key] + 1,
                )
            return Group(text, None, column.fixed, False, False, False, 1, lambda _, extra: _flag(extra[column.key]))
        case Compare(left=Field(space=space, name=name), right=Text(value=value)):
            column = facts[f"{space}.{name}"]
            label = column.labels.index(value)
            return Group(
                text, None, column.fixed, False, False, False, 1, lambda _, extra: _flag(extra[column.key] == label)
            )
    raise Fault(f"`{text}` passed the checks and is no group")


def keys_of(node: Expr) -> frozenset[str]:
    """Columns of `StepInputs.extra`, and "prefix", that a group reads."""
    match node:
        case Field(space=space, name=name) | Compare(left=Field(space=space, name=name)):
            return frozenset({f"{space}.{name}"})
        case Index():
            return frozenset({"prefix"})
    return frozenset()


def _flag(column: Tensor) -> Tensor:
    return column.to(torch.int64) - 1


def _parent(inputs: StepInputs, extra: Mapping[str, Tensor]) -> Tensor:
    del extra
    assert inputs.order is not None, "uses: request"
    return inputs.order[:, None]


def _token(index: int, step: int) -> Numbering:
    def number(inputs: StepInputs, extra: Mapping[str, Tensor]) -> Tensor:
        del extra
        if index == step:
            return inputs.code
        assert inputs.prefix is not None, "uses: prefix"
        return inputs.prefix[:, index - 1 : index].to(torch.int64)

    return number


def _prefix(index: int, step: int, sizes: tuple[int, ...]) -> Numbering:
    def number(inputs: StepInputs, extra: Mapping[str, Tensor]) -> Tensor:
        del extra
        assert inputs.prefix is not None, "uses: prefix"
        rows = _numbered(inputs.prefix[:, :index].to(torch.int64), sizes)[:, None]
        return rows * inputs.logits.shape[1] + inputs.code if index == step else rows

    return number


def _numbered(prefix: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """[n] int64: equal for equal rows, and for no others; of codes 0 .. size - 1."""
    if math.prod(sizes[: prefix.shape[1]]) >= MOST_PREFIXES:
        return _by_rank(prefix)
    number = torch.zeros(len(prefix), dtype=torch.int64, device=prefix.device)
    for at, size in zip(range(prefix.shape[1]), sizes, strict=False):
        number = number * size + prefix[:, at].clamp(min=0)  # a tombstone's codes are -1
    return number


def _by_rank(prefix: Tensor) -> Tensor:
    """[n] int64: how many other rows lie before a row in lexicographic order, each counted once."""
    order = torch.arange(len(prefix), device=prefix.device)
    for column in prefix.flip(1).unbind(1):  # the last code first: each sort keeps the order of those before it
        order = order[torch.argsort(column[order], stable=True)]
    ordered = prefix[order]
    first = (ordered[1:] != ordered[:-1]).any(1).to(torch.int64)
    return torch.empty_like(order).index_copy_(0, order, torch.cat([torch.zeros_like(order[:1]), first.cumsum(0)]))
