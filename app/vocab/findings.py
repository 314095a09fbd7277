"""Many findings about one catalogue, as many of them as a person reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, TypeVar

from app.errors import Rejected

MOST: Final = 20
"""Rows that are named for one thing that is wrong."""

T = TypeVar("T")


def some(wrong: Iterable[T], say: Callable[[T], Rejected]) -> list[Rejected]:
    """A finding for each of the first that are wrong; where there are more, one that says so."""
    first = list(islice(wrong, MOST + 1))
    found = [say(one) for one in first[:MOST]]
    if len(first) > MOST:
        found.append(Rejected(found[-1].code, "and more rows after these", location=found[-1].location))
    return found


def within(file: str, error: Rejected) -> list[Rejected]:
    """The findings of an error, with the file in front of their places."""
    place = file if error.location is None else f"{file}: {error.location}"
    first = Rejected(error.code, error.message, location=place)
    return [first, *(one for other in error.others for one in within(file, other))]
