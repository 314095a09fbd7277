"""Bytes to a typed body. Nothing is lost or invented: unknown keys, duplicate keys and loose types are refused."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct

from app.api import media
from app.api.errors import MalformedBody
from app.api.wire import Body, Fact
from app.errors import InvalidRequest

T = TypeVar("T")


class Decoder(ABC):
    """Bytes to one type of body. Raises MalformedBody (not this codec) or InvalidRequest with the field's path."""

    @abstractmethod
    def decode(self, data: bytes) -> Body:
        """Decode a whole body."""


class JsonDecoder(Decoder):
    """Strict JSON: no NaN, no lone surrogates, no trailing text."""

    def __init__(self, kind: type[Body]) -> None:
        self._decoder = msgspec.json.Decoder(kind)

    def decode(self, data: bytes) -> Body:
        """Decode; see Decoder. Embeddings are refused: their bytes would have to be base64."""
        body = _decoded(self._decoder.decode, _ANY_JSON.decode, data, "JSON")
        if body.context.embeddings is not UNSET:
            raise InvalidRequest("embeddings need `Content-Type: application/msgpack`", path="$.context.embeddings")
        # msgspec keeps the last of equal keys. A pair has one colon outside strings, and each pair that was kept can
        # be counted: more colons than pairs are inside strings, or belong to pairs that were lost.
        pairs = count_pairs(body)
        if data.count(b":") > pairs and _STRINGS.sub(b"", data).count(b":") > pairs:
            raise InvalidRequest("an object has the same key twice", path="$")
        return body


class MsgpackDecoder(Decoder):
    """Strict msgpack: valid UTF-8, no trailing bytes."""

    def __init__(self, kind: type[Body]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    def decode(self, data: bytes) -> Body:
        """Decode; see Decoder."""
        body = _decoded(self._decoder.decode, _ANY_MSGPACK.decode, data, "msgpack")
        place = repeated_key(memoryview(data), "$")
        if place is not None:
            raise InvalidRequest("an object has the same key twice", path=place)
        return body


def decoders(kind: type[Body]) -> Mapping[str, Decoder]:
    """A decoder for each media type."""
    return {media.JSON: JsonDecoder(kind), media.MSGPACK: MsgpackDecoder(kind)}


_STRINGS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_FIELD: Final = re.compile(r"(?:unknown|missing required) field `([^`]*)`")


_ANY_JSON: Final = msgspec.json.Decoder(Raw)
_ANY_MSGPACK: Final = msgspec.msgpack.Decoder(Raw)


def _decoded(decode: Callable[[bytes], T], parse: Callable[[bytes], Raw], data: bytes, codec: str) -> T:
    """`decode` builds the type, `parse` only reads to the end: a wrong type early in the text must not hide that the
    text is not this codec at all."""
    try:
        return decode(data)
    except msgspec.ValidationError as error:  # before its parent DecodeError
        message, _, place = str(error).partition(" - at `")
        path = _named(place.removeprefix("key` in `").rstrip("`") or "$", data, codec)
        field = _FIELD.search(message)
        wrong = InvalidRequest(message, path=f"{path}.{field[1]}" if field else path)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise MalformedBody(f"the body is not {codec}: {error}") from None
    try:
        parse(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedBody(f"the body is not {codec}: {error}") from None
    raise wrong


_FACTS: Final[Mapping[str, object]] = {"$.user": float, "$.ctx": Fact}


def _named(path: str, data: bytes, codec: str) -> str:
    """The path of a fault with the name of the entry in it, which msgspec leaves out: `$.user[...]`."""
    table, inside, _ = path.partition("[...]")
    if not inside or table not in _FACTS:
        return path
    read = msgspec.json.decode if codec == "JSON" else msgspec.msgpack.decode
    try:
        entries = read(read(data, type=dict[str, Raw])[table.removeprefix("$.")], type=dict[str, Raw])
    except msgspec.DecodeError:  # another key is no text: the path without a name will do
        return path
    for name, value in entries.items():
        try:
            read(value, type=_FACTS[table])
        except msgspec.DecodeError:
            return f"{table}.{name}"
    return path


def count_pairs(value: Struct | dict[str, object]) -> int:
    """Key-value pairs of a decoded object and the objects below it: set fields of structs, entries of dicts."""
    if isinstance(value, Struct):
        inner = [getattr(value, name) for name in value.__struct_fields__]
        inner = [field for field in inner if field is not UNSET]
    else:
        inner = list(value.values())
    return len(inner) + sum(count_pairs(each) for each in inner if isinstance(each, Struct | dict))


_RAW_MAP: Final = msgspec.msgpack.Decoder(dict[str, Raw])


def repeated_key(data: memoryview, path: str) -> str | None:
    """The path of the first msgpack map that has a key twice, or None. `data` decoded as a Body: maps have text keys,
    are at most four deep and are in no array."""
    size = _map_size(data)
    if size is None:
        return None
    entries = _RAW_MAP.decode(data)
    if len(entries) != size:
        return path
    for key, value in entries.items():
        found = repeated_key(memoryview(value), f"{path}.{key}")
        if found is not None:
            return found
    return None


def _map_size(data: memoryview) -> int | None:
    """Entries that a msgpack map's header announces; None where the value is no map."""
    head = data[0]
    if 0x80 <= head <= 0x8F:
        return head & 0x0F
    if head == 0xDE:
        return int.from_bytes(data[1:3], "big")
    return int.from_bytes(data[1:5], "big") if head == 0xDF else None
