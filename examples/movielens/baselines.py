"""What a generative model has to be better than: the most popular films, a Markov item-kNN, SASRec.

All score histories as `Scorer`s: padded histories [B, H] int64, newest first, -1 behind the oldest, to scores
[B, items] float32 over the whole catalogue. Nothing here looks beyond the training part of the split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

Ints = npt.NDArray[np.int64]
Scorer = Callable[[Tensor], Tensor]
Report = Callable[[str, float], None]
"""Called with a description and the fraction done."""


def pad(histories: Sequence[Ints], width: int) -> Tensor:
    """The newest `width` items of each history, newest first: [B, width] int64, -1 = no item."""
    out = np.full((len(histories), width), -1, np.int64)
    for row, items in enumerate(histories):
        newest = items[::-1][:width]
        out[row, : len(newest)] = newest
    return torch.from_numpy(out)


def popularity(train: Sequence[Ints], items: int, device: torch.device) -> Scorer:
    """The number of users who have each item."""
    count = torch.from_numpy(np.bincount(np.concatenate(train), minlength=items)).float().to(device)
    return lambda histories: count.expand(histories.shape[0], -1)


class KnnSettings(NamedTuple):
    """window: how far apart two events of a user may be to count as neighbours; fade: weight lost with each event
    between them; backward: weight of "before" against "after"; source, target: powers of the popularities that divide
    the counts; recent, decay: how many items of a history count, and what each loses to the one after it."""

    window: int
    fade: float
    backward: float
    source: float
    target: float
    recent: int
    decay: float


def neighbours(train: Sequence[Ints], items: int, settings: KnnSettings) -> npt.NDArray[np.float32]:
    """How often (with `fade`) item j followed item i, over the powers of their popularities: [items, items]."""
    counts = np.zeros((items, items), np.float32)
    for sequence in train:
        for apart in range(1, min(settings.window, len(sequence) - 1) + 1):
            before, after = sequence[:-apart], sequence[apart:]
            weight = settings.fade ** (apart - 1)
            np.add.at(counts, (before, after), weight)
            if settings.backward:
                np.add.at(counts, (after, before), weight * settings.backward)
    popular = np.maximum(np.bincount(np.concatenate(train), minlength=items), 1).astype(np.float32)
    return counts / popular[:, None] ** settings.source / popular[None, :] ** settings.target


def item_knn(train: Sequence[Ints], items: int, settings: KnnSettings, device: torch.device) -> Scorer:
    """Markov item-kNN: the neighbours of the recent items, summed with `decay`."""
    matrix = torch.from_numpy(neighbours(train, items, settings)).to(device)

    def scores(histories: Tensor) -> Tensor:
        recent = histories[:, : settings.recent]
        age = torch.arange(recent.shape[1], device=device)
        weight = torch.exp(age * math.log(settings.decay)).masked_fill(recent < 0, 0.0)
        features = torch.zeros(len(recent), items, device=device).scatter_add_(1, recent.clamp_min(0), weight)
        return features @ matrix

    return scores


class SasRecSettings(NamedTuple):
    """A causal transformer over item embeddings, full softmax. `rounds` passes, each with one random window of every
    `length` events of a user."""

    width: int = 128
    layers: int = 2
    heads: int = 2
    length: int = 100
    dropout: float = 0.5
    rate: float = 1e-3
    decay: float = 0.05
    rounds: int = 200
    batch: int = 128
    smoothing: float = 0.0


class SasRec(nn.Module):
    """Kang and McAuley 2018, with cross-entropy over the catalogue and item embeddings shared with the output."""

    def __init__(self, items: int, settings: SasRecSettings) -> None:
        super().__init__()
        self.settings = settings
        self.items = nn.Embedding(items + 1, settings.width, padding_idx=items)
        self.places = nn.Embedding(settings.length, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        layer = nn.TransformerEncoderLayer(
            settings.width,
            settings.heads,
            2 * settings.width,
            settings.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(layer, settings.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(settings.width)
        nn.init.normal_(self.items.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, items: Tensor) -> Tensor:
        """items [B, S] oldest first, padded in front with the last embedding row -> hidden [B, S, width]."""
        length = items.shape[1]
        x = self.items(items) + self.places.weight[-length:]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=items.device)
        hidden: Tensor = self.norm(self.blocks(self.dropout(x), mask=mask, is_causal=True))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., items]."""
        return hidden @ self.items.weight[:-1].T


def train_sasrec(
    train: Sequence[Ints], items: int, settings: SasRecSettings, seed: int, device: torch.device, report: Report
) -> SasRec:
    """Train on random windows of the training sequences."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    model = SasRec(items, settings).to(device)
    windows = [max(1, round(len(s) / settings.length)) for s in train]
    owners = np.repeat(np.arange(len(train)), windows)
    steps = settings.rounds * -(-len(owners) // settings.batch)
    optimizer = torch.optim.AdamW(model.parameters(), settings.rate, weight_decay=settings.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.rate, total_steps=steps, pct_start=0.1)
    model.train()
    done = 0
    for _ in range(settings.rounds):
        for batch in np.array_split(random.permutation(owners), -(-len(owners) // settings.batch)):
            block = torch.from_numpy(_windows(train, batch, settings.length + 1, items, random)).to(device)
            target = block[:, 1:].masked_fill(block[:, :-1] == items, items)
            logits = model.logits(model(block[:, :-1]))
            loss = functional.cross_entropy(
                logits.flatten(0, 1), target.flatten(), ignore_index=items, label_smoothing=settings.smoothing
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            done += 1
            if done % 50 == 0:
                report("SASRec", done / steps)
    return model.eval()


def _windows(train: Sequence[Ints], users: Ints, width: int, items: int, random: np.random.Generator) -> Ints:
    out = np.full((len(users), width), items, np.int64)
    for row, user in enumerate(users):
        sequence = train[user]
        end = random.integers(min(width, len(sequence)), len(sequence) + 1)
        part = sequence[max(0, end - width) : end]
        out[row, width - len(part) :] = part
    return out


def sasrec_scorer(model: SasRec) -> Scorer:
    """Logits after the whole history."""
    padding = model.items.num_embeddings - 1

    @torch.no_grad()
    def scores(histories: Tensor) -> Tensor:
        newest = histories[:, : model.settings.length]
        return model.logits(model(newest.flip(1).masked_fill(newest.flip(1) < 0, padding))[:, -1])

    return scores
