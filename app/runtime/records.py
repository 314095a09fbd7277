"""What a sampled request asked and got, as one JSON line: enough to run it again (`policy replay`).

The sample is a function of the request id, so every replica, and a second run of the same requests, samples the same.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np

from app.config import read_small
from app.core import Embeddings, HistoryIds, Outcome, Request, TokenIds
from app.policies.assign import u64
from app.runtime import state_dir
from app.runtime.logs import Log

SALT_FILE = "unit_salt"


def sampled(request_id: str, share: float) -> bool:
    """Whether a request is recorded; share 0..1."""
    return u64("widebeam-requests/1", request_id) < share * 2.0**64


def request_line(request: Request, outcome: Outcome, at: str, name: Callable[[str], str]) -> dict[str, object]:
    """The record of an answered request; fields have the names of POST /v1/recommend. name: how users are named."""
    line: dict[str, object] = {
        "at": at,
        "request_id": request.request_id,
        "user_id": None if request.user_id is None else name(request.user_id),
        "context": context_data(request),
        "k": request.k,
        "policy": request.policy,
        "exclude": request.exclude,
        "ctx": request.ctx,
        "user": request.user,
        "seed": outcome.seed,
        "load": outcome.level,
        "versions": outcome.versions._asdict(),
        "experiments": [one._asdict() for one in outcome.experiments],
        "answer": {
            "items": [one._asdict() for one in outcome.items],
            "status": outcome.status,
            "reason": outcome.reason,
        },
    }
    return line


def context_data(request: Request) -> dict[str, object]:
    """The context in its wire form; tensors as float32 in base64, since JSON holds no bytes."""
    context = request.context
    match context:
        case HistoryIds(ids=history):
            return {"history": history}
        case TokenIds(ids=tokens):
            return {"tokens": tokens}
        case Embeddings(tensors=tensors):
            return {
                "embeddings": {
                    key: {
                        "dtype": "f32",
                        "shape": list(array.shape),
                        "data": base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode(),
                    }
                    for key, array in tensors.items()
                }
            }


def namer(units: str, salt: str, state: Path, log: Log) -> Callable[[str], str]:
    """How records name users. "plain": as the request did · "hashed": the first 16 bytes of HMAC-SHA256, in hex, under
    `salt`, or under a key that is made once and kept in `state`."""
    if units == "plain":
        return lambda unit: unit
    key = salt.encode() or _own_key(state, log)
    return lambda unit: hmac.new(key, unit.encode(), hashlib.sha256).digest()[:16].hex()


def _own_key(state: Path, log: Log) -> bytes:
    file = state / SALT_FILE
    try:
        if not file.exists():
            state_dir.create(file, secrets.token_hex(32).encode())
        key = read_small(file, state_dir.MAX_FILE, state).strip()
    except OSError as error:
        log.warning("unit_salt_unusable", file=str(file), message=error.strerror, effect="this process uses its own")
        return secrets.token_hex(32).encode()
    return key or secrets.token_hex(32).encode()
