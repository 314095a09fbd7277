"""What the operators of a mixture of experts are, in torch's operators: on any device, without reading a value of it on
the host.

N rows, E experts, k chosen for each row, M = N * k rows by expert: expert e has rows ends[e - 1] .. ends[e] of them.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear

LEAST: Final = 1e-20
"""Weights whose sum is smaller are divided by this instead."""


def choose(
    logits: Tensor, bias: Tensor | None, k: int, *, sigmoid: bool, normalise: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """The k best experts of each row, best first, equal ones by their number: logits [N, E] -> expert [N, k] int32,
    weight [N, k] float32.

    sigmoid    a weight is sigmoid(logit), otherwise the softmax of the row; in float32
    bias       [E], added to the sigmoid where experts are compared, and not to the weight
    normalise  a row's weights are divided by their sum
    factor     what they are multiplied by then
    """
    logits = logits.float()
    score = logits.sigmoid() if sigmoid else logits.softmax(1)
    compared = logits if bias is None else score + bias.float()
    expert = compared.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weight = score.gather(1, expert)
    if normalise:
        weight = weight / weight.sum(1, keepdim=True).clamp_min(LEAST)
    return expert.to(torch.int32), weight * factor


def arrange(expert: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by expert, those of one expert in their order: expert [N, k] int32 in 0..E-1 -> row [M] int64, the row that
    each is; place [N, k] int32, where a row went; ends [E] int32."""
    flat = expert.flatten()
    numbers, order = flat.sort(stable=True)
    place = torch.empty_like(order, dtype=torch.int32)
    place[order] = torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)
    every = torch.arange(experts, dtype=numbers.dtype, device=flat.device)
    ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
    return order // expert.shape[1], place.view_as(expert), ends


def product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each row times its expert's matrix: x [M, K], weight [E, O, K], ends [E] int32 -> [M, O] in x's dtype.

    By definition, and at the price of one: every expert computes every row, and what is not its own is thrown away.
    """
    out = x.new_zeros(x.shape[0], weight.shape[1])
    at, first = torch.arange(x.shape[0], device=x.device), torch.zeros_like(ends[0])
    for matrix, last in zip(weight, ends, strict=True):
        own = (at >= first) & (at < last)
        out = torch.where(own.unsqueeze(1), linear(x, matrix), out)
        first = last
    return out


def combine(y: Tensor, place: Tensor, weight: Tensor, onto: Tensor | None) -> Tensor:
    """onto[n] + sum over j of weight[n, j] * y[place[n, j]]: y [M, d], place, weight [N, k], onto [N, d] or None
    -> [N, d] in y's dtype. In float32, in the order of j and `onto` last, rounded once."""
    total = y.new_zeros(place.shape[0], y.shape[1], dtype=torch.float32)
    for j in range(place.shape[1]):
        total.addcmul_(y[place[:, j]].float(), weight[:, j : j + 1])
    return (total if onto is None else total + onto).to(y.dtype)
