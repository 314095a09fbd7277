"""Leave-one-out evaluation: ranks, Recall and NDCG, intervals and the paired bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.engine.families.onerec_reference import OneRecReference
from examples.movielens.baselines import Scorer, pad
from examples.movielens.student import Catalogue
from examples.movielens.teacher import hide

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MISSED = 10**9
"""The rank of a held-out item that is not in the list."""


class Recommend(Protocol):
    """Anything that recommends: per history a ranked list of item numbers, best first, nothing of the history in it."""

    def __call__(self, histories: Sequence[Ints], k: int, width: int) -> list[Ints]:
        """At most k items a history, found by a beam of `width` after every step."""
        ...


def ranks(lists: Sequence[Ints], held_out: Ints) -> Ints:
    """Place (0 = first) of each held-out item in its list."""
    out = np.full(len(held_out), MISSED)
    for row, (items, item) in enumerate(zip(lists, held_out, strict=True)):
        place = np.flatnonzero(items == item)
        if len(place):
            out[row] = place[0]
    return out


def metrics(places: Ints) -> dict[str, Floats]:
    """Per user: recall@10, recall@50, ndcg@10."""
    return {
        "recall@10": (places < 10).astype(np.float64),
        "recall@50": (places < 50).astype(np.float64),
        "ndcg@10": np.where(places < 10, 1 / np.log2(np.minimum(places, 10) + 2.0), 0.0),
    }


def scorer_lists(scorer: Scorer, histories: Sequence[Ints], k: int, device: torch.device) -> list[Ints]:
    """The k best of the full catalogue under a scorer, the history masked; ties go to the lower item number."""
    padded = pad(histories, max(len(h) for h in histories)).to(device)
    lists: list[Ints] = []
    with torch.no_grad():
        for block in padded.split(128):
            order = torch.argsort(hide(scorer(block).float(), block), dim=1, descending=True, stable=True)
            lists.extend(order[:, :k].cpu().numpy())
    return lists


@torch.no_grad()
def tree_scores(model: OneRecReference, catalogue: Catalogue, histories: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of all prefixes of the catalogue, by the definition without a search.

    Returns step 1 [B, C_1], the pairs [B, C_1 * C_2] (all of them) and the items [B, items]; three steps.
    """
    first, second, _ = catalogue.sizes
    kv, present = model.processor(catalogue.contexts(histories, model.config))
    pairs = torch.unique(catalogue.pair)
    prefixes = torch.stack([pairs // second, pairs % second], 1).expand(len(histories), -1, -1)
    heads = torch.arange(first, device=pairs.device)[:, None].expand(len(histories), -1, -1)
    one, two = model.decode(kv, present, heads)
    log_one = torch.log_softmax(one[:, 0].float(), -1)
    log_two = log_one[:, :, None] + torch.log_softmax(two.float(), -1)
    three = torch.log_softmax(model.decode(kv, present, prefixes)[2].float(), -1)
    place = torch.searchsorted(pairs, catalogue.pair)
    log_items = log_two.flatten(1)[:, catalogue.pair] + three[:, place, catalogue.codes[:, 2]]
    return log_one, log_two.flatten(1), log_items


@torch.no_grad()
def model_lists(
    model: OneRecReference, catalogue: Catalogue, histories: Sequence[Ints], k: int, widths: Sequence[int]
) -> dict[int, list[Ints]]:
    """What beam searches find when prefixes whose items are all in the history are masked, by width. Made from the
    scores of all prefixes: quick on a GPU while settings are chosen; the served search is the one that is reported."""
    device = catalogue.codes.device
    padded = pad(histories, max(len(h) for h in histories)).to(device)
    second = catalogue.sizes[1]
    lists: dict[int, list[Ints]] = {width: [] for width in widths}
    for block in padded.split(32):
        log_one, all_two, all_items = tree_scores(model, catalogue, block)
        free = torch.isfinite(hide(all_items, block)).float()
        open_two = torch.zeros_like(all_two).index_add_(1, catalogue.pair, free) > 0
        open_one = open_two.view(len(block), -1, second).any(2)
        for width in widths:
            kept = _top(log_one.masked_fill(~open_one, float("-inf")), width)
            kept = open_two & kept.repeat_interleave(second, 1)
            kept = _top(all_two.masked_fill(~kept, float("-inf")), width)
            kept = kept[:, catalogue.pair] & (free > 0)
            value, order = all_items.masked_fill(~kept, float("-inf")).topk(min(k, width), 1)
            good = torch.isfinite(value).cpu().numpy()
            lists[width] += [row[ok] for row, ok in zip(order.cpu().numpy(), good, strict=True)]
    return lists


def _top(scores: Tensor, width: int) -> Tensor:
    """Which of each row are among its `width` best finite ones: bool, like scores."""
    value, index = scores.topk(min(width, scores.shape[1]), 1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, index, torch.isfinite(value))


def interval(per_seed: Sequence[float]) -> tuple[float, float]:
    """Mean over seeds and half a 95 % interval of it (Student's t, 5 seeds: 2.776 standard errors)."""
    values = np.asarray(per_seed, np.float64)
    quantile = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}[len(values)]
    return float(values.mean()), float(quantile * values.std(ddof=1) / np.sqrt(len(values)))


def bootstrap(ours: Floats, theirs: Floats, seed: int = 0, draws: int = 10_000) -> dict[str, float]:
    """Paired bootstrap over users: ours, theirs [users] -> mean difference, 95 % interval, share of draws <= 0."""
    difference = ours - theirs
    index = np.random.default_rng(seed).integers(0, len(difference), (draws, len(difference)))
    means = difference[index].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return {
        "difference": float(difference.mean()),
        "low": float(low),
        "high": float(high),
        "p": float((means <= 0).mean()),
    }
