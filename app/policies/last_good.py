"""What a policy was made of when it last had no error: enough to make it again, whatever became of its file.

A policy is kept as its own text and its ancestors' texts, not as a plan: the same texts compile for another contract,
and a server that starts over a broken file serves what the last one served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from app.policies.source import Source


class _Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: str
    text: str


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """state/last_good/<policy>.json."""

    widebeam: int
    policy: str
    files: dict[str, _Text]


@dataclass(frozen=True, slots=True)
class Kept:
    """A policy's last good texts: its own under `name`, its ancestors' under theirs."""

    name: str
    files: Mapping[str, Source]

    @property
    def source(self) -> Source:
        """The policy's own text."""
        return self.files[self.name]


def keep(name: str, chain: Iterable[str], sources: Mapping[str, Source]) -> Kept:
    """A policy that has just compiled. chain: itself and its ancestors."""
    return Kept(name, {one: sources[one] for one in chain})


def encode(kept: Kept) -> bytes:
    """The text of its file; what compiled is UTF-8."""
    files = {name: _Text(source.file, source.data.decode()) for name, source in sorted(kept.files.items())}
    return msgspec.json.format(msgspec.json.encode(_Document(1, kept.name, files))) + b"\n"


def decode(data: bytes) -> Kept | None:
    """The other way; None for what no server has written (a damaged file costs the last good text, never a start)."""
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if document.widebeam != 1 or document.policy not in document.files:
        return None
    return Kept(document.policy, {name: Source(one.file, one.text.encode()) for name, one in document.files.items()})
