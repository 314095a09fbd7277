"""The memory that a contract plans beside its weights, known before anything is allocated (RecoGEM 3.1, 4.2).

All of it follows from limits, state and SID sizes. What a policy's own expressions hold depends on the policy, and what
CUDA graphs compute in is known when they are captured (`graphs_captured` in the log): neither is here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from app.config import Limits
from app.core import StateSpec
from app.engine.functions import Function
from app.engine.graphs import most_rows
from app.ops.selection.reference import CUT

_CANDIDATE: Final = 16
"""Bytes of a candidate in the torch path of a selection: its key, and the key while it is made or picked."""
_SURVIVOR: Final = 40
"""Of a survivor: parent, code, place, and the two that they are computed from."""
_ROW: Final = 16
"""Of a row: its place and the last half of its keys."""


def workspace(
    states: Sequence[StateSpec], functions: Sequence[Function], limits: Limits, sizes: Sequence[int]
) -> dict[str, object]:
    """Bytes. functions: what an export has found · sizes: C_1..C_L

    arena_bytes      one lane's arena, allocated once: `request_bytes` for each of limits.batch requests, and
    row_slot_bytes   for each of limits.rows row slots of every step but the last. Where contexts are encoded beside a
                     decode (`runtime.context_lane`) the requests' part is there a second time, with a request more
                     where contexts are captured and, where `encode` does not give step 1's output, a row slot for each
                     of limits.batch requests
    logits_bytes     logits of the step that has most, all its rows; None where the export does not know their dtype
    selection_bytes  the most that an exact top K holds beside ranks and candidates, with every code a candidate, where
                     torch computes it; the CUDA kernels need less
    """
    request, row = (_state_bytes(states, scope) for scope in ("request", "row"))
    rows = (*most_rows(limits, sizes), min(limits.rows, limits.batch * limits.widths[-1]))
    steps = list(zip(rows, rows[1:], sizes, limits.widths, strict=False))
    return {
        "arena_bytes": arena_bytes(states, limits, len(sizes)),
        "request_bytes": request,
        "row_slot_bytes": row,
        "logits_bytes": _logits_bytes(functions, rows, sizes),
        "selection_bytes": max(selection_bytes(*step) for step in steps),
    }


def arena_bytes(
    states: Sequence[StateSpec], limits: Limits, steps: int, *, requests: int = 1, pads: int = 0, rows: int = 1,
    firsts: int = 0,
) -> int:  # fmt: skip
    """Of one lane's arena, with the parts of requests, of all rows and of step 1's rows as often as they are there.
    pads: requests beside those of batches."""
    request, row = (_state_bytes(states, scope) for scope in ("request", "row"))
    slots = rows * max(steps - 1, 1) * limits.rows + firsts * min(limits.batch, limits.rows)
    return (requests * limits.batch + pads) * request + slots * row


def selection_bytes(rows: int, survivors: int, codes: int, width: int) -> int:
    """What `ops.selection.reference.select_top` holds at most. width: survivors of one request, at most"""
    cut = width if codes > CUT * width else 0  # of each row, with its place
    return _CANDIDATE * rows * (codes + cut) + _SURVIVOR * survivors + _ROW * rows


def _state_bytes(states: Sequence[StateSpec], scope: str) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in states if spec.scope == scope)


def _logits_bytes(functions: Sequence[Function], rows: Sequence[int], sizes: Sequence[int]) -> int | None:
    """Each step's logits come from one function: step 1's from `encode` where that gives them."""
    found: dict[int, str] = {}
    for function in functions:
        step = 1 if function.name == "encode" else int(function.name.removeprefix("step "))
        dtypes = [one.dtype for one in function.outputs if one.name == "logits"]
        if dtypes:
            found[step] = dtypes[0]
    if len(found) < len(sizes):
        return None
    itemsize = {t: int(getattr(torch, dtype).itemsize) for t, dtype in found.items()}
    return max(itemsize[t] * rows[t - 1] * codes for t, codes in enumerate(sizes, 1))
