"""The two media types: which one a body is in, which one an answer may be in, and how to write it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Final

import msgspec

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
ALIASES: Final = {MSGPACK: (MSGPACK, "application/x-msgpack", "application/vnd.msgpack"), JSON: (JSON,)}

LONGEST: Final = 2048
"""Characters of an Accept or Content-Type that are read: browsers send two hundred, and many small ranges take long."""

Headers = Iterable[tuple[bytes, bytes]]
"""Of an ASGI scope: names in lower case."""

ENCODE: Final[Mapping[str, Callable[[object], bytes]]] = {
    JSON: msgspec.json.Encoder().encode,
    MSGPACK: msgspec.msgpack.Encoder().encode,
}


def header(headers: Headers, name: bytes) -> str:
    """The value of a header, joined by commas where it is repeated; "" where it is absent."""
    found = [value for key, value in headers if key == name]
    return b",".join(found).decode("latin-1") if found else ""


@lru_cache(maxsize=64)
def body_media(content_type: str) -> str | None:
    """The media type of a body by its Content-Type: none given = JSON; None = not one of ours, or too long."""
    if not content_type:
        return JSON
    if len(content_type) > LONGEST:
        return None
    kind, _, parameters = content_type.lower().partition(";")
    charset = [value.strip(' "') for key, _, value in (p.partition("=") for p in parameters.split(";"))
               if key.strip() == "charset"]  # fmt: skip
    if any(value not in {"utf-8", "utf8"} for value in charset):
        return None
    return next((media for media, names in ALIASES.items() if kind.strip() in names), None)


@lru_cache(maxsize=64)
def answer_media(accept: str) -> str | None:
    """The media type for an answer by Accept: msgpack where it is asked for by name, else JSON where it is allowed;
    None = neither is allowed, or it is too long. Without Accept: JSON."""
    if not accept:
        return JSON
    if len(accept) > LONGEST:
        return None
    best = {media: _preference(accept.lower(), names) for media, names in ALIASES.items()}
    media = max((JSON, MSGPACK), key=lambda media: best[media])
    return media if best[media][0] > 0 else None


def _preference(accept: str, names: tuple[str, ...]) -> tuple[float, int]:
    """(q, how precisely it is named) of the most precise range of `accept` that fits one of the names."""
    found = (0, 0.0)
    for part in accept.split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        precise = 3 if kind in names else {"application/*": 2, "*/*": 1}.get(kind, 0)
        if precise > found[0]:
            found = (precise, _quality(parameters))
    return found[1], found[0]


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                return min(max(float(value), 0.0), 1.0)
            except ValueError:
                return 0.0
    return 1.0
