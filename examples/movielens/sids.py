"""Item embeddings from training interactions, genres and decade, and the SIDs made from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from app.vocab.build import residual_kmeans
from examples.movielens.data import Film

Ints = npt.NDArray[np.int64]


class SidSettings(NamedTuple):
    """sizes: codes of each step; dim, content: columns that stand for behaviour, and the weight of genres and decade;
    window, fade: as in the item-kNN."""

    sizes: tuple[int, ...] = (64, 64, 64)
    dim: int = 64
    content: float = 0.3
    window: int = 50
    fade: float = 0.95


def embeddings(train: Sequence[Ints], films: Sequence[Film], settings: SidSettings) -> npt.NDArray[np.float32]:
    """[items, dim + content columns] float32: the leading eigenvectors of the items' positive pointwise mutual
    information within a window of the training sequences, of unit length, next to unit content vectors."""
    behaviour = _unit(_eigenvectors(_ppmi(train, len(films), settings), settings.dim))
    return np.concatenate([behaviour, settings.content * _unit(_content(films))], 1).astype(np.float32)


def make_sids(train: Sequence[Ints], films: Sequence[Film], settings: SidSettings, seed: int) -> npt.NDArray[np.int32]:
    """An SID for every film: [items, steps] int32, all different."""
    return residual_kmeans(embeddings(train, films, settings), settings.sizes, seed)


def _ppmi(train: Sequence[Ints], items: int, settings: SidSettings) -> npt.NDArray[np.float32]:
    counts = np.zeros((items, items), np.float32)
    for sequence in train:
        for apart in range(1, min(settings.window, len(sequence) - 1) + 1):
            np.add.at(counts, (sequence[:-apart], sequence[apart:]), settings.fade ** (apart - 1))
    counts += counts.T
    total = counts.sum(1) + 1
    # the smaller power of the context's share keeps rare items from having the largest information (Levy et al. 2015)
    share = total**0.75 / (total**0.75).sum()
    with np.errstate(divide="ignore"):
        information = np.log(counts / (total[:, None] * share[None, :]))
    return np.maximum(0.5 * (information + information.T), 0)


def _eigenvectors(matrix: npt.NDArray[np.float32], dim: int) -> npt.NDArray[np.float32]:
    """Eigenvectors of the largest eigenvalues, each scaled by the root of its own, with signs fixed."""
    values, vectors = torch.linalg.eigh(torch.from_numpy(matrix))
    top = vectors[:, -dim:].flip(1) * values[-dim:].flip(0).clamp_min(0).sqrt()
    sign = torch.sign(top.gather(0, top.abs().argmax(0, keepdim=True)))
    return (top * sign).numpy()


def _content(films: Sequence[Film]) -> npt.NDArray[np.float32]:
    """Genres, and the decade spread over its neighbours."""
    genres = sorted({genre for film in films for genre in film.genres})
    columns = np.zeros((len(films), len(genres) + 12), np.float32)
    for row, film in enumerate(films):
        for genre in film.genres:
            columns[row, genres.index(genre)] = 1
        if film.year is not None:
            decades = np.arange(12) * 10 + 1910
            columns[row, len(genres) :] = np.exp(-(((film.year - decades) / 10) ** 2))
    return columns


def _unit(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
