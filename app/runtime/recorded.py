"""Reading back what `records` wrote: a recorded request as one that can be asked again, and what it got."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from app.core import Embeddings, HistoryIds, Level, Request, TokenIds
from app.errors import Rejected


class _Tensor(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    data: str


class _Context(msgspec.Struct, frozen=True):
    history: tuple[str, ...] | None = None
    tokens: tuple[int, ...] | None = None
    embeddings: dict[str, _Tensor] | None = None


class _Item(msgspec.Struct, frozen=True):
    id: str
    score: float


class _Answer(msgspec.Struct, frozen=True):
    items: tuple[_Item, ...] = ()
    status: str = "ok"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of state/requests/*.jsonl. Only `context` and `k` must be there, so a line written by hand will do."""

    context: _Context
    k: int
    request_id: str = ""
    user_id: str | None = None
    exclude: tuple[str, ...] = ()
    ctx: dict[str, str] = {}
    user: dict[str, float] = {}
    seed: int | None = None
    load: Level | None = None
    versions: dict[str, str] = {}
    answer: _Answer | None = None


class Recorded(NamedTuple):
    """A request as the runtime takes it, where it stands, what made its recorded answer and the answer's items."""

    request: Request
    place: str
    versions: Mapping[str, str]
    items: tuple[str, ...] | None


def read_records(log: Path) -> Iterator[Recorded]:
    """The requests of a file, or of every *.jsonl of a directory, oldest file first.

    Raises Rejected with file and line for what is no record.
    """
    files = sorted(log.glob("*.jsonl")) if log.is_dir() else [log]
    for file in files:
        try:
            with file.open("rb") as stream:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield recorded(line, f"{file}:{number}")
        except OSError as error:
            raise Rejected("unreadable", f"cannot be read: {error.strerror}", location=str(file)) from error


def recorded(line: bytes, place: str) -> Recorded:
    """One line. Raises Rejected with `place`."""
    try:
        one = msgspec.json.decode(line, type=Record)
        context = _context(one.context)
    except (msgspec.DecodeError, binascii.Error, ValueError) as error:
        raise Rejected("bad_record", f"is no recorded request: {error}", location=place) from error
    request = Request(
        request_id=one.request_id or place,
        context=context,
        k=one.k,
        user_id=one.user_id,
        exclude=one.exclude,
        ctx=one.ctx,
        user=one.user,
        seed=one.seed,
        load=one.load or "normal",  # not what the server of now is at
    )
    items = None if one.answer is None else tuple(item.id for item in one.answer.items)
    return Recorded(request, place, one.versions, items)


def _context(context: _Context) -> HistoryIds | TokenIds | Embeddings:
    given = [one for one in (context.history, context.tokens, context.embeddings) if one is not None]
    if len(given) != 1:
        raise ValueError("expected exactly one of `history`, `tokens`, `embeddings` in `context`")
    if context.history is not None:
        return HistoryIds(context.history)
    if context.tokens is not None:
        return TokenIds(context.tokens)
    return Embeddings({name: _tensor(one) for name, one in (context.embeddings or {}).items()})


def _tensor(one: _Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    data = np.frombuffer(base64.b64decode(one.data, validate=True), "<f4").astype(np.float32)
    return data.reshape(one.shape)
