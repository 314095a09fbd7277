"""What changed below a deployment root: directory events are hints, digests are the truth.

A scan says what a folder holds; a watch only says when a scan is worth while. Every consumer scans by the clock as
well, so a file system without events, a dead watch or an exhausted inotify costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import watchfiles

from app.runtime.background import Background
from app.runtime.logs import Log

T = TypeVar("T")

MAX_HASHED: Final = 1 << 20
MAX_FILES: Final = 20_000
DEPTH: Final = 2
STEP_MS: Final = 20
DEBOUNCE_MS: Final = 60
REARM_S: Final = 2.0
RETRY_S: Final = 15.0
AGAIN_S: Final = 0.05
NO_TEXT: Final = "Unable to decode path"
"""What ends a watch where a file has a name that is no text: something has changed, and nothing is wrong with it."""
MAX_PLACES: Final = 512


class Listing(NamedTuple):
    """The files of a folder at one moment. present: the folder is there · files: (relative name, size, fingerprint)."""

    present: bool
    files: tuple[tuple[str, int, str], ...] = ()

    def sha(self, name: str) -> str | None:
        """The fingerprint of a file: the SHA-256 of its content."""
        return next((sha for file, _, sha in self.files if file == name), None)


def scan(directory: Path) -> Listing:
    """Names, sizes and digests of the files of a folder and its subfolders, links followed, hidden names passed over.

    Of a file above 1 MiB the first MiB counts, with its size and times. What cannot be read is listed as unreadable, so
    that a change of permissions is a change. Nothing is opened that a link puts outside: a folder that leads out of the
    one that it stands in counts as missing, what leads out of the folder is only listed. Never raises for what the disk
    says.
    """
    try:
        if not directory.is_dir() or _leads_out(directory, directory.parent):
            return Listing(False)
    except OSError:  # nobody may look into the root
        return Listing(False)
    return Listing(True, tuple(sorted(_files(directory, directory, "", DEPTH))))


def _leads_out(path: Path, folder: Path) -> bool:
    """Whether a path is a link to a place outside of a folder."""
    if not path.is_symlink():
        return False
    try:
        return not path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a link that leads to itself
        return True


def _files(whole: Path, directory: Path, prefix: str, depth: int) -> Iterator[tuple[str, int, str]]:
    try:
        names = sorted(os.listdir(directory))[:MAX_FILES]  # noqa: PTH208  names alone: no Path is needed for each
    except OSError as error:
        yield (prefix, -1, f"unreadable: {error.errno}")
        return
    for name in names:
        if name.startswith("."):
            continue
        path = directory / name
        try:
            status = path.stat()
            if _leads_out(path, whole):
                yield (f"{prefix}{name}", -1, "outside")
            elif stat.S_ISDIR(status.st_mode):
                if depth > 1:
                    yield from _files(whole, path, f"{prefix}{name}/", depth - 1)
            elif stat.S_ISREG(status.st_mode):
                yield (f"{prefix}{name}", *_fingerprint(path))
            else:
                yield (f"{prefix}{name}", -1, "special")
        except OSError as error:
            yield (f"{prefix}{name}", -1, f"unreadable: {error.errno}")


def _fingerprint(path: Path) -> tuple[int, str]:
    with path.open("rb") as stream:
        data = stream.read(MAX_HASHED)
        status = os.fstat(stream.fileno())
    digest = hashlib.sha256(data)
    if status.st_size > len(data):
        digest.update(f"{status.st_size} {status.st_mtime_ns} {status.st_ino}".encode())
    return status.st_size, digest.hexdigest()


async def settled(
    directory: Path,
    read: Callable[[Path], T],
    background: Background,
    quiet_s: float,
    before: Listing | None = None,
    tries: int = 20,
) -> tuple[Listing, T] | None:
    """Read a folder between two scans that agree and lie `quiet_s` apart; None where it never stood still.

    read    called in the background; its result belongs to the listing
    before  a scan that has just been made
    """

    def look() -> tuple[T, Listing]:
        return read(directory), scan(directory)

    before = before or await background.run(lambda: scan(directory))
    for _ in range(tries):
        await asyncio.sleep(quiet_s)
        result, after = await background.run(look)
        if before == after:
            return after, result
        before = after
    return None


class Watch:
    """Hears about changes below a root and says so to everybody who asked.

    It watches the root itself, the named folders in it and their subfolders, none of them recursively: a folder that is
    replaced, removed or made again is seen in its parent, and then the watch is armed anew.
    """

    def __init__(self, root: Path, folders: Sequence[str], log: Log, *, events: bool = True) -> None:
        """events: False = do not ask the operating system; whoever scans by the clock still sees everything."""
        self._root, self._folders, self._log, self._events = root, tuple(folders), log, events
        self._hints: list[asyncio.Event] = []
        self._armed = False
        self._rearmed = 0
        self._problem: str | None = None

    def hint(self) -> asyncio.Event:
        """An event of one's own that is set after anything moved; whoever waits for it clears it."""
        event = asyncio.Event()
        self._hints.append(event)
        return event

    def status(self) -> dict[str, object]:
        """mode: events, or polling with the reason; rearmed: how often the watch was set up again."""
        mode = "events" if self._armed else "polling"
        shown: dict[str, object] = {"mode": mode, "rearmed": max(0, self._rearmed - 1)}
        reason = self._problem if self._events else "events are switched off"
        return shown if self._armed or reason is None else {**shown, "reason": reason}

    async def run(self) -> None:
        """Watch for ever. Whatever ends a watch is logged once, and it is armed again."""
        while self._events:
            try:
                await self._watch_once()
                self._problem = None
            except ExceptionGroup as group:  # the backend's
                if NO_TEXT not in str(group.exceptions[0]):
                    self._say(str(group.exceptions[0]))
            except (OSError, RuntimeError) as error:  # inotify used up, a root that is not there, a broken backend
                self._say(str(error) or type(error).__name__)
            finally:
                self._armed = False
            self._tell()
            await asyncio.sleep(RETRY_S if self._problem else AGAIN_S)

    async def _watch_once(self) -> None:
        """One arming: returns when the folders are no longer the ones that are watched."""
        places = _places(self._root, self._folders)
        if not places:
            raise FileNotFoundError(f"{self._root.name} is not there")
        stop = asyncio.Event()
        changes = watchfiles.awatch(
            *(path for path, _ in places),
            watch_filter=None,
            debounce=DEBOUNCE_MS,
            step=STEP_MS,
            stop_event=stop,
            rust_timeout=int(1e3 * REARM_S),
            yield_on_timeout=True,
            recursive=False,
        )
        self._armed, self._rearmed, self._problem = True, self._rearmed + 1, None
        self._tell()  # what happened before the watch was armed
        try:
            async for found in changes:
                if found:
                    self._tell()
                if _places(self._root, self._folders) != places:
                    return
        finally:
            stop.set()
            await changes.aclose()

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            self._log.warning("watch_failed", reason=problem, fallback="polling")
        self._problem = problem

    def _tell(self) -> None:
        for event in self._hints:
            event.set()


def _places(root: Path, folders: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """The directories to watch with their inodes: root, folders and their visible subfolders, where they are there."""
    wanted = [root, *(root / name for name in folders)]  # the folders first: of very many versions, some will do
    for name in folders:
        try:
            wanted += [Path(entry.path) for entry in os.scandir(root / name) if _may_be_watched(entry.name)]
        except OSError:
            continue
    return tuple(place for path in wanted[:MAX_PLACES] if (place := _directory(path)) is not None)


def _may_be_watched(name: str) -> bool:
    """Hidden folders hold nothing of ours, nor do those whose names are no text, which nobody can watch."""
    return not name.startswith(".") and name.isprintable()


def _directory(path: Path) -> tuple[str, int] | None:
    """None where it is none, or one that may not be watched: the watch of all others would fail with it."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (str(path), status.st_ino) if stat.S_ISDIR(status.st_mode) and os.access(path, os.R_OK) else None
