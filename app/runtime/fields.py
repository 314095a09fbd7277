"""The fields of a request that its policy reads: looked up once, at admission, and one small table a batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.config import RequestFields, UserField
from app.core import Request
from app.errors import InvalidRequest
from app.ops.upload import upload
from app.policies.plan import Asks

MOST: Final = 1e30
"""Largest size of a number, as in the policy language."""

Fields = Mapping[str, float]
"""What a policy reads of one request: numbers by `user.NAME`, truth as 0 and 1 by the text of a condition on `ctx`."""


def fields_of(request: Request, policy: str, asks: Asks, declared: RequestFields) -> Fields:
    """The values that a plan asks for: the request's own, else the declared default. An absent text equals nothing.

    Raises InvalidRequest with the field's path for a number that is missing without a default, not finite, or outside
    its declared range. What no policy reads is not looked at.
    """
    numbers = {
        f"user.{name}": _number(request.user.get(name), name, policy, declared.user.get(name)) for name in asks.user
    }
    return {**numbers, **{text: float(one.holds(request.ctx)) for text, one in asks.ctx.items()}}


def _number(given: float | None, name: str, policy: str, declared: UserField | None) -> float:
    field, path = declared or UserField(), f"$.user.{name}"
    if given is None:
        if field.default is None:
            raise InvalidRequest(f"policy `{policy}` reads it, and it has no default", path=path)
        return field.default
    low, high = _range(field)
    if not low <= given <= high:  # false for NaN, too
        raise InvalidRequest(f"{name} is {given:.12g}; {low:.12g} to {high:.12g} are possible", path=path)
    return given


def _range(field: UserField) -> tuple[float, float]:
    return -MOST if field.low is None else field.low, MOST if field.high is None else field.high


def made_up(asks: Asks, declared: RequestFields) -> Fields:
    """Values for a request that nobody made: a warm-up needs some."""
    numbers = {}
    for name in asks.user:
        field = declared.user.get(name, UserField())
        low, high = _range(field)
        numbers[f"user.{name}"] = min(max(0.0, low), high) if field.default is None else field.default
    return {**numbers, **{text: float(one.holds({})) for text, one in asks.ctx.items()}}


class FieldTable:
    """The fields of a batch's requests on the device: [R, columns] float32, columns that a request lacks are 0."""

    def __init__(self, given: Sequence[Fields], device: torch.device) -> None:
        self._at = {key: at for at, key in enumerate(sorted(set().union(*given)))}
        table = np.zeros((len(given), len(self._at)), np.float32)
        for row, fields in zip(table, given, strict=True):
            for key, value in fields.items():
                row[self._at[key]] = value
        self._table = upload(torch.from_numpy(table), device)

    def columns(self, uses: Collection[str], request: Tensor) -> dict[str, Tensor]:
        """Those of `uses` for rows of these requests [n]: `StepInputs.extra`, numbers float32 and conditions bool."""
        read = [key for key in uses if key.startswith(("user.", "ctx."))]
        if not read:
            return {}
        rows = self._table.index_select(0, request)
        found = {key: rows[:, self._at[key]] for key in read}
        return {key: one if key.startswith("user.") else one > 0 for key, one in found.items()}


def final_fields(given: Fields, uses: Collection[str]) -> dict[str, npt.NDArray[np.generic]]:
    """Those of `uses` for `FinalInputs.extra`: one number or truth value for all items."""
    return {
        key: np.array(given[key], np.float32) if key.startswith("user.") else np.array(given[key] > 0)
        for key in uses
        if key.startswith(("user.", "ctx."))
    }
