"""What the generative model learns from: the next film where there is one, and a teacher's distribution over films.

The teacher mixes the item-kNN and SASRec, both made from the training sequences alone. It can be asked about any
history, so the student sees many more histories than the 671 users have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from examples.movielens.baselines import Scorer

Ints = npt.NDArray[np.int64]


class TeacherSettings(NamedTuple):
    """sasrec: SASRec's weight in log p = (1 - sasrec) log p_knn + sasrec log p_sasrec; power: sharpness of p_knn
    (scores to this power); heat: SASRec's temperature; hidden: whether films of the history get no probability."""

    sasrec: float = 0.3
    power: float = 1.0
    heat: float = 1.0
    hidden: bool = True


def teacher(knn: Scorer, sasrec: Scorer | None, settings: TeacherSettings) -> Scorer:
    """A Scorer that gives probabilities [B, items]."""

    @torch.no_grad()
    def probabilities(histories: Tensor) -> Tensor:
        scores = knn(histories)
        floor = 1e-4 * scores.amax(1, keepdim=True) + 1e-9
        logits = settings.power * torch.log(scores + floor)
        if sasrec is not None and settings.sasrec:
            own = torch.log_softmax(logits, 1)
            other = torch.log_softmax(sasrec(histories).float() / settings.heat, 1)
            logits = (1 - settings.sasrec) * own + settings.sasrec * other
        if settings.hidden:
            logits = hide(logits, histories)
        return torch.softmax(logits, 1)

    return probabilities


def hide(scores: Tensor, histories: Tensor) -> Tensor:
    """Scores [B, items] with -inf at the items of each history [B, H]."""
    items = scores.shape[1]
    seen = torch.zeros(len(scores), items + 1, dtype=torch.bool, device=scores.device)
    seen.scatter_(1, histories.masked_fill(histories < 0, items), value=True)
    return scores.masked_fill(seen[:, :items], float("-inf"))


class Examples(NamedTuple):
    """histories [B, H] newest first, -1 = no item; following [B] the next item, -1 where there is none."""

    histories: Tensor
    following: Tensor


class HistorySampler:
    """Random histories made from the training sequences: prefixes of users, some with items left out, some with
    another user's items behind the newest ones. Fixed shapes, no Python loop over examples, random numbers from
    torch's own generator of the device: a CUDA graph can hold it."""

    def __init__(self, train: Sequence[Ints], width: int, device: torch.device) -> None:
        self.items = torch.from_numpy(np.concatenate(train)).to(device)
        lengths = np.array([len(s) for s in train])
        self.length = torch.from_numpy(lengths).to(device)
        self.start = torch.from_numpy(np.cumsum(lengths) - lengths).to(device)
        # long histories are drawn more often, by the root of their length
        self.share = self.length.double().sqrt().cumsum(0).float()
        self.width, self.device = width, device

    def draw(self, count: int, dropped: float, mixed: float) -> Examples:
        """`count` examples. A history in two loses a random share, at most `dropped`, of its items; the share `mixed`
        of histories continues with another user's."""
        histories, following = self._prefixes(count)
        other, _ = self._prefixes(count)
        own = self._random(count) >= mixed
        cut = (self._random(count) ** 2 * self.width).long().clamp_min(1)
        place = torch.arange(self.width, device=self.device)
        histories = torch.where(own[:, None] | (place < cut[:, None]), histories, other)
        rate = dropped * self._random(count) * (self._random(count) < 0.5)
        gone = self._random(count, self.width) < rate[:, None]
        histories = histories.masked_fill(gone, -1)
        packed = torch.argsort((histories < 0).int(), dim=1, stable=True)
        return Examples(histories.gather(1, packed), following)

    def _random(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device)

    def _prefixes(self, count: int) -> tuple[Tensor, Tensor]:
        user = sample(self.share.expand(count, -1), 1)[:, 0]
        length, start = self.length[user], self.start[user]
        taken = (self._random(count) * length).long().clamp_max(length - 1) + 1  # 1..length
        place = taken[:, None] - 1 - torch.arange(self.width, device=self.device)
        histories = self.items[(start[:, None] + place).clamp_min(0)].masked_fill(place < 0, -1)
        following = self.items[(start + taken).clamp_max(len(self.items) - 1)].masked_fill(taken >= length, -1)
        return histories, following


def sample(cumulative: Tensor, count: int) -> Tensor:
    """`count` draws with replacement from each row's running totals [B, n]: int64 [B, count]."""
    at = torch.rand(len(cumulative), count, device=cumulative.device) * cumulative[:, -1:]
    return torch.searchsorted(cumulative.contiguous(), at, right=True).clamp_max(cumulative.shape[1] - 1)
