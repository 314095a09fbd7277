"""Recorded requests under two policies of one snapshot: how far the answers are apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from app.core import Outcome, Request
from app.errors import QueueFull, WidebeamError
from app.runtime.front import Front
from app.runtime.recorded import Recorded

FLIGHT = 16
"""Records that are asked at the same time; each is two requests."""


class Compared(NamedTuple):
    """One record under both policies.

    overlap   items in both lists, over the length of the longer one (1 where both are empty): overlap@k
    same      the same items in the same order · first: the same first item
    score     mean change of the score, a to b, of the items in both lists; None where there are none
    items     lengths of the two lists · underfilled: whether each is shorter than k
    recorded  whether the recorded answer came again under the policy that gave it; None where that is neither a nor b
    error     why there is no answer; everything else is empty then
    """

    request_id: str
    place: str
    k: int
    overlap: float = 0.0
    same: bool = False
    first: bool = False
    score: float | None = None
    items: tuple[int, int] = (0, 0)
    underfilled: tuple[bool, bool] = (False, False)
    recorded: bool | None = None
    error: str | None = None


class Summary(NamedTuple):
    """Over all records; shares and means are over those that were answered, None for none.

    overlap, least_overlap  mean and smallest overlap@k · same, same_first: shares
    score, score_size  mean change of common items' scores, and of its size
    underfilled  share of lists shorter than k, under each · no_items: share of empty ones
    reproduced   recorded answers that came again, of `comparable` ones
    """

    requests: int
    failed: int
    overlap: float | None
    least_overlap: float | None
    same: float | None
    same_first: float | None
    score: float | None
    score_size: float | None
    underfilled: tuple[float, float] | None
    no_items: tuple[float, float] | None
    reproduced: int
    comparable: int


async def replay(front: Front, records: Iterable[Recorded], a: str, b: str) -> AsyncIterator[Compared]:
    """Ask every record under policy a and under policy b, on the snapshot that is active; in the records' order."""
    flight: list[asyncio.Task[Compared]] = []
    try:
        for record in records:
            flight.append(asyncio.create_task(_compare(front, record, a, b)))
            if len(flight) == FLIGHT:
                yield await flight.pop(0)
        while flight:
            yield await flight.pop(0)
    finally:
        for task in flight:
            task.cancel()


async def _compare(front: Front, record: Recorded, a: str, b: str) -> Compared:
    request = record.request
    asked = (_ask(front, replace(request, policy=policy)) for policy in (a, b))
    sides = await asyncio.gather(*asked, return_exceptions=True)
    for side in sides:
        if isinstance(side, WidebeamError):
            return Compared(request.request_id, record.place, request.k, error=f"{side.code}: {side.message}")
        if isinstance(side, BaseException):
            raise side
    one, other = (side for side in sides if isinstance(side, Outcome))
    return compare(record, one, other)


async def _ask(front: Front, request: Request) -> Outcome:
    while True:
        try:
            return await front.admit(request).outcome()
        except QueueFull:  # nobody else asks: a place will be free
            await asyncio.sleep(0.001)


def compare(record: Recorded, one: Outcome, other: Outcome) -> Compared:
    """Two answers to one record."""
    left, right = ({item.id: item.score for item in side.items} for side in (one, other))
    both = [id_ for id_ in left if id_ in right]
    longer = max(len(left), len(right))
    k = record.request.k
    again = None
    for side in (one, other):
        if record.items is not None and _same_versions(record, side):
            again = list(record.items) == [item.id for item in side.items]
            break
    return Compared(
        request_id=record.request.request_id,
        place=record.place,
        k=k,
        overlap=len(both) / longer if longer else 1.0,
        same=list(left) == list(right),
        first=next(iter(left), None) == next(iter(right), None),
        score=sum(right[id_] - left[id_] for id_ in both) / len(both) if both else None,
        items=(len(left), len(right)),
        underfilled=(len(left) < k, len(right) < k),
        recorded=again,
    )


def _same_versions(record: Recorded, outcome: Outcome) -> bool:
    """Whether the same weights, vocab and policy made the recorded answer."""
    made = outcome.versions._asdict()
    return all(record.versions.get(key) == made[key] for key in ("weights", "vocab", "policy_id", "contract"))


def summary(compared: Sequence[Compared]) -> Summary:
    """All records together."""
    answered = [one for one in compared if one.error is None]
    scores = [one.score for one in answered if one.score is not None]
    known = [one.recorded for one in answered if one.recorded is not None]

    def share(values: Iterable[float]) -> float | None:
        given = list(values)
        return sum(given) / len(given) if given else None

    def pair(left: float | None, right: float | None) -> tuple[float, float] | None:
        return None if left is None or right is None else (left, right)

    return Summary(
        requests=len(compared),
        failed=len(compared) - len(answered),
        overlap=share(one.overlap for one in answered),
        least_overlap=min((one.overlap for one in answered), default=None),
        same=share(one.same for one in answered),
        same_first=share(one.first for one in answered),
        score=share(scores),
        score_size=share(map(abs, scores)),
        underfilled=pair(*(share(one.underfilled[side] for one in answered) for side in (0, 1))),
        no_items=pair(*(share(not one.items[side] for one in answered) for side in (0, 1))),
        reproduced=sum(known),
        comparable=len(known),
    )
