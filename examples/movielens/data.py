"""MovieLens ml-latest-small: the ratings as sequences, the leave-one-out split, and what is known of a film."""

from __future__ import annotations

import csv
import gzip
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

CORE = 5
YEAR = re.compile(r"\((\d{4})[^()]*\)\s*$")


class Film(NamedTuple):
    """A row of movies.csv. `year` is None where the title carries none."""

    id: str
    title: str
    year: int | None
    genres: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Leave-one-out over the 5-core: per user the last item is for the test, the one before it for validation.

    films      the catalogue; item numbers index it
    users      MovieLens user ids
    sequences  per user all items in time order, test item last
    """

    films: tuple[Film, ...]
    users: tuple[int, ...]
    sequences: tuple[Ints, ...]

    @property
    def train(self) -> list[Ints]:
        """What any model may learn from."""
        return [items[:-2] for items in self.sequences]

    def cases(self, part: str) -> tuple[list[Ints], Ints]:
        """(histories, held-out items) of "validation" or "test"."""
        cut = {"validation": -2, "test": -1}[part]
        return [items[:cut] for items in self.sequences], np.array([items[cut] for items in self.sequences])


def load(directory: Path, seed: int = 0) -> Split:
    """Read ratings.csv.gz and movies.csv.gz of `directory`.

    Every rating is an event, whatever its stars. 22 % of a user's events share their second with another one; the files
    list those by film id, which a stable sort would leak, so ties are put in random order by `seed`.
    """
    with gzip.open(directory / "ratings.csv.gz", "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    user = np.array([int(row["userId"]) for row in rows])
    film = np.array([int(row["movieId"]) for row in rows])
    time = np.array([int(row["timestamp"]) for row in rows])
    keep = _core(user, film)
    user, film, time = user[keep], film[keep], time[keep]
    order = np.lexsort((np.random.default_rng(seed).permutation(len(user)), time, user))
    user, film = user[order], film[order]
    catalogue, item = np.unique(film, return_inverse=True)
    users, start = np.unique(user, return_index=True)
    known = _films(directory)
    return Split(
        films=tuple(known[int(number)] for number in catalogue),
        users=tuple(users.tolist()),
        sequences=tuple(np.split(item, start[1:])),
    )


def _core(user: Ints, film: Ints) -> Ints:
    """Row numbers of the 5-core: users and films with 5 events or more, until nothing changes."""
    rows = np.arange(len(user))
    while True:
        enough = np.ones(len(rows), bool)
        for column in (user, film):
            _, inverse, count = np.unique(column[rows], return_inverse=True, return_counts=True)
            enough &= count[inverse] >= CORE
        if enough.all():
            return rows
        rows = rows[enough]


def _films(directory: Path) -> dict[int, Film]:
    films = {}
    with gzip.open(directory / "movies.csv.gz", "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            year = YEAR.search(row["title"])
            genres = () if row["genres"] == "(no genres listed)" else tuple(row["genres"].split("|"))
            films[int(row["movieId"])] = Film(row["movieId"], row["title"], int(year[1]) if year else None, genres)
    return films
