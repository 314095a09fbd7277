"""One large JSON object or array, read member by member: neither the text nor its objects are ever held as a whole.

Members are found by a regular expression over the bytes (strings, scalars, and arrays without arrays inside are all
that catalogues hold); what a member says is then decoded by msgspec. Unlike a decoded dictionary this keeps keys that
occur twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from app.vocab.formats.source import MAX_RECORD, Source, counted, decode_each, pieces

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_VALUE = rb"(?:\[(?:[^\"\[\]]++|" + _STRING + rb")*+\]|" + _STRING + rb"|[^\"\[\]{},\s]++)"
_MEMBER = re.compile(rb"\s*+(" + _STRING + rb")\s*+:\s*+(" + _VALUE + rb")\s*+([,}])", re.DOTALL)
_ELEMENT = re.compile(rb"\s*+()(" + _VALUE + rb")\s*+([,\]])", re.DOTALL)
_KEYS = msgspec.json.Decoder(list[str])


def first_byte(source: Source) -> bytes:
    """The first byte of a text file that is no white space; empty for an empty file."""
    for piece in pieces(source.path):
        if text := piece.lstrip():
            return text[:1]
    return b""


def members(source: Source) -> Iterator[tuple[int, list[str], list[bytes]]]:
    """The members of the object in a file, some thousands at a time: (number of the first, keys, raw values)."""
    for number, keys, values in _scan(source, _MEMBER, b"{", b"}"):
        yield number, decode_each(source, keys, str, _KEYS, counted("item", number)), values


def elements(source: Source) -> Iterator[tuple[int, list[bytes]]]:
    """The elements of the array that a file holds: (number of the first, raw values)."""
    for number, _, values in _scan(source, _ELEMENT, b"[", b"]"):
        yield number, values


def _scan(
    source: Source, pattern: re.Pattern[bytes], opening: bytes, closing: bytes
) -> Iterator[tuple[int, list[bytes], list[bytes]]]:
    number, text, at, state = 1, b"", 0, "before"
    for piece in pieces(source.path):
        text, at = text[at:] + piece, 0
        if state == "before":
            text = text.lstrip()
            if not text:
                continue
            if text[:1] != opening:
                raise source.refuse("bad_json", f"the file does not begin with `{opening.decode()}`")
            at, state = 1, "empty"
        if state == "empty" and text[at:].lstrip()[:1] == closing:
            at, state = text.index(closing, at) + 1, "after"
        keys, values = [], []
        while state in {"empty", "inside"} and (match := pattern.match(text, at)):
            keys.append(match[1])
            values.append(match[2])
            at, state = match.end(), "after" if match[3] == closing else "inside"
        if values:
            yield number, keys, values
            number += len(values)
        if state == "after" and text[at:].strip():
            raise source.refuse("bad_json", "something follows the end of the JSON value", f"item {number}")
        if len(text) - at > MAX_RECORD:
            raise source.refuse(
                "bad_json", f"more than {MAX_RECORD} bytes that are no item of this format", f"item {number}"
            )
    if state != "after":
        found = text[at : at + 40].decode("utf-8", "replace").strip()
        raise source.refuse("bad_json", f"the JSON is cut or no item of this format: `{found}`", f"item {number}")
