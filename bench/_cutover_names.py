"""Names in `bench cutover` from which a client can tell what made an answer; imports nothing, so clients start soon."""

from __future__ import annotations

from collections.abc import Sequence

LETTERS = "abc"
"""Contents of weights, and of vocabs."""
EVERYWHERE = "i"
"""In front of an item that every vocab has."""


def item_name(letter: str, sid: Sequence[int]) -> str:
    """What an item is called: whoever has id and SID can tell whether they belong together."""
    return letter + "-".join(map(str, sid))


def version_name(number: int, content: int) -> str:
    """What a version is called; the first of all is just v1."""
    return f"v{number}-{LETTERS[content]}"


def content_of(version: str) -> str:
    """The letter of a version's content."""
    return version.rpartition("-")[2] if "-" in version else LETTERS[0]
