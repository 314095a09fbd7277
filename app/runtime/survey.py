"""What lies below a root right now: versions with their fingerprints, what is asked for, and the overlay's text.

A survey reads manifests and file times, never contents: it is cheap enough for every few seconds. Whether the bytes are
what the manifest says is found out before a version is loaded, and again whenever its fingerprint has changed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from app.config import Unread, leads_out, read_overlay, read_small
from app.errors import Rejected
from app.runtime.desired import Ask, asked, places
from app.runtime.retries import PASSING
from app.vocab.manifest import FILE, Found, Kind, Manifest, may_be_complete, read_manifest, versions

MOST: Final = 1 << 20
KINDS: Final[tuple[Kind, ...]] = ("weights", "vocab", "takedowns")


class Candidate(NamedTuple):
    """A version on the disk. manifest: None where it is incomplete or cannot be used; then `problem` says why."""

    found: Found
    fingerprint: str
    manifest: Manifest | None
    problem: Rejected | None

    @property
    def version(self) -> str:
        """Its name."""
        return self.found.version


class Survey(NamedTuple):
    """candidates: newest first · ask: the versions that a pin or release.json names · asked_by: which of the two ·
    problem: why those cannot be read · deployment: the overlay's bytes, or why there are none."""

    candidates: Mapping[Kind, tuple[Candidate, ...]]
    ask: Ask
    asked_by: str | None
    problem: Rejected | None
    deployment: bytes | Unread

    @property
    def fingerprint(self) -> str:
        """Equal surveys have equal fingerprints: what could not be read and can be now makes a difference."""
        digest = hashlib.sha256(repr(self.deployment).encode())
        for kind, found in sorted(self.candidates.items()):
            for one in found:
                digest.update(f"{kind}/{one.version} {one.fingerprint} {one.problem}\n".encode())
        digest.update(f"{sorted(self.ask.items())} {self.asked_by} {self.problem}".encode())
        return digest.hexdigest()


def survey(
    root: Path,
    state_dir: Path,
    known: Survey | None = None,
    kinds: tuple[Kind, ...] = KINDS,
    between: Callable[[], None] = lambda: None,
) -> Survey:
    """Look at a root. known: an earlier survey, whose manifests are not read again where nothing moved · between:
    called between two versions."""
    earlier = {one.found.directory: one for found in known.candidates.values() for one in found} if known else {}
    candidates = {kind: tuple(_look(found, kind, earlier, between) for found in versions(root, kind)) for kind in kinds}
    return Survey(candidates, *_asked(root, state_dir), read_overlay(root))


def asked_anew(known: Survey, root: Path, state_dir: Path) -> Survey:
    """An earlier survey with what is asked for now: two small files are read."""
    ask, asked_by, problem = _asked(root, state_dir)
    return known._replace(ask=ask, asked_by=asked_by, problem=problem)


def _asked(root: Path, state_dir: Path) -> tuple[Ask, str | None, Rejected | None]:
    ask: dict[Kind, str] = {}
    asked_by, problem = None, None
    for file, place in reversed(places(root, state_dir)):  # the stronger one comes last
        try:
            wanted = asked(file, place)
        except Rejected as error:
            problem = error.bare()
            continue
        if wanted:
            ask, asked_by, problem = {**ask, **wanted}, place, None  # what is wrong with a weaker file does not matter
    return ask, asked_by, problem


def _look(found: Found, kind: Kind, earlier: Mapping[Path, Candidate], between: Callable[[], None]) -> Candidate:
    between()
    fingerprint = _fingerprint(found)
    known = earlier.get(found.directory)
    if known is not None and known.fingerprint == fingerprint and not _may_pass(known.problem):
        return known
    if not found.complete:
        return Candidate(found, fingerprint, None, None)
    try:
        return Candidate(found, fingerprint, read_manifest(found.directory, kind), None)
    except Rejected as error:
        removed = not may_be_complete(found.directory)  # meanwhile: nothing is wrong with it
        return Candidate(found, fingerprint, None, None if removed else error.bare())


def _may_pass(problem: Rejected | None) -> bool:
    return problem is not None and problem.code in PASSING


def _fingerprint(found: Found) -> str:
    """Names, sizes, inodes and times of every file of a version, the manifest's bytes, and whether it was listed as
    complete: a manifest that comes between that and this moment must make a difference to the next survey."""
    directory = found.directory
    digest = hashlib.sha256(str(found.complete).encode())
    linked = _is_link(directory)
    outside = linked and leads_out(directory, directory.parent)
    for base, folders, files in () if outside else os.walk(directory):
        folders.sort()
        for name in sorted(files):
            path = f"{base}/{name}"  # a survey follows every hint: a Path of each would be half of its time
            try:
                status = os.stat(path)  # noqa: PTH116
                times = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_mode)
                digest.update(f"{path} {times}\n".encode("utf-8", "surrogateescape"))
            except OSError as error:
                digest.update(f"{path} {error.errno}\n".encode("utf-8", "surrogateescape"))
    digest.update(_manifest(directory, linked=linked) or b"-")
    return digest.hexdigest()


def _manifest(directory: Path, *, linked: bool) -> bytes | None:
    """The manifest's bytes, or those of what a link there leads to inside the versions of a kind."""
    file = directory / FILE
    try:
        return read_small(file, MOST, directory.parent if linked or _is_link(file) else None)
    except OSError:
        return None


def _is_link(path: Path) -> bool:
    """One call, where following links takes one for each folder above, and each gives the interpreter away."""
    try:
        return path.is_symlink()
    except OSError:  # then whoever follows it finds out
        return True
