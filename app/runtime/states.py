"""The states of an artifact's version, and the only moves between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from app.errors import Fault


class State(StrEnum):
    """Where a version is on its way. A snapshot is only ever ready, active, draining or retired."""

    DISCOVERED = "discovered"
    INCOMPLETE = "incomplete"
    VERIFYING = "verifying"
    VALIDATING = "validating"
    WAITING = "waiting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    ACTIVE = "active"
    DRAINING = "draining"
    RETIRED = "retired"
    REJECTED = "rejected"


_S = State
MOVES: Final[Mapping[State, frozenset[State]]] = {
    _S.DISCOVERED: frozenset({_S.INCOMPLETE, _S.VERIFYING, _S.VALIDATING, _S.WAITING, _S.REJECTED, _S.RETIRED}),
    _S.INCOMPLETE: frozenset({_S.DISCOVERED, _S.RETIRED}),
    _S.VERIFYING: frozenset({_S.LOADING, _S.REJECTED, _S.DISCOVERED}),
    _S.LOADING: frozenset({_S.VALIDATING, _S.REJECTED, _S.DISCOVERED}),
    _S.VALIDATING: frozenset({_S.WARMING, _S.READY, _S.WAITING, _S.REJECTED, _S.DISCOVERED}),
    _S.WAITING: frozenset({_S.DISCOVERED, _S.VERIFYING, _S.VALIDATING, _S.REJECTED, _S.RETIRED}),
    _S.WARMING: frozenset({_S.READY, _S.REJECTED, _S.DISCOVERED}),
    _S.READY: frozenset({_S.ACTIVE, _S.WARMING, _S.WAITING, _S.DRAINING, _S.RETIRED, _S.REJECTED}),
    _S.ACTIVE: frozenset({_S.READY, _S.DRAINING}),
    _S.DRAINING: frozenset({_S.RETIRED, _S.ACTIVE, _S.READY}),
    _S.RETIRED: frozenset({_S.DISCOVERED}),
    _S.REJECTED: frozenset({_S.DISCOVERED, _S.RETIRED}),
}
"""Allowed moves. RETIRED also means that a version's directory is gone; a version whose bytes change is discovered
again. VERIFYING compares files with the manifest; LOADING reads them and compares digests; VALIDATING compares what was
read with the contract and with the other artifacts, and is where a version begins whose content is in memory already.
WAITING is for another version, or for a weight slot. Work that is begun anew goes back to DISCOVERED."""


def check_move(before: State, after: State) -> None:
    """Raise Fault for a move that the table does not have."""
    if after not in MOVES[before]:
        raise Fault(f"a version cannot go from {before} to {after}")
