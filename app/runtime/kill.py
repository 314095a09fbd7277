"""The kill switch: names of policies and experiments that must not serve. It works when everything else is broken.

Two sources, which add up: the file policies/KILL (a name a line, `#` starts a comment, `*` = everything) and what an
operator posted, kept under state/. Nothing is compiled and nothing else is read on this path. What the file listed last
is kept under state/, too: a file that cannot be used at a start lists what it listed before.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from app.config import read_small
from app.errors import InvalidRequest, LeadsOut
from app.runtime import state_dir

FILE: Final = "KILL"
MAX_BYTES: Final = 64 * 1024
MAX_NAMES: Final = 1000
NO_FOLDER: Final = "is in a folder that is not there"
MAX_NAME: Final = 128


class Read(NamedTuple):
    """What the disk says: listed a text = why it cannot be used, posted None = cannot be read. posts: how often
    somebody had posted before."""

    listed: frozenset[str] | str
    posted: frozenset[str] | None
    posts: int


class KillSwitch:
    """What is killed now. `take(read())` follows the disk; a file that cannot be read changes nothing."""

    def __init__(self, policies: Path, state: Path) -> None:
        self._file, self._state = policies / FILE, state / state_dir.KILLED
        self._kept = state / state_dir.KILL_LIST
        self._before = _read_names(self._kept) if os.path.lexists(self._kept) else None  # None: nobody knows
        self._listed: frozenset[str] = self._before or frozenset()
        self._posted: frozenset[str] = frozenset()
        self._posts = 0
        self.unreadable = False
        self.unlistable = ""
        """Why the KILL file cannot be used; "" where it can be."""
        self.unkept = ""
        """Why what it lists is not kept for the next start; "" where it is."""
        self.take(self.read())

    @property
    def names(self) -> frozenset[str]:
        """Everything that is killed."""
        return self._listed | self._posted

    def read(self) -> Read:
        """Both sources as the disk has them; any thread, one at a time. What is listed is kept."""
        posts, listed = self._posts, _read_list(self._file)
        if isinstance(listed, frozenset) and listed != self._before:
            self._keep(listed)
        return Read(listed, _read_names(self._state), posts)

    def _keep(self, listed: frozenset[str]) -> None:
        try:
            if listed or os.path.lexists(self._kept):
                state_dir.write(self._kept, msgspec.json.encode(sorted(listed)) + b"\n")
        except OSError as error:
            self.unkept = f"cannot be written: {error.strerror}"
        else:
            self._before, self.unkept = listed, ""

    def take(self, read: Read) -> frozenset[str]:
        """Let a read count; the names now. Where somebody posted after it was begun, the post counts."""
        self._listed, self.unlistable = (
            (self._listed, read.listed) if isinstance(read.listed, str) else (read.listed, "")
        )
        self.unreadable = read.posted is None
        if read.posted is not None and read.posts == self._posts:
            self._posted = read.posted
        return self.names

    def post(self, add: Iterable[str], remove: Iterable[str]) -> frozenset[str]:
        """Kill and revive names, on the disk before it counts. Names that the KILL file lists stay killed.

        Raises InvalidRequest for what cannot be a name, OSError where it cannot be kept.
        """
        add, remove = _checked(add), _checked(remove)
        with state_dir.alone(self._state.parent):
            known = _read_names(self._state)  # another server on this root may have been told something meanwhile
            posted = ((self._posted if known is None else known) | add) - remove
            if len(posted) > MAX_NAMES:
                raise InvalidRequest(f"more than {MAX_NAMES} names", path="$.kill")
            state_dir.write(self._state, msgspec.json.encode(sorted(posted)) + b"\n")
        self._posts += 1  # first: a read from before that is taken in this moment must not count
        self._posted = posted
        self.unreadable = False
        return self.names

    @property
    def instead(self) -> str:
        """What counts in place of a KILL file that cannot be used."""
        return "what it listed before counts" if self._before is not None else "whom it lists is not known"

    def document(self) -> list[dict[str, str]]:
        """What is killed, and where that is said."""
        both = [(name, f"policies/{FILE}") for name in self._listed]
        both += [(name, f"state/{state_dir.KILLED}") for name in self._posted]
        if self.unlistable:
            both.append(("?", f"policies/{FILE}, which {self.unlistable}: {self.instead}"))
        if self.unreadable:
            both.append(("?", f"state/{state_dir.KILLED}, which cannot be read: who was killed there is not known"))
        return [{"name": name, "by": by} for name, by in sorted(both)]


def _checked(names: Iterable[str]) -> frozenset[str]:
    found = frozenset(names)
    bad = next((name for name in sorted(found) if not 1 <= len(name) <= MAX_NAME or not name.isprintable()), None)
    if bad is not None:
        raise InvalidRequest(f"{bad[:MAX_NAME]!r} is no name of a policy or experiment", path="$.kill")
    return found


def _read_list(file: Path) -> frozenset[str] | str:
    """The names of a KILL file below a root; empty where there is none, or why it cannot be used."""
    try:
        data = read_small(file, MAX_BYTES + 1, file.parent.parent)
    except FileNotFoundError:  # a folder that is being replaced revives nobody
        return frozenset() if file.parent.is_dir() else NO_FOLDER
    except OSError as error:
        return str(error.strerror) if isinstance(error, LeadsOut) else f"cannot be read ({error.strerror})"
    if len(data) > MAX_BYTES:
        return f"has more than {MAX_BYTES} bytes"
    words = (line.partition("#")[0].strip() for line in data.decode("utf-8", "replace").splitlines())
    return frozenset(word for word in words if word and len(word) <= MAX_NAME)


def _read_names(file: Path) -> frozenset[str] | None:
    """Names that the server has written down; none where it has not, None where they cannot be read."""
    if not os.path.lexists(file):
        return frozenset()
    data = state_dir.read(file)
    try:
        return None if data is None else frozenset(msgspec.json.decode(data, type=list[str]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
