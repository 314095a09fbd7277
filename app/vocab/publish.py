"""A new version of anything, made so that nobody sees half of it: a hidden directory, the manifest last, a rename."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from app.errors import Rejected
from app.vocab.manifest import (
    CHUNK,
    FILE,
    AnyKind,
    FileEntry,
    Kind,
    check_version,
    encode,
    home,
    make_manifest,
    versions,
)


class Published(NamedTuple):
    """What a publication has made."""

    kind: AnyKind
    version: str
    digest: str
    directory: Path


@dataclass(frozen=True, slots=True)
class Draft:
    """Files of a version that is being made; every byte is hashed on its way to the disk."""

    directory: Path
    files: dict[str, FileEntry] = field(default_factory=dict)

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write one file from its pieces."""
        digest, size = hashlib.sha256(), 0
        with (self.directory / name).open("xb") as stream:
            for piece in pieces:
                digest.update(piece)
                size += len(piece)
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        self.files[name] = FileEntry(size, digest.hexdigest())

    def copy(self, source: Path, name: str) -> None:
        """Copy one file. Raises Rejected where it cannot be read."""
        try:
            with source.open("rb", buffering=0) as stream:
                self.write(name, iter(lambda: stream.read(CHUNK), b""))
        except OSError as error:
            raise Rejected("file_unreadable", f"cannot be copied: {error.strerror}", location=name) from error


def next_version(root: Path, kind: AnyKind) -> str:
    """`v1`, or the newest version's name with its last number one higher (`v9` -> `v10`, `2024-06` -> `2024-07`)."""
    taken = {found.version for found in versions(root, kind)}
    newest = next((found.version for found in versions(root, kind)), "v0")
    head, digits = _split(newest)
    number = int(digits or "1") + 1
    while (name := f"{head}{number:0{len(digits)}d}") in taken:
        number += 1
    return name


def _split(version: str) -> tuple[str, str]:
    head = version.rstrip("0123456789")
    return (head, version[len(head) :]) if head != version else (f"{version}-", "")


def check_free(root: Path, kind: AnyKind, version: str) -> None:
    """Raise Rejected for a name that cannot be a version, or that exists: versions are never overwritten."""
    check_version(version)
    if os.path.lexists(home(root, kind) / version):
        place = f"{home(root, kind).name}/{version}"
        raise Rejected("version_exists", "exists already; versions are never overwritten", location=place)


@contextmanager
def draft(root: Path, kind: AnyKind) -> Iterator[Draft]:
    """An empty hidden directory beside the versions; whatever is left of it at the end is removed."""
    home(root, kind).mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=".tmp-", dir=home(root, kind)))
    directory.chmod(0o755)
    try:
        yield Draft(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def commit(made: Draft, kind: AnyKind, version: str, made_by: str, requires: Mapping[Kind, list[str]]) -> Published:
    """Write the manifest and give the directory its name. Raises Rejected("version_exists")."""
    folder = made.directory.parent
    manifest = make_manifest(kind, version, made.files, made_by, requires)
    with (made.directory / f"{FILE}.tmp").open("xb") as stream:
        stream.write(encode(manifest))
        stream.flush()
        os.fsync(stream.fileno())
    (made.directory / f"{FILE}.tmp").rename(made.directory / FILE)
    _sync(made.directory)
    check_free(folder.parent, kind, version)
    try:
        made.directory.rename(folder / version)
    except OSError as error:
        message = f"cannot take its place: {error.strerror}"
        raise Rejected("version_exists", message, location=f"{folder.name}/{version}") from error
    _sync(folder)
    return Published(kind, version, manifest.digest, folder / version)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
