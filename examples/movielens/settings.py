"""Every setting of the example, as chosen on the validation item (README.md says among what)."""

from __future__ import annotations

from typing import NamedTuple

from app.engine.families import onerec_config
from app.engine.families.onerec_config import OneRecConfig
from examples.movielens.baselines import KnnSettings, SasRecSettings
from examples.movielens.sids import SidSettings
from examples.movielens.student import StudentSettings
from examples.movielens.teacher import TeacherSettings

WIDTHS = (10, 50, 200)
SIDS = SidSettings()
KNN = KnnSettings(window=50, fade=0.95, backward=0.5, source=0.5, target=0.5, recent=50, decay=0.8)
PLAIN_KNN = KnnSettings(window=1, fade=1.0, backward=0.0, source=0.5, target=0.5, recent=10, decay=0.8)
"""Transitions between neighbouring events under cosine, as one would write it down without looking at validation."""
SASREC = SasRecSettings(dropout=0.3, length=100)
TEACHER = TeacherSettings(sasrec=0.35, power=2.0, hidden=False)
STUDENT = StudentSettings(steps=3000, batch=256, sids=8, rate=2e-3, truth=0.3)


class ModelSettings(NamedTuple):
    """The shape of the `onerec` model; 32 short positions of an item and 8 long ones of 8 items."""

    width: int = 192
    heads: int = 6
    layers: int = 3
    context_layers: int = 2
    short: int = 32
    long: int = 8
    pool: int = 8
    dropout: float = 0.1

    @property
    def positions_of_items(self) -> int:
        """Items of the longest history that the model reads."""
        return self.short + self.long * self.pool

    def config(self) -> OneRecConfig:
        """As config.json."""
        history = {"short": self.short, "long": self.long, "pool": self.pool, "prefix": 2}
        return onerec_config.parse(
            {
                "family": "onerec",
                "sizes": list(SIDS.sizes),
                "d_model": self.width,
                "layers": self.layers,
                "heads": self.heads,
                "head_dim": self.width // self.heads,
                "cross_groups": self.heads,
                "self_groups": self.heads,
                "ffn": 3 * self.width,
                "context_layers": self.context_layers,
                "history": history,
                "dropout": self.dropout,
            }
        )


class Candidate(NamedTuple):
    """One of the settings that seed 0 tries; the best by NDCG@10 on validation is trained for all seeds."""

    name: str
    model: ModelSettings
    student: StudentSettings


MODEL = ModelSettings()
CANDIDATES = (
    Candidate("truth 0.3", MODEL, STUDENT),
    Candidate("truth 0.6", MODEL, STUDENT._replace(truth=0.6)),
    Candidate("wide", MODEL._replace(width=256, heads=8, dropout=0.2), STUDENT),
)
