"""A batch between its launch and its answers: what a device is asked for first, and what waits for it then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple

from app.errors import Fault
from app.runtime.job import Batch, Served


class Pause(Enum):
    """Where a run may rest, and go on in another thread.

    LAUNCHED  everything is asked of the device, and nothing has been waited for
    LAST      the device is at the last step, or beyond
    """

    LAUNCHED = "launched"
    LAST = "last"


class Flight(NamedTuple):
    """A run on its way. served: its ends so far; rest: those to come, and its pauses."""

    batch: Batch
    served: list[Served]
    rest: Iterator[Served | Pause]


def go(flight: Flight, clock: Callable[[], float], to: Pause | None = None) -> list[Served]:
    """On to a pause, or to the end: then every job of the batch is served, with its result or its error, once each. A
    bug of ours fails the jobs still open."""
    try:
        for found in flight.rest:
            if isinstance(found, Served):
                flight.served.append(found)
            elif found is to:
                break
    except Exception as error:  # noqa: BLE001  whatever broke: the jobs still open end here, and the loop lives on
        done, fault = {id(end.job) for end in flight.served}, Fault.of(error)
        left = [job for job in flight.batch.jobs if id(job) not in done]
        flight.served.extend(Served(job, fault, clock(), 0.0, 0.0, 0) for job in left)
    return flight.served
