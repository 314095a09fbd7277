"""Requests and errors to messages and back: what comes out equals what went in."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from app import errors
from app.core import Embeddings, HistoryIds, Request, TokenIds
from app.errors import WidebeamError, printable
from app.runtime.messages import Admit, Failed, Tensor

KINDS: Final = {
    kind.__name__: kind
    for kind in (
        *(errors.InvalidRequest, errors.Refused, errors.QueueFull, errors.DeadlineTooShort, errors.Draining),
        *(errors.NotReady, errors.ExplainBusy, errors.Expired, errors.Cancelled, errors.ModelOutput),
        *(errors.Underfilled, errors.Fault, WidebeamError),
    )
}
"""Classes that a request may end with; an error of another one arrives as its nearest ancestor here."""


def asked(number: int, request: Request) -> Admit:
    """A request as a message."""
    context = request.context
    return Admit(
        number=number,
        request_id=request.request_id,
        history=context.ids if isinstance(context, HistoryIds) else None,
        tokens=context.ids if isinstance(context, TokenIds) else None,
        embeddings=(
            {name: _packed(array) for name, array in context.tensors.items()}
            if isinstance(context, Embeddings)
            else None
        ),
        k=request.k,
        user_id=request.user_id,
        policy=request.policy,
        exclude=request.exclude,
        ctx=dict(request.ctx),
        user=dict(request.user),
        received=request.received,
        deadline=request.deadline,
        seed=request.seed,
        arms=dict(request.arms),
        explain=request.explain,
        load=request.load,
    )


def request_of(message: Admit) -> Request:
    """The request of a message. Raises ValueError for a message that none is made of."""
    return Request(
        request_id=message.request_id,
        context=_context(message),
        k=message.k,
        user_id=message.user_id,
        policy=message.policy,
        exclude=message.exclude,
        ctx=message.ctx,
        user=message.user,
        received=message.received,
        deadline=message.deadline,
        seed=message.seed,
        arms=message.arms,
        explain=message.explain,
        load=message.load,
    )


def _context(message: Admit) -> HistoryIds | TokenIds | Embeddings:
    if message.history is not None:
        return HistoryIds(message.history)
    if message.tokens is not None:
        return TokenIds(message.tokens)
    if message.embeddings is None:
        raise ValueError("a request without a context")
    return Embeddings({name: _unpacked(one) for name, one in message.embeddings.items()})


def _packed(array: npt.NDArray[np.float32]) -> Tensor:
    return Tensor("<f4", array.shape, bytearray(array.astype("<f4", copy=False).tobytes()))


def _unpacked(tensor: Tensor) -> npt.NDArray[np.float32]:
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


def failed(number: int, error: WidebeamError) -> Failed:
    """An error as a message."""
    kind = next(kind for kind in type(error).__mro__ if KINDS.get(kind.__name__) is kind)
    retry_after_s = error.retry_after_s if isinstance(error, errors.Refused) else None
    path = None if error.path is None else printable(error.path)
    return Failed(number, kind.__name__, error.code, printable(error.message), path, retry_after_s)


def error_of(message: Failed) -> WidebeamError:
    """The error of a message. Raises KeyError for an unknown class."""
    error = KINDS[message.kind](message.message)
    error.code, error.path = message.code, message.path
    if isinstance(error, errors.Refused):
        error.retry_after_s = message.retry_after_s
    return error
