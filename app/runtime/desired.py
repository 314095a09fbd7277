"""Which versions are wanted: the pin, else release.json, else the newest complete one of each kind (api.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from app.errors import Rejected
from app.vocab.manifest import Found, Kind, versions

MAX_FILE = 1 << 20


class Wish(NamedTuple):
    """The versions of a kind to try, best first. `asked_by` names the file that asks for exactly one, or is None."""

    found: tuple[Found, ...]
    asked_by: str | None


def wishes(root: Path, state_dir: Path, kind: Kind) -> Wish:
    """What to load of a kind.

    Raises Rejected for a pin or release.json that cannot be read, and for an asked version that is not there.
    """
    complete = tuple(found for found in versions(root, kind) if found.complete)
    for file, place in ((state_dir / "pin.json", "state/pin.json"), (root / "release.json", "release.json")):
        version = _asked(file, place).get(kind)
        if version is not None:
            chosen = tuple(found for found in complete if found.version == version)
            if not chosen:
                raise Rejected("no_such_version", f"{kind} {version!r} is not there, or not complete", location=place)
            return Wish(chosen, place)
    return Wish(complete, None)


def _asked(file: Path, place: str) -> dict[Literal["weights", "vocab", "takedowns"], str]:
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_FILE + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise Rejected("unreadable", f"cannot be read: {error.strerror}", location=place) from error
    if len(text) > MAX_FILE:
        raise Rejected("too_large", f"more than {MAX_FILE} bytes", location=place)
    try:
        return msgspec.json.decode(text, type=dict[Literal["weights", "vocab", "takedowns"], str])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Rejected("bad_json", str(error) or "nested too deeply", location=place) from error
